"""How a hub and its peers meet: one connection each, after both sides have shown that they know the key.

The channel over sockets: one loop reads and writes whatever is ready, so no peer holds up another.
"""

from __future__ import annotations

import math
import selectors
import socket
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress

import torch
from torch import Tensor

from paceline.comm.channel.message_channel import (
    FRAME_LENGTHS,
    LOOK_ELSEWHERE,
    MAX_HEADER_BYTES,
    MAX_TENSOR_BYTES,
    ChannelMessage,
    bad_message_error,
    peer_gone_error,
    peer_not_reading_error,
)
from paceline.comm.ledger import ByteLedger
from paceline.errors import CommunicationError, DeadlineError
from paceline.job.addresses import format_address, listen_at
from paceline.job.handshake import AuthenticatingListener, connect_authenticated
from paceline.job.tls import EncryptedSocket
from paceline.observe.file_writing import warn_on_stderr

_BACKLOG = 1024
_CHUNK_BYTES = 1 << 20
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


class SocketSendBuffer:
    """Bytes for one socket.

    Args:
        connection: connected; it does not block.
    """

    def __init__(self, connection: socket.socket) -> None:
        self._socket = connection
        self._waiting: deque[memoryview] = deque()
        self._patience = math.inf
        self.last_progress_at = time.monotonic()

    @property
    def num_bytes(self) -> int:
        """How much waits."""
        return sum(len(part) for part in self._waiting)

    @property
    def expires_at(self) -> float:
        """When the peer has read nothing for too long, on the monotonic clock; infinity: nothing waits."""
        return self.last_progress_at + self._patience if self._waiting else math.inf

    def put(
        self, parts: Iterable[memoryview], patience_seconds: float, *, is_immutable: bool = False
    ) -> None:
        """Write what the socket takes now, and keep a copy of the rest.

        Args:
            parts: bytes, in order; not used after this returns, unless they last.
            patience_seconds: how long the peer may read nothing while something waits.
            is_immutable: they do not change any more.
        Raises:
            OSError: the connection is broken.
        """
        self._patience = patience_seconds
        rest = deque(part for part in parts if part)
        if not self._waiting:
            self.last_progress_at = time.monotonic()
            while rest and self._send(rest):
                pass
        if rest:
            self._waiting.extend(rest if is_immutable else (memoryview(b"".join(rest)),))

    def write(self) -> None:
        """Write once, as much as the socket takes.

        Raises:
            OSError: the connection is broken.
        """
        if self._waiting:
            self._send(self._waiting)

    def _send(self, parts: deque[memoryview]) -> bool:
        """Whether the socket took some of the first part; what it took is removed."""
        try:
            taken = self._socket.send(parts[0])
        except BlockingIOError:
            return False
        self.last_progress_at = time.monotonic()
        parts[0] = parts[0][taken:]
        if not parts[0]:
            parts.popleft()
        return True


class SocketPeer:
    """One socket, the frame that is arriving on it, and what the other end has not taken yet."""

    def __init__(self, rank: int, connection: socket.socket) -> None:
        self.rank, self.socket = rank, connection
        self.outbox, self.last_read_at = SocketSendBuffer(connection), time.monotonic()
        self._head = bytearray()
        self._body: Tensor | None = None
        self._filled = 0

    def read(self) -> list[ChannelMessage]:
        """Take what is there; the messages that are complete.

        What an encrypted connection has taken off the wire already is read too: no selector knows of it.
        """
        found: list[ChannelMessage] = []
        try:
            found += self._read()
            while isinstance(self.socket, EncryptedSocket) and self.socket.pending():
                found += self._read()
        except BlockingIOError:
            return found
        except OSError as error:
            raise self._gone(error) from error
        return found

    def _read(self) -> list[ChannelMessage]:
        if self._body is None:
            wanted = self._num_header_bytes()
            self._head += self._some(self.socket.recv(wanted - len(self._head)))
            if len(self._head) < FRAME_LENGTHS.size or len(self._head) < self._num_header_bytes():
                return []
            self._body, self._filled = self._memory(int(FRAME_LENGTHS.unpack_from(self._head)[1])), 0
        if self._filled < len(self._body):
            self._fill(self._body)
        if self._filled < len(self._body):
            return []
        try:
            message = ChannelMessage.decode(bytes(self._head[FRAME_LENGTHS.size :]), self._body, self.rank)
        except ValueError as error:
            raise self._broken(str(error)) from error
        self._head, self._body = bytearray(), None
        return [message]

    def _memory(self, num_bytes: int) -> Tensor:
        """For a body, uint8 [n]. It is taken as it is filled: a length may lie."""
        if num_bytes <= MAX_TENSOR_BYTES:
            with suppress(RuntimeError):  # there is not so much
                return torch.empty(num_bytes, dtype=torch.uint8)
        raise self._broken(f"tensors of {num_bytes} bytes")

    def _fill(self, body: Tensor) -> None:
        """Receive a part."""
        count = self.socket.recv_into(body.numpy().data[self._filled : self._filled + _CHUNK_BYTES])
        self._filled += count
        if not count:
            raise self._gone(None)

    def _num_header_bytes(self) -> int:
        if len(self._head) < FRAME_LENGTHS.size:
            return FRAME_LENGTHS.size
        length = int(FRAME_LENGTHS.unpack_from(self._head)[0])
        if length > MAX_HEADER_BYTES:
            raise self._broken(f"a header of {length} bytes")
        return FRAME_LENGTHS.size + length

    def _broken(self, what: str) -> CommunicationError:
        return bad_message_error(self.rank, what)

    def _some(self, data: bytes) -> bytes:
        if not data:
            raise self._gone(None)
        return data

    def _gone(self, error: OSError | None) -> CommunicationError:
        return peer_gone_error(self.rank, "" if error is None else str(error))


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
            peer.outbox.put((memoryview(head), *bodies), deadline_seconds, is_immutable=message.is_immutable)
            self._watch(peer)
        self._ledger.count_call("send", "channel", len(head) + sum(len(b) for b in bodies), 2)

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
        peer = self._peers.get(rank)
        return -math.inf if peer is None else max(peer.last_read_at, peer.outbox.last_progress_at)

    def num_unsent_bytes(self, rank: int) -> int:
        """How much a peer has not taken yet."""
        return self._peers[rank].outbox.num_bytes if rank in self._peers else 0

    def _num_unsent_bytes(self) -> int:
        return sum(peer.outbox.num_bytes for peer in self._peers.values())

    def drop(self, rank: int) -> None:
        peer = self._peers.pop(rank, None)
        if peer is not None:
            self._selector.unregister(peer.socket)
            peer.socket.close()
        self._arrived = deque(message for message in self._arrived if message.sender != rank)
        self._lost = deque(error for error in self._lost if error.peer != rank)

    def close(self) -> None:
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
