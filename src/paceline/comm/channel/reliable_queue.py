"""Reliable queues: messages with numbers are kept until the other side has them, and received once, however
often sent.

The messages of one sender are numbered from 1 and sent in chunks of bytes. The receiver reports its position,
the number of its last whole message and the bytes that it has of the next, and the sender continues from
there. Invariant: whatever is sent again, or ends in the middle, every message is received exactly once and in
order.

`ReliableQueues` holds the queues of all peers, and is shared by the training thread and the threads that
carry messages.
Invariant: a peer is connected, or lost for good; that it is lost is raised once. Memory for messages that
nothing reads is bounded: chunks are taken while a thread waits for a message, and up to `WINDOW_BYTES` of a
peer otherwise, so a rank that does not read is seen to make no progress. Every wait ends: by a time, or when
a peer is lost.
Source: sequence numbers and cumulative acknowledgement, as of TCP (RFC 9293, section 3.4), here by message.
"""

from __future__ import annotations

import math
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import NamedTuple

from paceline.comm.channel.message_channel import (
    FRAME_LENGTHS,
    LOOK_ELSEWHERE,
    MAX_HEADER_BYTES,
    MAX_TENSOR_BYTES,
    ChannelMessage,
    as_bytes,
    peer_gone_error,
    peer_not_reading_error,
)
from paceline.errors import CommunicationError

CHUNK_BYTES = 1 << 20


class StreamPosition(NamedTuple):
    """A position in the messages of a sender: the last whole message, and the number of bytes of the next."""

    number: int
    num_bytes: int


class NumberedMessage(NamedTuple):
    """A message that is being sent."""

    number: int
    chunks: tuple[bytes, ...]

    def after(self, num_bytes: int) -> Iterator[bytes]:
        """Yield the chunks that follow the first `num_bytes` bytes."""
        for chunk in self.chunks:
            if num_bytes < len(chunk):
                yield chunk[num_bytes:] if num_bytes else chunk
            num_bytes = max(0, num_bytes - len(chunk))


def encode_message_chunks(message: ChannelMessage) -> tuple[bytes, ...]:
    """Copy a message into chunks of bytes: lengths, header, and the values of its tensors."""
    head, bodies = message.encode()
    buffers = [memoryview(head), *bodies]
    chunks: list[list[memoryview]] = [[]]
    room = CHUNK_BYTES
    for view in (
        buffer[at : at + CHUNK_BYTES] for buffer in buffers for at in range(0, len(buffer), CHUNK_BYTES)
    ):
        # Small parts share a chunk, so a small message is one chunk.
        if len(view) > room:
            chunks.append([])
            room = CHUNK_BYTES
        chunks[-1].append(view)
        room -= len(view)
    return tuple(b"".join(views) for views in chunks)


class UnacknowledgedQueue:
    """The messages for one receiver that it has not acknowledged."""

    def __init__(self) -> None:
        self._messages: deque[NumberedMessage] = deque()
        self._last = 0

    def put(self, chunks: tuple[bytes, ...]) -> int:
        """Add a message, and return its number."""
        self._last += 1
        self._messages.append(NumberedMessage(self._last, chunks))
        return self._last

    @property
    def next(self) -> NumberedMessage | None:
        """The first message that is not acknowledged; None: all are."""
        return self._messages[0] if self._messages else None

    @property
    def num_bytes(self) -> int:
        """Bytes of all messages that are not acknowledged."""
        return sum(len(chunk) for message in self._messages for chunk in message.chunks)

    def acknowledge(self, number: int) -> None:
        """Drop all messages up to this number, which the receiver has.

        Raises:
            ValueError: it cannot have it.
        """
        if not 0 <= number <= self._last:
            raise ValueError(f"message {number} was never sent; the last one is {self._last}")
        # Acknowledgements are cumulative: this one covers all earlier messages.
        while self._messages and self._messages[0].number <= number:
            self._messages.popleft()


class MessageAssembler:
    """An assembler of the chunks of one sender into messages.

    Args:
        sender: its rank.
    """

    def __init__(self, sender: int) -> None:
        self._sender = sender
        self._number = 0
        self._call = 0
        self._clear()

    def _clear(self) -> None:
        self._head, self._body = bytearray(), bytearray()

    @property
    def position(self) -> StreamPosition:
        """Position up to which chunks have arrived."""
        return StreamPosition(self._number, len(self._head) + len(self._body))

    def begin_call(self, number: int, num_bytes: int) -> int:
        """Begin a call that sends a message from a byte on; chunks of earlier calls are ignored from now on.

        Returns:
            The number of the call, which comes with each of its chunks; 0: it does not begin at the present
            position.
        """
        self._call += 1
        return self._call if (number - 1, num_bytes) == self.position else 0

    def is_current(self, call: int) -> bool:
        """Return whether no other call has begun since, and its message is not whole."""
        return call == self._call

    def add_chunk(self, call: int, chunk: bytes) -> ChannelMessage | None:
        """Add a chunk of a call, and return the message once it is whole; chunks of earlier calls are
        ignored.

        Raises:
            ValueError: it is no valid message.
        """
        if call != self._call or not chunk:
            return None
        self._fill(chunk)
        wanted = self._lengths()
        if wanted is None or len(self._head) + len(self._body) < sum(wanted):
            return None
        if len(self._body) != wanted[1]:
            raise ValueError("received more bytes than the message has")
        head = bytes(self._head[FRAME_LENGTHS.size :])
        message = ChannelMessage.decode(head, as_bytes(self._body), self._sender)
        self._number += 1
        self._call += 1
        self._clear()
        return message

    def _fill(self, chunk: bytes) -> None:
        """Add to the head first: its lengths, then itself. Memory grows only with what has arrived."""
        at = 0
        while at < len(chunk):
            wanted = self._lengths()
            room = FRAME_LENGTHS.size - len(self._head) if wanted is None else wanted[0] - len(self._head)
            if room <= 0:
                self._body += memoryview(chunk)[at:]
                return
            self._head += chunk[at : at + room]
            at += room

    def _lengths(self) -> tuple[int, int] | None:
        """Return the bytes of the head with its lengths, and of the body; None: they have not arrived."""
        if len(self._head) < FRAME_LENGTHS.size:
            return None
        head, body = FRAME_LENGTHS.unpack_from(self._head)
        if head > MAX_HEADER_BYTES or body > MAX_TENSOR_BYTES:
            raise ValueError(f"its header of {head} bytes or its tensors of {body} bytes are over the limit")
        return FRAME_LENGTHS.size + head, body


class PeerQueue:
    """The queues of one peer; the caller holds the lock of the `ReliableQueues`.

    Attributes:
        patience: seconds for which the peer may read nothing while messages wait.
        last_progress_at, last_received_at, last_contact_at: when it last read a part of a message, sent one,
            or called.
        num_unread_bytes: bytes of its messages that this rank has not received yet.
    """

    def __init__(self, rank: int) -> None:
        self.rank, self.outgoing, self.incoming = rank, UnacknowledgedQueue(), MessageAssembler(rank)
        self.patience = math.inf
        self.last_progress_at = self.last_received_at = self.last_contact_at = time.monotonic()
        self.num_unread_bytes = 0
        self._furthest_position = StreamPosition(0, 0)

    def put(self, chunks: tuple[bytes, ...], patience_seconds: float) -> None:
        """Add a message for the peer."""
        if self.outgoing.next is None:
            self.last_progress_at = time.monotonic()
        self.patience = patience_seconds
        self.outgoing.put(chunks)

    def note_progress(self, position: StreamPosition) -> None:
        """Record that the peer has read up to a position, or begun to; what is sent again is no progress."""
        if position > self._furthest_position:
            self._furthest_position, self.last_progress_at = position, time.monotonic()

    @property
    def expires_at(self) -> float:
        """Time at which the peer has read nothing for too long; infinity: nothing waits."""
        return self.last_progress_at + self.patience if self.outgoing.next else math.inf


WINDOW_BYTES = 4 << 20


class PeerIsGoneError(Exception):
    """An error for threads that carry messages: this peer is lost, was dropped, or this rank has left."""


class ReliableQueues:
    """The queues of all peers by rank, for any number of threads.

    Args:
        grace_seconds: how long a peer may be unreachable before it is lost.
    """

    def __init__(self, grace_seconds: float) -> None:
        self.grace_seconds = grace_seconds
        self._changed = threading.Condition()
        self._peers: dict[int, PeerQueue] = {}
        self._arrived: deque[tuple[ChannelMessage, int]] = deque()
        # Errors that were not raised yet.
        self._lost: deque[CommunicationError] = deque()
        # Peers that were lost before they had all their messages.
        self._lost_before_delivery: set[int] = set()
        self._num_readers = 0

    def add_peer(self, rank: int) -> None:
        """Add a peer that has connected."""
        with self._changed:
            self._peers[rank] = PeerQueue(rank)
            self._changed.notify_all()

    @property
    def ranks(self) -> list[int]:
        """The peers that are connected."""
        with self._changed:
            return sorted(self._peers)

    def put(self, rank: int, chunks: tuple[bytes, ...], patience_seconds: float) -> None:
        """Add a message for a peer.

        Raises:
            CommunicationError: it is lost, and that was raised before.
        """
        with self._changed:
            peer = self._peers.get(rank)
            if peer is None:
                if any(error.peer == rank for error in self._lost):
                    # The next `receive` or `flush` raises the error of this peer.
                    return
                raise peer_gone_error(rank)
            peer.put(chunks, patience_seconds)
            self._changed.notify_all()

    def receive(self, seconds: float) -> ChannelMessage | None:
        """Return the next message; None: none arrived in time.

        Raises:
            CommunicationError: a peer is lost, or none is left.
        """
        with self._reading():
            if not self._wait_until(lambda: bool(self._arrived), seconds):
                return None
            message, num_bytes = self._arrived.popleft()
            if message.sender in self._peers:
                self._peers[message.sender].num_unread_bytes -= num_bytes
            return message

    def flush(self, seconds: float) -> bool:
        """Wait until every peer has its messages, and return whether it has.

        Raises:
            CommunicationError: a peer was lost before it had its messages.
        """
        with self._reading():
            done = self._wait_until(
                lambda: all(peer.outgoing.next is None for peer in self._peers.values()), seconds
            )
            for error in [error for error in self._lost if error.peer in self._lost_before_delivery]:
                self._lost.remove(error)
                raise error
            return done

    def wait_for_delivery(self, seconds: float) -> None:
        """Wait, at most so long, until peers have the messages that they read without waiting for one."""
        with self._changed:
            peers = self._peers.values()
            self._changed.wait_for(
                lambda: not any(0 < peer.outgoing.num_bytes <= WINDOW_BYTES for peer in peers), seconds
            )

    def last_activity(self, rank: int) -> float:
        """Return when a peer last read or sent a byte of a message; minus infinity: it is lost."""
        with self._changed:
            peer = self._peers.get(rank)
            return -math.inf if peer is None else max(peer.last_progress_at, peer.last_received_at)

    def num_unsent_bytes(self, rank: int) -> int:
        """Return how many bytes a peer has not acknowledged."""
        with self._changed:
            return self._peers[rank].outgoing.num_bytes if rank in self._peers else 0

    def drop(self, rank: int) -> None:
        """Drop a peer, with its messages that were not received yet."""
        with self._changed:
            self._peers.pop(rank, None)
            self._arrived = deque(arrival for arrival in self._arrived if arrival[0].sender != rank)
            self._lost = deque(error for error in self._lost if error.peer != rank)
            self._changed.notify_all()

    def _wait_until(self, condition: Callable[[], bool], seconds: float) -> bool:
        expires = time.monotonic() + seconds
        while not condition():
            self._drop_late_peers()
            if self._lost:
                raise self._lost.popleft()
            if not self._peers:
                raise CommunicationError("all ranks of this channel are gone", next_step=LOOK_ELSEWHERE)
            left = min(expires, *(self._due(peer) for peer in self._peers.values())) - time.monotonic()
            if expires <= time.monotonic():
                return False
            # Also wakes up when a peer becomes late, as no other thread would; `wait` does not accept
            # infinity.
            self._changed.wait(max(0.0, min(left, threading.TIMEOUT_MAX)))
        return True

    def _due(self, peer: PeerQueue) -> float:
        return min(peer.expires_at, peer.last_contact_at + self.grace_seconds)

    def _drop_late_peers(self) -> None:
        now = time.monotonic()
        for peer in [*self._peers.values()]:
            if peer.last_contact_at + self.grace_seconds <= now:
                self._mark_lost(
                    peer_gone_error(
                        peer.rank, f"it has been unreachable for {now - peer.last_contact_at:.0f} s"
                    )
                )
            elif peer.expires_at <= now:
                self._mark_lost(peer_not_reading_error(peer.rank))

    def _mark_lost(self, error: CommunicationError) -> None:
        if error.peer is not None and error.peer in self._peers:
            self._lost_before_delivery |= {error.peer} if self._peers.pop(error.peer).outgoing.next else set()
            self._lost.append(error)
        self._changed.notify_all()

    @contextmanager
    def _reading(self) -> Iterator[None]:
        with self._changed:
            self._num_readers += 1
            self._changed.notify_all()
            try:
                yield
            finally:
                self._num_readers -= 1

    # For the threads that carry messages.

    def note_contact(self, rank: int) -> None:
        """Record a call of a peer, which shows that it can be reached."""
        with self._changed:
            self._peer(rank).last_contact_at = time.monotonic()

    def mark_lost(self, error: CommunicationError) -> None:
        """Mark the peer of an error as lost for good."""
        with self._changed:
            self._mark_lost(error)

    def next_message(self, rank: int, seconds: float, wanted: Callable[[], bool]) -> NumberedMessage | None:
        """Return the first message that a peer has not acknowledged; None: none in time, or not wanted any
        more.
        """
        with self._changed:
            expires = time.monotonic() + seconds
            while (message := self._peer(rank).outgoing.next) is None:
                if not wanted() or expires <= time.monotonic():
                    return None
                self._changed.wait(expires - time.monotonic())
            return message

    def note_progress(self, rank: int, position: StreamPosition) -> None:
        """Record that a peer has begun to read up to a position."""
        with self._changed:
            self._peer(rank).note_progress(position)

    def acknowledge(self, rank: int, position: StreamPosition) -> None:
        """Record that a peer has everything up to a position.

        Raises:
            ValueError: it cannot have it.
        """
        with self._changed:
            peer = self._peer(rank)
            peer.outgoing.acknowledge(position.number)
            peer.note_progress(position)
            self._changed.notify_all()

    def position(self, rank: int) -> StreamPosition:
        """Return the position up to which this rank has a peer's messages."""
        with self._changed:
            return self._peer(rank).incoming.position

    def begin_call(self, rank: int, number: int, num_bytes: int) -> int:
        """Begin a call of a peer; see `MessageAssembler.begin_call`."""
        with self._changed:
            # An earlier call of this peer may be waiting for room: it has to end now.
            self._changed.notify_all()
            return self._peer(rank).incoming.begin_call(number, num_bytes)

    def add_chunk(
        self, rank: int, call: int, chunk: bytes, seconds: float, wanted: Callable[[], bool]
    ) -> bool:
        """Add a chunk once there is room, and return whether the call may continue.

        Raises:
            ValueError: it is no valid message.
        """
        with self._changed:
            expires = time.monotonic() + seconds
            while not self._has_room(self._peer(rank), len(chunk)):
                if (
                    not wanted()
                    or expires <= time.monotonic()
                    or not self._peer(rank).incoming.is_current(call)
                ):
                    return False
                self._changed.wait(expires - time.monotonic())
            peer = self._peer(rank)
            if not peer.incoming.is_current(call):
                return False
            # Taken before the chunk is added: the position starts again with a whole message.
            num_bytes = peer.incoming.position.num_bytes + len(chunk)
            message = peer.incoming.add_chunk(call, chunk)
            peer.last_received_at = peer.last_contact_at = time.monotonic()
            if message is not None:
                peer.num_unread_bytes += num_bytes
                self._arrived.append((message, num_bytes))
                self._changed.notify_all()
            return message is None

    def wake(self) -> None:
        """Let all waiting threads check their conditions again."""
        with self._changed:
            self._changed.notify_all()

    def _has_room(self, peer: PeerQueue, num_bytes: int) -> bool:
        waiting = peer.num_unread_bytes + peer.incoming.position.num_bytes + num_bytes
        # A waiting reader empties the queue at once; without one, a peer may only fill its window.
        return self._num_readers > 0 or waiting <= WINDOW_BYTES

    def _peer(self, rank: int) -> PeerQueue:
        if rank not in self._peers:
            raise PeerIsGoneError
        return self._peers[rank]
