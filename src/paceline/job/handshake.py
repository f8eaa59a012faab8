"""Proofs that two sides know the same key, none of which says anything about it.

Each side makes up a nonce, and shows that it can compute the HMAC-SHA-256 of both nonces under the key, with
who it is; so an answer is of no use a second time, or to the other side. Invariant: messages have one size,
so a stranger decides nothing about memory, and comparisons take the same time whatever differs.
Source: challenge and response with both nonces, ISO/IEC 9798-4 (mutual authentication by a MAC).

Callers at a listening socket that have not shown yet who they are, all heard side by side; and the caller.

Invariant: a caller has `HELLO_SECONDS` for its whole greeting and is given fixed room for it; whoever is
slow, says anything else, or has no key, is closed and counted, and keeps nobody waiting.
"""

from __future__ import annotations

import hashlib
import hmac
import secrets
import selectors
import socket
import struct
import time
from collections.abc import Callable, Container
from contextlib import ExitStack, suppress

from paceline.errors import CommunicationError

NONCE_BYTES = 32
PROOF_BYTES = 32
_HELLO = struct.Struct("!4sI32s")
_MAGIC = b"PCL1"
HELLO_BYTES = _HELLO.size
CHALLENGE_BYTES = NONCE_BYTES + PROOF_BYTES
WELCOME, REFUSED = b"\x01", b"\x00"


def needs_encryption(tls: str, num_nodes: int) -> bool:
    """Whether connections between nodes are encrypted once both sides are known.

    Args:
        tls: "on", "off", or "auto": where a job has several nodes.
    """
    return num_nodes > 1 if tls == "auto" else tls == "on"


def role(side: bytes, tls: bool) -> bytes:
    """Who gives a proof, and whether it encrypts afterwards: nobody in between can talk them out of it."""
    return side + b" tls" if tls else side


def make_nonce() -> bytes:
    """Bytes that nobody has seen before."""
    return secrets.token_bytes(NONCE_BYTES)


def compute_proof(token: str, role: bytes, rank: int, first: bytes, second: bytes) -> bytes:
    """What only a holder of the token can say.

    Args:
        role: of who says it; a proof of one side is none of the other's.
        rank: that the caller claims.
        first, second: the nonces of the caller and of the one that is called.
    """
    text = role + rank.to_bytes(4, "big") + first + second
    return hmac.digest(token.encode(), text, hashlib.sha256)


def verify_proof(said: bytes, token: str, role: bytes, rank: int, first: bytes, second: bytes) -> bool:
    """Whether `said` is that proof."""
    return hmac.compare_digest(said, compute_proof(token, role, rank, first, second))


def encode_hello(rank: int, own_nonce: bytes) -> bytes:
    """The first message of a caller."""
    return _HELLO.pack(_MAGIC, rank, own_nonce)


def decode_hello(message: bytes) -> tuple[int, bytes]:
    """Rank and nonce; ValueError if it is no such message."""
    if len(message) != HELLO_BYTES:
        raise ValueError("no hello")
    magic, rank, its_nonce = _HELLO.unpack(message)
    if magic != _MAGIC:
        raise ValueError("no hello")
    return rank, its_nonce


VISITOR_OFFSET = 1 << 30
"""Numbers from here on come for a question only: `rank + VISITORS`."""

HELLO_SECONDS = 5.0
_MAX_PENDING = 128
CALLER_ROLE, SERVER_ROLE = b"caller", b"called"
OTHER_KEY, OTHER_TLS = "another token", "another security.tls"


class _PendingCaller:
    def __init__(self, connection: socket.socket, now: float) -> None:
        self.connection, self.expires = connection, now + HELLO_SECONDS
        self.said = b""
        self.rank = -1
        self.theirs = self.ours = b""

    def hear(self) -> bool:
        """Take what is there; False if it is gone."""
        wanted = PROOF_BYTES if self.ours else HELLO_BYTES
        part = self.connection.recv(wanted - len(self.said))
        self.said += part
        return bool(part)

    def answer(self, token: str, tls: bool) -> None:
        """Answer a whole hello by a challenge."""
        self.rank, self.theirs = decode_hello(self.said)
        self.ours, self.said = make_nonce(), b""
        proof = compute_proof(token, role(SERVER_ROLE, tls), self.rank, self.theirs, self.ours)
        if self.connection.send(self.ours + proof) != CHALLENGE_BYTES:
            raise OSError("the caller does not read")

    def has_valid_proof(self, token: str, tls: bool) -> bool:
        """Whether a whole answer is right, of one that encrypts or does not."""
        return verify_proof(self.said, token, role(CALLER_ROLE, tls), self.rank, self.theirs, self.ours)


class AuthenticatingListener:
    """Those at one listener.

    Args:
        listener: is made non-blocking.
        token: the key of the job.
        wanted: ranks that may come, each once.
        has_come: whether a rank is known already, beside those in `found`.
        tls: whether those that come in encrypt what they say next.
    Attributes:
        unfit: ranks with another key, or another `tls`, and which of both; a stranger may claim any, so no
            more than there is room for.
    """

    def __init__(
        self,
        listener: socket.socket,
        token: str,
        wanted: Container[int],
        has_come: Callable[[int], bool] = lambda rank: False,
        *,
        tls: bool = False,
    ) -> None:
        self._listener, self._token, self._wanted, self._is_known = listener, token, wanted, has_come
        self._tls = tls
        self._guests: dict[socket.socket, _PendingCaller] = {}
        self._selector = selectors.DefaultSelector()
        listener.setblocking(False)
        self._selector.register(listener, selectors.EVENT_READ)
        self.found: dict[int, socket.socket] = {}
        self.strangers = 0
        self.unfit: dict[int, str] = {}

    def hear(self, seconds: float, clock: Callable[[], float] = time.monotonic) -> None:
        """Whatever callers say within so many seconds, or until one has said something."""
        for key, _ in self._selector.select(min(seconds, HELLO_SECONDS / 4)):
            if key.fileobj is self._listener:
                self._accept(clock())
            elif isinstance(key.fileobj, socket.socket):
                self._take(self._guests[key.fileobj])
        for guest in [one for one in self._guests.values() if clock() > one.expires]:
            self._turn_away(guest)

    def give_up(self) -> None:
        """Hang up on the ranks that were found."""
        for connection in self.found.values():
            connection.close()

    def close(self) -> None:
        """Turn away who is still there; the ranks that were found stay."""
        for guest in [*self._guests.values()]:
            self._turn_away(guest)
        self._selector.close()

    def _accept(self, now: float) -> None:
        try:
            connection, _ = self._listener.accept()
        except OSError:
            return  # it has hung up already
        connection.setblocking(False)
        if len(self._guests) >= _MAX_PENDING:
            self._turn_away(next(iter(self._guests.values())))  # who has said nothing for longest
        self._guests[connection] = _PendingCaller(connection, now)
        self._selector.register(connection, selectors.EVENT_READ)

    def _take(self, guest: _PendingCaller) -> None:
        try:
            if not guest.hear():
                self._turn_away(guest)
            elif not guest.ours and len(guest.said) == HELLO_BYTES:
                guest.answer(self._token, self._tls)
            elif guest.ours and len(guest.said) == PROOF_BYTES:
                self._decide(guest)
        except BlockingIOError:
            return
        except (OSError, ValueError):
            self._turn_away(guest)

    def _decide(self, guest: _PendingCaller) -> None:
        right = guest.has_valid_proof(self._token, self._tls)
        known = guest.rank in self.found or self._is_known(guest.rank)
        welcome = right and guest.rank in self._wanted and not known
        guest.connection.send(WELCOME if welcome else REFUSED)
        if not welcome:
            if not right and guest.rank in self._wanted and len(self.unfit) < _MAX_PENDING:
                has_key = guest.has_valid_proof(self._token, not self._tls)
                self.unfit[guest.rank] = OTHER_TLS if has_key else OTHER_KEY
            self._turn_away(guest)
            return
        self._forget(guest)
        self.found[guest.rank] = guest.connection

    def _turn_away(self, guest: _PendingCaller) -> None:
        self.strangers += 1
        self._forget(guest)
        guest.connection.close()

    def _forget(self, guest: _PendingCaller) -> None:
        self._selector.unregister(guest.connection)
        del self._guests[guest.connection]


def connect_authenticated(
    address: str, port: int, rank: int, token: str, seconds: float, whom: str, *, tls: bool = False
) -> socket.socket:
    """Connect, and show each other that both know the key.

    Args:
        whom: who is called, for errors.
        tls: whether what is said afterwards is encrypted; the other side must want the same.
    Raises:
        CommunicationError: it has another key or another `tls`, the rank has come already, or somebody is
            in between.
        OSError: it cannot be reached, hangs up, or is silent.
    """
    connection = _authenticate(address, port, rank, token, seconds, whom, tls)
    if not tls:
        return connection
    from paceline.job.tls import encrypt_client_side

    return encrypt_client_side(connection, token, rank, seconds)


def _authenticate(
    address: str, port: int, rank: int, token: str, seconds: float, whom: str, tls: bool
) -> socket.socket:
    """A connection to one that knows the key, and has been shown that this side does."""
    with ExitStack() as failing:
        connection = failing.enter_context(socket.create_connection((address, port), timeout=seconds))
        ours = make_nonce()
        connection.sendall(encode_hello(rank, ours))
        challenge = receive_exactly(connection, CHALLENGE_BYTES)
        theirs, proof = challenge[:NONCE_BYTES], challenge[NONCE_BYTES:]
        with suppress(OSError):  # a proof under another key lets the other side know, too, and says nothing
            connection.sendall(compute_proof(token, role(CALLER_ROLE, tls), rank, ours, theirs))
        if not verify_proof(proof, token, role(SERVER_ROLE, tls), rank, ours, theirs):
            raise _mismatch_error(
                rank, whom, verify_proof(proof, token, role(SERVER_ROLE, not tls), rank, ours, theirs)
            )
        if receive_exactly(connection, 1) != WELCOME:
            raise CommunicationError(
                f"Rank {rank % VISITOR_OFFSET} has already joined {whom}.",
                next_step="give each node its own --node-rank; a node that comes late needs a new job",
            )
        failing.pop_all()
    return connection


def _mismatch_error(rank: int, whom: str, has_key: bool) -> CommunicationError:
    if has_key:
        return CommunicationError(
            f"Rank {rank % VISITOR_OFFSET} has {OTHER_TLS} than {whom}: one of both encrypts, and one does not.",
            next_step="give all nodes of one job the same recipe",
        )
    return CommunicationError(
        f"Rank {rank % VISITOR_OFFSET} has {OTHER_KEY} than {whom}: it belongs to another job.",
        next_step="give all nodes of one job the same key: --token-file, or PACELINE_TOKEN",
    )


def receive_exactly(connection: socket.socket, size: int) -> bytes:
    data = b""
    while len(data) < size:
        part = connection.recv(size - len(data))
        if not part:
            raise ConnectionResetError("the other side has hung up")
        data += part
    return data
