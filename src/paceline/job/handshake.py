"""Mutual authentication of two processes that know the same key, which is never sent.

Each side chooses a nonce and proves that it can compute the HMAC-SHA-256 of both nonces and its role under
the key; so a proof is of no use a second time, or for the other role. A listener handles all callers at the
same time. Invariants: messages have a fixed size, so a stranger decides nothing about memory, and
comparisons take constant time. A caller has `HELLO_SECONDS` for its whole greeting; a caller that is slow,
sends anything else or has no key is closed and counted, and delays no other. A caller that has received its
challenge is never closed to make room for one that has sent nothing.
Source: challenge and response with both nonces, ISO/IEC 9798-4 (mutual authentication by a MAC).
"""

from __future__ import annotations

import errno
import hashlib
import hmac
import secrets
import selectors
import socket
import struct
import time
from collections.abc import Callable, Container
from contextlib import ExitStack, suppress
from types import TracebackType
from typing import Self

from paceline.errors import CommunicationError

NONCE_BYTES = 32
PROOF_BYTES = 32
_HELLO = struct.Struct("!4sI32s")
_MAGIC = b"PCL1"
HELLO_BYTES = _HELLO.size
CHALLENGE_BYTES = NONCE_BYTES + PROOF_BYTES
WELCOME, REFUSED = b"\x01", b"\x00"


def needs_encryption(tls: str, num_nodes: int) -> bool:
    """Return whether connections between nodes are encrypted after the authentication.

    Args:
        tls: "on", "off", or "auto" (encrypted if the job has several nodes).
    """
    return num_nodes > 1 if tls == "auto" else tls == "on"


def proof_role(side: bytes, tls: bool) -> bytes:
    """Return the role that a proof is computed for: the side, and whether it encrypts afterwards."""
    # with tls in the proof, nobody in between can talk the two sides out of encryption
    return side + b" tls" if tls else side


def make_nonce() -> bytes:
    """Return random bytes that have never been used."""
    return secrets.token_bytes(NONCE_BYTES)


def compute_proof(token: str, role: bytes, rank: int, first: bytes, second: bytes) -> bytes:
    """Return the proof that only a process with the token can compute.

    Args:
        role: role of the prover; a proof of one side is not valid for the other.
        rank: the rank that the caller claims.
        first, second: the nonces of the caller and of the server.
    """
    text = role + rank.to_bytes(4, "big") + first + second
    return hmac.digest(token.encode(), text, hashlib.sha256)


def verify_proof(proof: bytes, token: str, role: bytes, rank: int, first: bytes, second: bytes) -> bool:
    """Return whether a proof is valid, in constant time."""
    return hmac.compare_digest(proof, compute_proof(token, role, rank, first, second))


def encode_hello(rank: int, nonce: bytes) -> bytes:
    """Return the first message of a caller."""
    return _HELLO.pack(_MAGIC, rank, nonce)


def decode_hello(message: bytes) -> tuple[int, bytes]:
    """Return rank and nonce; ValueError if the message is not a hello."""
    if len(message) != HELLO_BYTES:
        raise ValueError("not a hello")
    magic, rank, nonce = _HELLO.unpack(message)
    if magic != _MAGIC:
        raise ValueError("not a hello")
    return rank, nonce


VISITOR_OFFSET = 1 << 30
"""A process that only reads a value, without becoming a member, has the number `rank + VISITOR_OFFSET`."""

HELLO_SECONDS = 5.0
_MAX_SILENT, _MAX_CHALLENGED, _MAX_REJECTED_RANKS = 128, 256, 128
_NO_FILE_SECONDS = 0.01
CALLER_ROLE, SERVER_ROLE = b"caller", b"called"
OTHER_KEY, OTHER_TLS = "a different token", "a different security.tls"


_MAX_LINE_LENGTH = 300


def plain_line(text: str) -> str:
    """Return a text of limited length without control characters, as strangers can choose it."""
    return "".join(letter if letter.isprintable() else "?" for letter in text[:_MAX_LINE_LENGTH])


class ContainedErrors:
    """A context manager that logs an unexpected error of its block and goes on behind it.

    For the threads that serve all ranks of a job: no caller may end them, whatever error it has found a way
    to. Errors that are expected are handled inside the block.

    Args:
        log: receives a line.
        consequence: how the line begins.
    Attributes:
        occurred: the block has ended with an error.
    """

    def __init__(self, log: Callable[[str], object], consequence: str) -> None:
        self._log, self._consequence = log, consequence
        self.occurred = False

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> bool:
        self.occurred = isinstance(error, Exception)
        if self.occurred:
            self._log(plain_line(f"{self._consequence} {error!r}"))
        return self.occurred


class _PendingCaller:
    """A caller that has not proved yet that it knows the key."""

    def __init__(self, connection: socket.socket, now: float) -> None:
        self.connection, self.expires = connection, now + HELLO_SECONDS
        self.received = b""
        self.rank = -1
        self.caller_nonce = self.server_nonce = b""

    def read(self) -> bool:
        """Read what has arrived of the present message; False if the caller is gone."""
        num_bytes = PROOF_BYTES if self.server_nonce else HELLO_BYTES
        data = self.connection.recv(num_bytes - len(self.received))
        self.received += data
        return bool(data)

    def send_challenge(self, token: str, tls: bool) -> None:
        """Answer a complete hello with a challenge."""
        self.rank, self.caller_nonce = decode_hello(self.received)
        self.server_nonce, self.received = make_nonce(), b""
        proof = compute_proof(
            token, proof_role(SERVER_ROLE, tls), self.rank, self.caller_nonce, self.server_nonce
        )
        if self.connection.send(self.server_nonce + proof) != CHALLENGE_BYTES:
            raise OSError("the caller does not read")

    def has_valid_proof(self, token: str, tls: bool) -> bool:
        """Return whether the complete proof of the caller is valid, for a caller with this `tls`."""
        role = proof_role(CALLER_ROLE, tls)
        return verify_proof(self.received, token, role, self.rank, self.caller_nonce, self.server_nonce)


class AuthenticatingListener:
    """A listening socket that accepts callers that prove that they know the key.

    When there are too many callers, the oldest one that has not sent a whole hello is closed. Callers that
    have received their challenge only make room for each other, also the oldest first: it has had the most
    time for its answer, which takes one round trip.

    Args:
        listener: the socket, which is made non-blocking.
        token: the key of the job.
        wanted: ranks that are accepted, each once.
        is_known: returns whether a rank has been accepted before, in addition to those in `accepted`.
        tls: whether accepted callers encrypt the connection next.
        log: receives a line for each caller that is closed because of an unexpected error.
    Attributes:
        accepted: the connections of accepted callers by rank.
        num_rejected: number of callers that were closed.
        rejected_ranks: ranks with another key or another `tls`, with the reason. A stranger can claim any
            rank, so their number is limited.
    """

    def __init__(
        self,
        listener: socket.socket,
        token: str,
        wanted: Container[int],
        is_known: Callable[[int], bool] = lambda rank: False,
        *,
        tls: bool = False,
        log: Callable[[str], object],
    ) -> None:
        self._listener, self._token, self._wanted, self._is_known = listener, token, wanted, is_known
        self._tls, self._log = tls, log
        self._pending: dict[socket.socket, _PendingCaller] = {}
        self._selector = selectors.DefaultSelector()
        listener.setblocking(False)
        self._selector.register(listener, selectors.EVENT_READ)
        self.accepted: dict[int, socket.socket] = {}
        self.num_rejected = 0
        self.rejected_ranks: dict[int, str] = {}

    def receive(self, seconds: float, clock: Callable[[], float] = time.monotonic) -> None:
        """Handle what callers send, waiting for at most `seconds` until one sends something."""
        for key, _ in self._selector.select(min(seconds, HELLO_SECONDS / 4)):
            if key.fileobj is self._listener:
                self._accept(clock())
            # a caller that an earlier event of this batch has closed is not pending any more
            elif isinstance(key.fileobj, socket.socket) and key.fileobj in self._pending:
                self._handle(self._pending[key.fileobj])
        for caller in [caller for caller in self._pending.values() if clock() > caller.expires]:
            self._reject(caller)

    def close_accepted(self) -> None:
        """Close the connections of accepted callers."""
        for connection in self.accepted.values():
            connection.close()

    def close(self) -> None:
        """Reject pending callers; accepted connections stay open."""
        for caller in [*self._pending.values()]:
            self._reject(caller)
        self._selector.close()

    def _accept(self, now: float) -> None:
        try:
            connection, _ = self._listener.accept()
        except OSError as error:
            if error.errno in (errno.EMFILE, errno.ENFILE):  # otherwise, the caller has hung up already
                self._make_room(0, 0)
                time.sleep(_NO_FILE_SECONDS)  # the selector would return at once, again and again
            return
        connection.setblocking(False)
        self._make_room(_MAX_SILENT, _MAX_CHALLENGED)
        self._pending[connection] = _PendingCaller(connection, now)
        self._selector.register(connection, selectors.EVENT_READ)

    def _make_room(self, max_silent: int, max_challenged: int) -> None:
        """Close the oldest caller that has received no challenge if there are too many of these, and the
        oldest of the others if there are too many of those.
        """
        silent = [caller for caller in self._pending.values() if not caller.server_nonce]
        challenged = [caller for caller in self._pending.values() if caller.server_nonce]
        if silent and len(silent) >= max_silent:
            self._reject(silent[0])
        elif challenged and len(challenged) >= max_challenged:
            self._reject(challenged[0])

    def _handle(self, caller: _PendingCaller) -> None:
        with ContainedErrors(self._log, "a caller was rejected because of") as errors:
            self._read_and_answer(caller)
        if errors.occurred:
            self._reject(caller)

    def _read_and_answer(self, caller: _PendingCaller) -> None:
        try:
            if not caller.read():
                self._reject(caller)
            elif not caller.server_nonce and len(caller.received) == HELLO_BYTES:
                caller.send_challenge(self._token, self._tls)
                # to the end, so that callers with a challenge are in the order in which they received it
                self._pending[caller.connection] = self._pending.pop(caller.connection)
            elif caller.server_nonce and len(caller.received) == PROOF_BYTES:
                self._decide(caller)
        except BlockingIOError:
            return
        except (OSError, ValueError):
            self._reject(caller)

    def _decide(self, caller: _PendingCaller) -> None:
        is_valid = caller.has_valid_proof(self._token, self._tls)
        known = caller.rank in self.accepted or self._is_known(caller.rank)
        is_welcome = is_valid and caller.rank in self._wanted and not known
        caller.connection.send(WELCOME if is_welcome else REFUSED)
        if not is_welcome:
            if (
                not is_valid
                and caller.rank in self._wanted
                and len(self.rejected_ranks) < _MAX_REJECTED_RANKS
            ):
                has_key = caller.has_valid_proof(self._token, not self._tls)
                self.rejected_ranks[caller.rank] = OTHER_TLS if has_key else OTHER_KEY
            self._reject(caller)
            return
        self._drop(caller)
        self.accepted[caller.rank] = caller.connection

    def _reject(self, caller: _PendingCaller) -> None:
        self.num_rejected += 1
        self._drop(caller)
        caller.connection.close()

    def _drop(self, caller: _PendingCaller) -> None:
        if self._pending.pop(caller.connection, None) is not None:
            self._selector.unregister(caller.connection)


def connect_authenticated(
    address: str, port: int, rank: int, token: str, seconds: float, server: str, *, tls: bool = False
) -> socket.socket:
    """Connect to a listener and authenticate both sides; returns the connection.

    Args:
        server: description of the listener, for errors.
        tls: whether the connection is encrypted afterwards; both sides must agree.
    Raises:
        CommunicationError: the server has another key or another `tls`, the rank has joined already, or
            another process is in between.
        OSError: the server cannot be reached, hangs up, or does not respond.
    """
    connection = _authenticate(address, port, rank, token, seconds, server, tls)
    if not tls:
        return connection
    from paceline.job.tls import encrypt_client_side

    return encrypt_client_side(connection, token, rank, seconds)


def _authenticate(
    address: str, port: int, rank: int, token: str, seconds: float, server: str, tls: bool
) -> socket.socket:
    with ExitStack() as failing:
        connection = failing.enter_context(socket.create_connection((address, port), timeout=seconds))
        caller_nonce = make_nonce()
        connection.sendall(encode_hello(rank, caller_nonce))
        challenge = receive_exactly(connection, CHALLENGE_BYTES)
        server_nonce, proof = challenge[:NONCE_BYTES], challenge[NONCE_BYTES:]
        nonces = caller_nonce, server_nonce
        # sent even if the server's proof is wrong: with it, a server with another key reports this rank, too
        with suppress(OSError):
            connection.sendall(compute_proof(token, proof_role(CALLER_ROLE, tls), rank, *nonces))
        if not verify_proof(proof, token, proof_role(SERVER_ROLE, tls), rank, *nonces):
            has_key = verify_proof(proof, token, proof_role(SERVER_ROLE, not tls), rank, *nonces)
            raise mismatch_error(f"rank {rank % VISITOR_OFFSET}", server, has_key=has_key)
        if receive_exactly(connection, 1) != WELCOME:
            raise CommunicationError(
                f"rank {rank % VISITOR_OFFSET} has already joined {server}",
                next_step="give each node its own --node-rank; a node that is too late needs a new job",
            )
        failing.pop_all()
    return connection


def mismatch_error(caller: str, server: str, *, has_key: bool) -> CommunicationError:
    """Return the error of a caller with another key than the server, or another `tls` if it has the key."""
    if has_key:
        return CommunicationError(
            f"{caller} has {OTHER_TLS} than {server}: one of them encrypts and the other does not",
            next_step="use the same recipe on all nodes of a job",
        )
    return CommunicationError(
        f"{caller} has {OTHER_KEY} than {server}: it belongs to another job",
        next_step="use the same key on all nodes of a job: --token-file, or PACELINE_TOKEN",
    )


def receive_exactly(connection: socket.socket, size: int) -> bytes:
    """Receive `size` bytes from a blocking socket.

    Raises:
        ConnectionResetError: the peer has hung up.
    """
    data = b""
    while len(data) < size:
        chunk = connection.recv(size - len(data))
        if not chunk:
            raise ConnectionResetError("the peer has hung up")
        data += chunk
    return data
