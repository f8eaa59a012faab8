"""The channel over sockets: one loop reads and writes whatever is ready, so no peer holds up another.

A hub and its peers have one connection each, made after both sides have proved that they know the key of the
job. Bytes that a peer has not read yet wait in a buffer, which is written when its socket takes more. It has
no limit: a rank that sends large messages has to wait for an answer to one before the next.
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
from paceline.errors import CommunicationError, DeadlineError, format_count
from paceline.job.addresses import format_address, listen_at
from paceline.job.handshake import AuthenticatingListener, connect_authenticated
from paceline.job.tls import EncryptedSocket
from paceline.observe.file_writing import warn_on_stderr

_BACKLOG = 1024
_CHUNK_BYTES = 1 << 20
_RETRY_SECONDS = 0.1


def listen_on_free_port(address: str) -> socket.socket:
    """Listen on a free port of the address by which others reach this host."""
    return listen_at(address, 0, _BACKLOG)


def accept_ranks(
    listener: socket.socket,
    token: str,
    ranks: Sequence[int],
    deadline_seconds: float,
    log: Callable[[str], object] = warn_on_stderr,
    *,
    tls: bool = False,
) -> dict[int, socket.socket]:
    """Accept one connection of each rank; callers that do not know the key are rejected, and counted.

    Args:
        token: the key of the job; it is never sent.
        log: called with the number of rejected callers, if there were any.
        tls: whether the connections are encrypted.
    Raises:
        DeadlineError: some ranks did not connect in time; names them.
        CommunicationError: the connection is intercepted; see `paceline.job.tls`.
    """
    expires, callers = (
        time.monotonic() + deadline_seconds,
        AuthenticatingListener(listener, token, ranks, tls=tls, log=log),
    )
    with ExitStack() as failing:
        failing.callback(callers.close_accepted)
        try:
            while missing := [rank for rank in ranks if rank not in callers.accepted]:
                if time.monotonic() >= expires:
                    raise _missing_ranks_error(missing, callers, deadline_seconds)
                callers.receive(expires - time.monotonic())
        finally:
            callers.close()
            if callers.num_rejected:
                log(
                    f"the server rejected {format_count(callers.num_rejected, 'caller')} from outside"
                    " this job"
                )
        if tls:
            _encrypt_connections(callers.accepted, token, deadline_seconds)
        failing.pop_all()
    return callers.accepted


def _encrypt_connections(connections: dict[int, socket.socket], token: str, seconds: float) -> None:
    """Encrypt the connection of every rank, in place."""
    # Importing the certificates takes time that jobs without encryption need not spend.
    from paceline.job.tls import EphemeralCertificate, encrypt_server_side

    # A new certificate for each job; the key of the job proves whose it is.
    certificate = EphemeralCertificate.make()
    for rank, connection in [*connections.items()]:
        try:
            connections[rank] = encrypt_server_side(connection, certificate, token, rank, seconds)
        except OSError as error:
            raise CommunicationError(
                f"the connection to rank {rank} cannot be encrypted: {error}",
                next_step="look at what that rank printed",
            ) from error


def connect_to_hub(
    address: str, port: int, rank: int, token: str, deadline_seconds: float, *, tls: bool = False
) -> socket.socket:
    """Connect to the hub, and prove to each other that both know the key.

    If the hub closes the connection, try again: strangers may have filled its queue.

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
            # A refused connection is final: the hub listens before it shares its address.
            if time.monotonic() + _RETRY_SECONDS < expires and not isinstance(error, ConnectionRefusedError):
                time.sleep(_RETRY_SECONDS)
                continue
            raise CommunicationError(
                f"rank {rank} cannot reach the server at {format_address(address, port)}: {error}",
                next_step="check that the nodes reach each other on all ports",
            ) from error


def _missing_ranks_error(
    missing: Sequence[int], callers: AuthenticatingListener, deadline_seconds: float
) -> DeadlineError:
    reasons = "".join(f"; rank {rank} has {what}" for rank, what in sorted(callers.rejected_ranks.items()))
    return DeadlineError(
        f"ranks {missing} did not connect within {deadline_seconds:g} s{reasons}",
        next_step="look at what these ranks printed",
    )


class SocketSendBuffer:
    """A queue of bytes for one socket.

    Invariant: bytes are written once, whole and in order. Queued bytes are a copy, so the owner of a tensor
    may change it as soon as `put` has returned, unless it says that they are immutable.

    Args:
        connection: connected and non-blocking.
    """

    def __init__(self, connection: socket.socket) -> None:
        self._socket = connection
        self._queue: deque[memoryview] = deque()
        self._patience = math.inf
        self.last_progress_at = time.monotonic()

    @property
    def num_bytes(self) -> int:
        """Number of queued bytes."""
        return sum(len(buffer) for buffer in self._queue)

    @property
    def expires_at(self) -> float:
        """Time on the monotonic clock at which the peer has read nothing for too long; infinity: nothing
        is queued.
        """
        return self.last_progress_at + self._patience if self._queue else math.inf

    def put(
        self, buffers: Iterable[memoryview], patience_seconds: float, *, is_immutable: bool = False
    ) -> None:
        """Write what the socket takes now, and queue a copy of the rest.

        Args:
            buffers: bytes, in order; not used after this returns, unless they are immutable.
            patience_seconds: how long the peer may read nothing while bytes are queued.
            is_immutable: they do not change any more.
        Raises:
            OSError: the connection is broken.
        """
        self._patience = patience_seconds
        unsent = deque(buffer for buffer in buffers if buffer)
        if not self._queue:
            self.last_progress_at = time.monotonic()
            while unsent and self._send(unsent):
                pass
        # Only bytes that the socket did not take are copied.
        if unsent:
            self._queue.extend(unsent if is_immutable else (memoryview(b"".join(unsent)),))

    def write(self) -> None:
        """Write once, as much as the socket takes.

        Raises:
            OSError: the connection is broken.
        """
        if self._queue:
            self._send(self._queue)

    def _send(self, buffers: deque[memoryview]) -> bool:
        """Send from the first buffer, remove what was sent, and return whether that was anything."""
        try:
            num_sent = self._socket.send(buffers[0])
        except BlockingIOError:
            return False
        self.last_progress_at = time.monotonic()
        buffers[0] = buffers[0][num_sent:]
        if not buffers[0]:
            buffers.popleft()
        return True


class SocketPeer:
    """The socket to one peer, the frame that is arriving on it, and the bytes queued for it."""

    def __init__(self, rank: int, connection: socket.socket) -> None:
        self.rank, self.socket = rank, connection
        self.outbox, self.last_read_at = SocketSendBuffer(connection), time.monotonic()
        self._head = bytearray()
        self._body: Tensor | None = None
        self._filled = 0

    def read(self) -> list[ChannelMessage]:
        """Read what has arrived, and return the messages that are complete."""
        messages: list[ChannelMessage] = []
        try:
            messages += self._read()
            # Bytes that an encrypted connection has already taken off the wire are in no selector's view.
            while isinstance(self.socket, EncryptedSocket) and self.socket.pending():
                messages += self._read()
        except BlockingIOError:
            return messages
        except OSError as error:
            raise self._gone_error(error) from error
        return messages

    def _read(self) -> list[ChannelMessage]:
        if self._body is None:
            num_wanted = self._num_header_bytes()
            self._head += self._require_bytes(self.socket.recv(num_wanted - len(self._head)))
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
            raise self._bad_message_error(str(error)) from error
        self._head, self._body = bytearray(), None
        return [message]

    def _memory(self, num_bytes: int) -> Tensor:
        """Allocate a body, uint8 [n]."""
        if num_bytes <= MAX_TENSOR_BYTES:
            # The machine has not so much memory; the operating system only commits what is really filled.
            with suppress(RuntimeError):
                return torch.empty(num_bytes, dtype=torch.uint8)
        raise self._bad_message_error(f"tensors of {num_bytes} bytes")

    def _fill(self, body: Tensor) -> None:
        """Receive a part of the body."""
        count = self.socket.recv_into(body.numpy().data[self._filled : self._filled + _CHUNK_BYTES])
        self._filled += count
        if not count:
            raise self._gone_error(None)

    def _num_header_bytes(self) -> int:
        if len(self._head) < FRAME_LENGTHS.size:
            return FRAME_LENGTHS.size
        length = int(FRAME_LENGTHS.unpack_from(self._head)[0])
        # Another process has written the length: check it before memory is reserved.
        if length > MAX_HEADER_BYTES:
            raise self._bad_message_error(f"its header of {length} bytes is over the limit")
        return FRAME_LENGTHS.size + length

    def _bad_message_error(self, what: str) -> CommunicationError:
        return bad_message_error(self.rank, what)

    def _require_bytes(self, data: bytes) -> bytes:
        if not data:
            raise self._gone_error(None)
        return data

    def _gone_error(self, error: OSError | None) -> CommunicationError:
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
            # Small messages are requests and answers: the kernel must not delay them to fill packets.
            peer.socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            self._selector.register(peer.socket, selectors.EVENT_READ, peer)
        self._arrived: deque[ChannelMessage] = deque()
        # Errors that were not raised yet.
        self._lost: deque[CommunicationError] = deque()

    def send(self, to: int, message: ChannelMessage, deadline_seconds: float) -> None:
        """Write what the socket takes now, and queue the rest."""
        peer = self._peers.get(to)
        if peer is None:
            if any(error.peer == to for error in self._lost):
                # `receive` or `flush` will raise the error of this peer.
                return
            raise peer_gone_error(to)
        head, bodies = message.encode()
        with self._lose_on_error(peer):
            peer.outbox.put((memoryview(head), *bodies), deadline_seconds, is_immutable=message.is_immutable)
            self._watch_writes(peer)
        self._ledger.count_call("send", "channel", len(head) + sum(len(b) for b in bodies), 2)

    def receive(self, deadline_seconds: float) -> ChannelMessage:
        """Return the next message of any sender.

        Raises:
            CommunicationError: a peer is lost.
            DeadlineError: no message arrived in time.
        """
        expires = time.monotonic() + deadline_seconds
        while not self._arrived:
            if self._lost:
                raise self._lost.popleft()
            if not self._peers:
                raise CommunicationError("all ranks of this channel are gone", next_step=LOOK_ELSEWHERE)
            left = expires - time.monotonic()
            if not self._poll(max(0.0, left)) and left <= 0:
                raise DeadlineError(
                    f"no message arrived within {deadline_seconds:g} s from ranks {sorted(self._peers)}",
                    next_step="look for the rank that is stuck, or raise runtime.deadline_seconds",
                )
        return self._arrived.popleft()

    def flush(self, seconds: float = math.inf) -> bool:
        """Wait until all sockets have taken their bytes. Messages that arrive meanwhile are kept.

        Raises:
            CommunicationError: a peer is lost; the others have had their time.
        """
        expires = time.monotonic() + seconds
        while (is_waiting := self._num_unsent_bytes() > 0) and expires > time.monotonic():
            self._poll(expires - time.monotonic())
        if self._lost:
            raise self._lost.popleft()
        return not is_waiting

    def last_activity(self, rank: int) -> float:
        peer = self._peers.get(rank)
        return -math.inf if peer is None else max(peer.last_read_at, peer.outbox.last_progress_at)

    def num_unsent_bytes(self, rank: int) -> int:
        """Return how many bytes a peer has not taken yet."""
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

    def _poll(self, seconds: float) -> bool:
        """Wait until a socket is ready, read and write what is possible, and return whether any was ready."""
        # Wake up when the first peer becomes late, not only when a socket is ready.
        patience = min(peer.outbox.expires_at for peer in self._peers.values()) - time.monotonic()
        ready = self._selector.select(max(0.0, min(seconds, patience)))
        for key, events in ready:
            peer: SocketPeer = key.data
            with self._lose_on_error(peer):
                if events & selectors.EVENT_READ:
                    peer.last_read_at = time.monotonic()
                    self._arrived += peer.read()
                if events & selectors.EVENT_WRITE:
                    peer.outbox.write()
                    self._watch_writes(peer)
        for peer in list(self._peers.values()):
            if peer.outbox.expires_at <= time.monotonic():
                self._lose(peer, peer_not_reading_error(peer.rank))
        return bool(ready)

    def _watch_writes(self, peer: SocketPeer) -> None:
        """Watch a socket for writing while bytes are queued for it."""
        writes = selectors.EVENT_WRITE if peer.outbox.num_bytes else 0
        self._selector.modify(peer.socket, selectors.EVENT_READ | writes, peer)

    @contextmanager
    def _lose_on_error(self, peer: SocketPeer) -> Iterator[None]:
        """Lose this peer, and no other, if the block raises an error."""
        try:
            yield
        except OSError as error:
            self._lose(peer, peer_gone_error(peer.rank, str(error)))
        except CommunicationError as error:
            self._lose(peer, error)

    def _lose(self, peer: SocketPeer, error: CommunicationError) -> None:
        error.peer = peer.rank
        # Raised by the next `receive` or `flush`, after the messages of this peer that have arrived.
        self._lost.append(error)
        self._selector.unregister(peer.socket)
        peer.socket.close()
        del self._peers[peer.rank]
