"""How a hub and its peers meet: one connection each, after both sides have shown that they know the key.

The channel over sockets: one loop reads and writes whatever is ready, so no peer holds up another.
"""

from __future__ import annotations

import math
import selectors
import socket
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager

from paceline.comm.channel.message_channel import (
    LOOK_ELSEWHERE,
    ChannelMessage,
    SocketPeer,
    peer_gone_error,
    peer_not_reading_error,
)
from paceline.comm.ledger import ByteLedger
from paceline.errors import CommunicationError, DeadlineError
from paceline.job.addresses import format_address, listen_at
from paceline.job.handshake import AuthenticatingListener, connect_authenticated
from paceline.observe.file_writing import warn_on_stderr

_BACKLOG = 1024
_RETRY_SECONDS = 0.1


def listen_on_free_port(address: str) -> socket.socket:
    """A listening socket on a free port of the address by which others reach this host."""
    return listen_at(address, 0, _BACKLOG)


def accept_ranks(
    listener: socket.socket,
    token: str,
    ranks: Sequence[int],
    deadline_seconds: float,
    say: Callable[[str], object] = warn_on_stderr,
    *,
    tls: bool = False,
) -> dict[int, socket.socket]:
    """Take one connection of each rank; whoever does not know the key is turned away, and counted.

    Args:
        token: the key of the job; it is never sent.
        say: is told how many were turned away, if there were any.
        tls: whether the connections are encrypted.
    Raises:
        DeadlineError: some did not come in time; names them.
        CommunicationError: somebody is between this rank and another; see `paceline.job.tls`.
    """
    expires, guests = (
        time.monotonic() + deadline_seconds,
        AuthenticatingListener(listener, token, ranks, tls=tls),
    )
    with ExitStack() as failing:
        failing.callback(guests.give_up)
        try:
            while missing := [rank for rank in ranks if rank not in guests.found]:
                if time.monotonic() >= expires:
                    raise _missing_ranks_error(missing, guests, deadline_seconds)
                guests.hear(expires - time.monotonic())
        finally:
            guests.close()
            if guests.strangers:
                say(f"the server has turned away {guests.strangers} callers that are not of this job")
        if tls:
            _encrypt_connections(guests.found, token, deadline_seconds)
        failing.pop_all()
    return guests.found


def _encrypt_connections(found: dict[int, socket.socket], token: str, seconds: float) -> None:
    """Encrypt the connection of every rank."""
    from paceline.job.tls import EphemeralCertificate, encrypt_server_side

    certificate = EphemeralCertificate.make()
    for rank, connection in [*found.items()]:
        try:
            found[rank] = encrypt_server_side(connection, certificate, token, rank, seconds)
        except OSError as error:
            raise CommunicationError(
                f"the connection to rank {rank} cannot be encrypted: {error}",
                next_step="look at what that rank printed",
            ) from error


def connect_to_hub(
    address: str, port: int, rank: int, token: str, deadline_seconds: float, *, tls: bool = False
) -> socket.socket:
    """Connect to the hub, and show each other that both know the key.

    A hub that hangs up is called again: a stranger may have crowded it.

    Raises:
        CommunicationError: it cannot be reached, or has another key.
    """
    expires = time.monotonic() + deadline_seconds
    while True:
        try:
            left = max(0.01, expires - time.monotonic())
            return connect_authenticated(
                address, port, rank, token, left, f"the server at {format_address(address, port)}", tls=tls
            )
        except OSError as error:
            if time.monotonic() + _RETRY_SECONDS < expires and not isinstance(error, ConnectionRefusedError):
                time.sleep(_RETRY_SECONDS)
                continue
            raise CommunicationError(
                f"rank {rank} cannot reach the server at {format_address(address, port)}: {error}",
                next_step="check that the nodes reach each other on all ports",
            ) from error


def _missing_ranks_error(
    missing: Sequence[int], guests: AuthenticatingListener, deadline_seconds: float
) -> DeadlineError:
    wrong = "".join(f"; rank {rank} has {what}" for rank, what in sorted(guests.unfit.items()))
    return DeadlineError(
        f"ranks {missing} did not connect within {deadline_seconds:g} s{wrong}",
        next_step="look at what these ranks printed",
    )


class SocketChannel:
    """A channel over connected TCP sockets, one for each peer.

    Args:
        peers: connected sockets by rank.
        ledger: counts what is sent, as `send` over group `channel`.
    Wire: 16 bytes, the header and the tensors, in one direction.
    """

    def __init__(self, peers: Mapping[int, socket.socket], ledger: ByteLedger) -> None:
        self._peers = {rank: SocketPeer(rank, s) for rank, s in peers.items()}
        self._ledger = ledger
        self._selector = selectors.DefaultSelector()
        for peer in self._peers.values():
            peer.socket.setblocking(False)
            peer.socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            self._selector.register(peer.socket, selectors.EVENT_READ, peer)
        self._arrived: deque[ChannelMessage] = deque()
        self._lost: deque[CommunicationError] = deque()  # not told yet

    def send(self, to: int, message: ChannelMessage, deadline_seconds: float) -> None:
        """See `MessageChannel`."""
        peer = self._peers.get(to)
        if peer is None:
            if any(error.peer == to for error in self._lost):
                return  # `receive` or `flush` will tell
            raise peer_gone_error(to)
        head, bodies = message.encode()
        with self._catch_peer_errors(peer):
            peer.outbox.put((memoryview(head), *bodies), deadline_seconds, lasts=message.lasts)
            self._watch(peer)
        self._ledger.launched("send", "channel", len(head) + sum(len(b) for b in bodies), 2)

    def receive(self, deadline_seconds: float) -> ChannelMessage:
        """See `MessageChannel`.

        Raises:
            CommunicationError: a peer is lost.
            DeadlineError: nobody said anything in time.
        """
        expires = time.monotonic() + deadline_seconds
        while not self._arrived:
            if self._lost:
                raise self._lost.popleft()
            if not self._peers:
                raise CommunicationError("all ranks of this channel are gone", next_step=LOOK_ELSEWHERE)
            left = expires - time.monotonic()
            if not self._turn(max(0.0, left)) and left <= 0:
                raise DeadlineError(
                    f"no message arrived within {deadline_seconds:g} s from ranks {sorted(self._peers)}",
                    next_step="look for the rank that is stuck, or raise runtime.deadline_seconds",
                )
        return self._arrived.popleft()

    def flush(self, seconds: float = math.inf) -> bool:
        """See `MessageChannel`. What arrives meanwhile is kept.

        Raises:
            CommunicationError: a peer is lost; the others have had their time.
        """
        expires = time.monotonic() + seconds
        while (waits := self._num_unsent_bytes() > 0) and expires > time.monotonic():
            self._turn(expires - time.monotonic())
        if self._lost:
            raise self._lost.popleft()
        return not waits

    def last_activity(self, rank: int) -> float:
        """See `MessageChannel`."""
        peer = self._peers.get(rank)
        return -math.inf if peer is None else max(peer.last_read_at, peer.outbox.last_progress_at)

    def num_unsent_bytes(self, rank: int) -> int:
        """How much a peer has not taken yet."""
        return self._peers[rank].outbox.num_bytes if rank in self._peers else 0

    def _num_unsent_bytes(self) -> int:
        return sum(peer.outbox.num_bytes for peer in self._peers.values())

    def drop(self, rank: int) -> None:
        """See `MessageChannel`."""
        peer = self._peers.pop(rank, None)
        if peer is not None:
            self._selector.unregister(peer.socket)
            peer.socket.close()
        self._arrived = deque(message for message in self._arrived if message.sender != rank)
        self._lost = deque(error for error in self._lost if error.peer != rank)

    def close(self) -> None:
        """See `MessageChannel`."""
        self._selector.close()
        for peer in self._peers.values():
            peer.socket.close()

    def _turn(self, seconds: float) -> bool:
        """Wait until a socket is ready, at most so long; read and write what can be. Whether any was."""
        patience = min(peer.outbox.expires_at for peer in self._peers.values()) - time.monotonic()
        ready = self._selector.select(max(0.0, min(seconds, patience)))
        for key, events in ready:
            peer: SocketPeer = key.data
            with self._catch_peer_errors(peer):
                if events & selectors.EVENT_READ:
                    peer.last_read_at = time.monotonic()
                    self._arrived += peer.read()
                if events & selectors.EVENT_WRITE:
                    peer.outbox.write()
                    self._watch(peer)
        for peer in list(self._peers.values()):
            if peer.outbox.expires_at <= time.monotonic():
                self._lose(peer, peer_not_reading_error(peer.rank))
        return bool(ready)

    def _watch(self, peer: SocketPeer) -> None:
        """Hear of it when a socket can take what waits for it."""
        writes = selectors.EVENT_WRITE if peer.outbox.num_bytes else 0
        self._selector.modify(peer.socket, selectors.EVENT_READ | writes, peer)

    @contextmanager
    def _catch_peer_errors(self, peer: SocketPeer) -> Iterator[None]:
        """What breaks in here loses this peer, and no other."""
        try:
            yield
        except OSError as error:
            self._lose(peer, peer_gone_error(peer.rank, str(error)))
        except CommunicationError as error:
            self._lose(peer, error)

    def _lose(self, peer: SocketPeer, error: CommunicationError) -> None:
        error.peer = peer.rank
        self._lost.append(error)
        self._selector.unregister(peer.socket)
        peer.socket.close()
        del self._peers[peer.rank]
