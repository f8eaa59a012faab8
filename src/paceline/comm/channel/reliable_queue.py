"""Messages with numbers: kept until the other side has them, and taken once, however often they come.

A letter is a message as bytes, in chunks; the letters of one sender are numbered from 1. The taker says how
far it has come, as the number of its last whole letter and the bytes that it has of the next, and the sender
goes on from there. Invariant: whatever is sent again, or ends in the middle, every letter is taken exactly
once and in order. Pure: no sockets, no clock.
Source: sequence numbers and cumulative acknowledgement, as of TCP (RFC 9293, section 3.4), here by message.

What there is between this rank and one peer: letters that wait, letters that come, when it last moved.

The letters between this rank and its peers, shared by who speaks and the threads that carry them.

Invariant: a peer is there, or lost for good; that it is lost is told once. Room for what nobody reads is
bounded: chunks are taken while somebody waits for a message, and up to `WINDOW_BYTES` of a peer otherwise, so
one that does not read is seen to stand still. Every wait ends: by a time, or when a peer is lost.
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
    """How far somebody has come: the last whole letter, and the bytes that there are of the next."""

    number: int
    num_bytes: int


class NumberedMessage(NamedTuple):
    """A message that is on its way."""

    number: int
    chunks: tuple[bytes, ...]

    def after(self, num_bytes: int) -> Iterator[bytes]:
        """The chunks behind the first bytes."""
        for chunk in self.chunks:
            if num_bytes < len(chunk):
                yield chunk[num_bytes:] if num_bytes else chunk
            num_bytes = max(0, num_bytes - len(chunk))


def encode_message_chunks(message: ChannelMessage) -> tuple[bytes, ...]:
    """A copy of a message as bytes: lengths, header, and the values of its tensors, in chunks."""
    head, bodies = message.encode()
    parts = [memoryview(head), *bodies]
    chunks: list[list[memoryview]] = [[]]
    room = CHUNK_BYTES
    for piece in (part[at : at + CHUNK_BYTES] for part in parts for at in range(0, len(part), CHUNK_BYTES)):
        if len(piece) > room:
            chunks.append([])
            room = CHUNK_BYTES
        chunks[-1].append(piece)
        room -= len(piece)
    return tuple(b"".join(pieces) for pieces in chunks)


class UnacknowledgedQueue:
    """The letters for one taker that it has not said it has."""

    def __init__(self) -> None:
        self._letters: deque[NumberedMessage] = deque()
        self._last = 0

    def put(self, chunks: tuple[bytes, ...]) -> int:
        """One more letter; returns its number."""
        self._last += 1
        self._letters.append(NumberedMessage(self._last, chunks))
        return self._last

    @property
    def next(self) -> NumberedMessage | None:
        """The first that is not acknowledged; None: all are."""
        return self._letters[0] if self._letters else None

    @property
    def num_bytes(self) -> int:
        """Of all that are not acknowledged."""
        return sum(len(chunk) for letter in self._letters for chunk in letter.chunks)

    def has(self, number: int) -> None:
        """The taker has all letters up to this one.

        Raises:
            ValueError: it cannot have it.
        """
        if not 0 <= number <= self._last:
            raise ValueError(f"letter {number} was never sent, the last is {self._last}")
        while self._letters and self._letters[0].number <= number:
            self._letters.popleft()


class MessageAssembler:
    """What has come from one sender.

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
    def place(self) -> StreamPosition:
        """How far it has come."""
        return StreamPosition(self._number, len(self._head) + len(self._body))

    def begin(self, number: int, num_bytes: int) -> int:
        """A call begins that brings a letter from a byte on; calls before it have nothing more to bring.

        Returns:
            What the call says with each of its chunks; 0: what it brings is not what comes next.
        """
        self._call += 1
        return self._call if (number - 1, num_bytes) == self.place else 0

    def is_current(self, call: int) -> bool:
        """Whether no other call has begun since, and its letter is not whole."""
        return call == self._call

    def take(self, call: int, chunk: bytes) -> ChannelMessage | None:
        """One chunk of a call; returns the message once it is whole. A call that is over brings nothing.

        Raises:
            ValueError: it is no message.
        """
        if call != self._call or not chunk:
            return None
        self._fill(chunk)
        wanted = self._lengths()
        if wanted is None or len(self._head) + len(self._body) < sum(wanted):
            return None
        if len(self._body) != wanted[1]:
            raise ValueError("more came than the message is long")
        head = bytes(self._head[FRAME_LENGTHS.size :])
        message = ChannelMessage.decode(head, as_bytes(self._body), self._sender)
        self._number += 1
        self._call += 1
        self._clear()
        return message

    def _fill(self, chunk: bytes) -> None:
        """Head first: its lengths, then itself. Memory grows only with what has come."""
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
        """Bytes of the head with its lengths, and of the body; None: they have not come."""
        if len(self._head) < FRAME_LENGTHS.size:
            return None
        head, body = FRAME_LENGTHS.unpack_from(self._head)
        if head > MAX_HEADER_BYTES or body > MAX_TENSOR_BYTES:
            raise ValueError(f"a header of {head} bytes and tensors of {body}")
        return FRAME_LENGTHS.size + head, body


class PeerQueue:
    """Of one peer; whoever uses it holds the lock of its room.

    Attributes:
        patience: seconds for which the peer may take nothing while something waits.
        last_progress_at, last_received_at, last_contact_at: when it last took a part of a letter, sent one, or showed that it is
            there.
        num_unread_bytes: of its letters that nobody has heard.
    """

    def __init__(self, rank: int) -> None:
        self.rank, self.sent, self.taken = rank, UnacknowledgedQueue(), MessageAssembler(rank)
        self.patience = math.inf
        self.last_progress_at = self.last_received_at = self.last_contact_at = time.monotonic()
        self.num_unread_bytes = 0
        self._furthest_position = StreamPosition(0, 0)

    def put(self, chunks: tuple[bytes, ...], patience_seconds: float) -> None:
        """One more letter."""
        if self.sent.next is None:
            self.last_progress_at = time.monotonic()
        self.patience = patience_seconds
        self.sent.put(chunks)

    def moved(self, place: StreamPosition) -> None:
        """It has taken so much, or has begun to; what is sent again is no movement."""
        if place > self._furthest_position:
            self._furthest_position, self.last_progress_at = place, time.monotonic()

    @property
    def expires_at(self) -> float:
        """When it has taken nothing for too long; infinity: nothing waits."""
        return self.last_progress_at + self.patience if self.sent.next else math.inf


WINDOW_BYTES = 4 << 20


class PeerIsGoneError(Exception):
    """For threads that carry letters: this peer is lost, was dropped, or this rank has left."""


class ReliableQueues:
    """Boxes by rank, for any number of threads.

    Args:
        grace_seconds: how long a peer may be out of reach before it is lost.
    """

    def __init__(self, grace_seconds: float) -> None:
        self.grace_seconds = grace_seconds
        self._changed = threading.Condition()
        self._boxes: dict[int, PeerQueue] = {}
        self._arrived: deque[tuple[ChannelMessage, int]] = deque()
        self._lost: deque[CommunicationError] = deque()  # not told yet
        self._short: set[int] = set()  # peers that were lost before they had all
        self._num_readers = 0

    def add(self, rank: int) -> None:
        """A peer is there."""
        with self._changed:
            self._boxes[rank] = PeerQueue(rank)
            self._changed.notify_all()

    @property
    def ranks(self) -> list[int]:
        """The peers that are there."""
        with self._changed:
            return sorted(self._boxes)

    def put(self, rank: int, chunks: tuple[bytes, ...], patience_seconds: float) -> None:
        """One more letter for a peer.

        Raises:
            CommunicationError: it is lost, and that was told before.
        """
        with self._changed:
            box = self._boxes.get(rank)
            if box is None:
                if any(error.peer == rank for error in self._lost):
                    return  # whoever hears next is told
                raise peer_gone_error(rank)
            box.put(chunks, patience_seconds)
            self._changed.notify_all()

    def hear(self, seconds: float) -> ChannelMessage | None:
        """The next message; None: none in so many seconds.

        Raises:
            CommunicationError: a peer is lost, or nobody is left.
        """
        with self._reading():
            if not self._wait_until(lambda: bool(self._arrived), seconds):
                return None
            message, num_bytes = self._arrived.popleft()
            if message.sender in self._boxes:
                self._boxes[message.sender].num_unread_bytes -= num_bytes
            return message

    def settle(self, seconds: float) -> bool:
        """Wait until every peer has its letters; whether it has. Errors as of `hear`, of who has not."""
        with self._reading():
            done = self._wait_until(
                lambda: all(box.sent.next is None for box in self._boxes.values()), seconds
            )
            for error in [error for error in self._lost if error.peer in self._short]:
                self._lost.remove(error)
                raise error
            return done

    def wait_for_delivery(self, seconds: float) -> None:
        """Wait until peers have what they take without being asked, at most so long."""
        with self._changed:
            boxes = self._boxes.values()
            self._changed.wait_for(
                lambda: not any(0 < box.sent.num_bytes <= WINDOW_BYTES for box in boxes), seconds
            )

    def last_activity(self, rank: int) -> float:
        """When a peer last took or sent a byte of a letter; minus infinity: it is lost."""
        with self._changed:
            box = self._boxes.get(rank)
            return -math.inf if box is None else max(box.last_progress_at, box.last_received_at)

    def num_unsent_bytes(self, rank: int) -> int:
        """How much a peer has not said it has."""
        with self._changed:
            return self._boxes[rank].sent.num_bytes if rank in self._boxes else 0

    def forget(self, rank: int) -> None:
        """Drop a peer, with what it has said and nobody has heard."""
        with self._changed:
            self._boxes.pop(rank, None)
            self._arrived = deque(one for one in self._arrived if one[0].sender != rank)
            self._lost = deque(error for error in self._lost if error.peer != rank)
            self._changed.notify_all()

    def _wait_until(self, is_so: Callable[[], bool], seconds: float) -> bool:
        expires = time.monotonic() + seconds
        while not is_so():
            self._drop_late_peers()
            if self._lost:
                raise self._lost.popleft()
            if not self._boxes:
                raise CommunicationError("all ranks of this channel are gone", next_step=LOOK_ELSEWHERE)
            left = min(expires, *(self._due(box) for box in self._boxes.values())) - time.monotonic()
            if expires <= time.monotonic():
                return False
            self._changed.wait(max(0.0, min(left, threading.TIMEOUT_MAX)))
        return True

    def _due(self, box: PeerQueue) -> float:
        return min(box.expires_at, box.last_contact_at + self.grace_seconds)

    def _drop_late_peers(self) -> None:
        now = time.monotonic()
        for box in [*self._boxes.values()]:
            if box.last_contact_at + self.grace_seconds <= now:
                self._lose(
                    peer_gone_error(box.rank, f"it is out of reach for {now - box.last_contact_at:.0f} s")
                )
            elif box.expires_at <= now:
                self._lose(peer_not_reading_error(box.rank))

    def _lose(self, error: CommunicationError) -> None:
        if error.peer is not None and error.peer in self._boxes:
            self._short |= {error.peer} if self._boxes.pop(error.peer).sent.next else set()
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

    # For who carries.

    def met(self, rank: int) -> None:
        """A peer has shown that it is there."""
        with self._changed:
            self._box(rank).last_contact_at = time.monotonic()

    def lose(self, error: CommunicationError) -> None:
        """The peer of an error is lost for good."""
        with self._changed:
            self._lose(error)

    def next_message(self, rank: int, seconds: float, wanted: Callable[[], bool]) -> NumberedMessage | None:
        """What a peer has not said it has; None: nothing in so many seconds, or not wanted any more."""
        with self._changed:
            expires = time.monotonic() + seconds
            while (letter := self._box(rank).sent.next) is None:
                if not wanted() or expires <= time.monotonic():
                    return None
                self._changed.wait(expires - time.monotonic())
            return letter

    def moved(self, rank: int, place: StreamPosition) -> None:
        """A peer has begun to take so much."""
        with self._changed:
            self._box(rank).moved(place)

    def has(self, rank: int, place: StreamPosition) -> None:
        """A peer says that it has so much.

        Raises:
            ValueError: it cannot have it.
        """
        with self._changed:
            box = self._box(rank)
            box.sent.has(place.number)
            box.moved(place)
            self._changed.notify_all()

    def place(self, rank: int) -> StreamPosition:
        """How much this rank has of a peer's letters."""
        with self._changed:
            return self._box(rank).taken.place

    def begin(self, rank: int, number: int, num_bytes: int) -> int:
        with self._changed:
            self._changed.notify_all()  # a call before it may wait for room
            return self._box(rank).taken.begin(number, num_bytes)

    def take(self, rank: int, call: int, chunk: bytes, seconds: float, wanted: Callable[[], bool]) -> bool:
        """Take a chunk once there is room; whether the call may go on.

        Raises:
            ValueError: it is no message.
        """
        with self._changed:
            expires = time.monotonic() + seconds
            while not self._has_room(self._box(rank), len(chunk)):
                if not wanted() or expires <= time.monotonic() or not self._box(rank).taken.is_current(call):
                    return False
                self._changed.wait(expires - time.monotonic())
            box = self._box(rank)
            if not box.taken.is_current(call):
                return False
            num_bytes = box.taken.place.num_bytes + len(chunk)
            message = box.taken.take(call, chunk)
            box.last_received_at = box.last_contact_at = time.monotonic()
            if message is not None:
                box.num_unread_bytes += num_bytes
                self._arrived.append((message, num_bytes))
                self._changed.notify_all()
            return message is None

    def wake(self) -> None:
        """Let all who wait look again at what they wait for."""
        with self._changed:
            self._changed.notify_all()

    def _has_room(self, box: PeerQueue, num_bytes: int) -> bool:
        waiting = box.num_unread_bytes + box.taken.place.num_bytes + num_bytes
        return self._num_readers > 0 or waiting <= WINDOW_BYTES

    def _box(self, rank: int) -> PeerQueue:
        if rank not in self._boxes:
            raise PeerIsGoneError
        return self._boxes[rank]
