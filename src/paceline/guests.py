"""Callers at a listening socket that have not shown yet who they are, all heard side by side; and the caller.

Invariant: a caller has `HELLO_SECONDS` for its whole greeting and is given fixed room for it; whoever is
slow, says anything else, or has no key, is closed and counted, and keeps nobody waiting.
"""

from __future__ import annotations

import selectors
import socket
import time
from collections.abc import Callable, Container
from contextlib import ExitStack, suppress

from paceline.errors import CommunicationError
from paceline.handshake import (
    CHALLENGE_BYTES,
    HELLO_BYTES,
    NONCE_BYTES,
    PROOF_BYTES,
    REFUSED,
    WELCOME,
    decode_hello,
    encode_hello,
    is_proof,
    nonce,
    prove,
    role,
)

VISITORS = 1 << 30
"""Numbers from here on come for a question only: `rank + VISITORS`."""

HELLO_SECONDS = 5.0
_MOST = 128
CALLER, CALLED = b"caller", b"called"
OTHER_KEY, OTHER_TLS = "another token", "another security.tls"


class _Guest:
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
        self.ours, self.said = nonce(), b""
        proof = prove(token, role(CALLED, tls), self.rank, self.theirs, self.ours)
        if self.connection.send(self.ours + proof) != CHALLENGE_BYTES:
            raise OSError("the caller does not read")

    def proves(self, token: str, tls: bool) -> bool:
        """Whether a whole answer is right, of one that encrypts or does not."""
        return is_proof(self.said, token, role(CALLER, tls), self.rank, self.theirs, self.ours)


class Guests:
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
        self._listener, self._token, self._wanted, self._has_come = listener, token, wanted, has_come
        self._tls = tls
        self._guests: dict[socket.socket, _Guest] = {}
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
        if len(self._guests) >= _MOST:
            self._turn_away(next(iter(self._guests.values())))  # who has said nothing for longest
        self._guests[connection] = _Guest(connection, now)
        self._selector.register(connection, selectors.EVENT_READ)

    def _take(self, guest: _Guest) -> None:
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

    def _decide(self, guest: _Guest) -> None:
        right = guest.proves(self._token, self._tls)
        known = guest.rank in self.found or self._has_come(guest.rank)
        welcome = right and guest.rank in self._wanted and not known
        guest.connection.send(WELCOME if welcome else REFUSED)
        if not welcome:
            if not right and guest.rank in self._wanted and len(self.unfit) < _MOST:
                has_key = guest.proves(self._token, not self._tls)
                self.unfit[guest.rank] = OTHER_TLS if has_key else OTHER_KEY
            self._turn_away(guest)
            return
        self._forget(guest)
        self.found[guest.rank] = guest.connection

    def _turn_away(self, guest: _Guest) -> None:
        self.strangers += 1
        self._forget(guest)
        guest.connection.close()

    def _forget(self, guest: _Guest) -> None:
        self._selector.unregister(guest.connection)
        del self._guests[guest.connection]


def greet(
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
    connection = _let_in(address, port, rank, token, seconds, whom, tls)
    if not tls:
        return connection
    from paceline.tls import secure_caller

    return secure_caller(connection, token, rank, seconds)


def _let_in(
    address: str, port: int, rank: int, token: str, seconds: float, whom: str, tls: bool
) -> socket.socket:
    """A connection to one that knows the key, and has been shown that this side does."""
    with ExitStack() as failing:
        connection = failing.enter_context(socket.create_connection((address, port), timeout=seconds))
        ours = nonce()
        connection.sendall(encode_hello(rank, ours))
        challenge = _exactly(connection, CHALLENGE_BYTES)
        theirs, proof = challenge[:NONCE_BYTES], challenge[NONCE_BYTES:]
        with suppress(OSError):  # a proof under another key lets the other side know, too, and says nothing
            connection.sendall(prove(token, role(CALLER, tls), rank, ours, theirs))
        if not is_proof(proof, token, role(CALLED, tls), rank, ours, theirs):
            raise _unlike(rank, whom, is_proof(proof, token, role(CALLED, not tls), rank, ours, theirs))
        if _exactly(connection, 1) != WELCOME:
            raise CommunicationError(
                f"Rank {rank % VISITORS} has already joined {whom}.",
                next_step="give each node its own --node-rank; a node that comes late needs a new job",
            )
        failing.pop_all()
    return connection


def _unlike(rank: int, whom: str, has_key: bool) -> CommunicationError:
    if has_key:
        return CommunicationError(
            f"Rank {rank % VISITORS} has {OTHER_TLS} than {whom}: one of both encrypts, and one does not.",
            next_step="give all nodes of one job the same recipe",
        )
    return CommunicationError(
        f"Rank {rank % VISITORS} has {OTHER_KEY} than {whom}: it belongs to another job.",
        next_step="give all nodes of one job the same key: --token-file, or PACELINE_TOKEN",
    )


def _exactly(connection: socket.socket, size: int) -> bytes:
    data = b""
    while len(data) < size:
        part = connection.recv(size - len(data))
        if not part:
            raise ConnectionResetError("the other side has hung up")
        data += part
    return data
