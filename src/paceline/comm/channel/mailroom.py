"""The letters between this rank and its peers, shared by who speaks and the threads that carry them.

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

from paceline.comm.channel.box import Box
from paceline.comm.channel.channel import Message
from paceline.comm.channel.letters import Letter, Place
from paceline.comm.channel.lost import LOOK_ELSEWHERE, gone, late
from paceline.errors import CommunicationError

WINDOW_BYTES = 4 << 20


class PeerIsGoneError(Exception):
    """For threads that carry letters: this peer is lost, was dropped, or this rank has left."""


class Mailroom:
    """Boxes by rank, for any number of threads.

    Args:
        grace_seconds: how long a peer may be out of reach before it is lost.
    """

    def __init__(self, grace_seconds: float) -> None:
        self.grace_seconds = grace_seconds
        self._changed = threading.Condition()
        self._boxes: dict[int, Box] = {}
        self._arrived: deque[tuple[Message, int]] = deque()
        self._lost: deque[CommunicationError] = deque()  # not told yet
        self._short: set[int] = set()  # peers that were lost before they had all
        self._readers = 0

    def add(self, rank: int) -> None:
        """A peer is there."""
        with self._changed:
            self._boxes[rank] = Box(rank)
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
                raise gone(rank)
            box.put(chunks, patience_seconds)
            self._changed.notify_all()

    def hear(self, seconds: float) -> Message | None:
        """The next message; None: none in so many seconds.

        Raises:
            CommunicationError: a peer is lost, or nobody is left.
        """
        with self._reading():
            if not self._until(lambda: bool(self._arrived), seconds):
                return None
            message, num_bytes = self._arrived.popleft()
            if message.sender in self._boxes:
                self._boxes[message.sender].num_unread_bytes -= num_bytes
            return message

    def settle(self, seconds: float) -> bool:
        """Wait until every peer has its letters; whether it has. Errors as of `hear`, of who has not."""
        with self._reading():
            done = self._until(lambda: all(box.sent.next is None for box in self._boxes.values()), seconds)
            for error in [error for error in self._lost if error.peer in self._short]:
                self._lost.remove(error)
                raise error
            return done

    def give_time(self, seconds: float) -> None:
        """Wait until peers have what they take without being asked, at most so long."""
        with self._changed:
            boxes = self._boxes.values()
            self._changed.wait_for(
                lambda: not any(0 < box.sent.num_bytes <= WINDOW_BYTES for box in boxes), seconds
            )

    def last_sign(self, rank: int) -> float:
        """When a peer last took or sent a byte of a letter; minus infinity: it is lost."""
        with self._changed:
            box = self._boxes.get(rank)
            return -math.inf if box is None else max(box.moved_at, box.spoke_at)

    def num_waiting_bytes(self, rank: int) -> int:
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

    def _until(self, is_so: Callable[[], bool], seconds: float) -> bool:
        expires = time.monotonic() + seconds
        while not is_so():
            self._lose_who_islate()
            if self._lost:
                raise self._lost.popleft()
            if not self._boxes:
                raise CommunicationError("all ranks of this channel are gone", next_step=LOOK_ELSEWHERE)
            left = min(expires, *(self._due(box) for box in self._boxes.values())) - time.monotonic()
            if expires <= time.monotonic():
                return False
            self._changed.wait(max(0.0, min(left, threading.TIMEOUT_MAX)))
        return True

    def _due(self, box: Box) -> float:
        return min(box.expires_at, box.met_at + self.grace_seconds)

    def _lose_who_islate(self) -> None:
        now = time.monotonic()
        for box in [*self._boxes.values()]:
            if box.met_at + self.grace_seconds <= now:
                self._lose(gone(box.rank, f"it is out of reach for {now - box.met_at:.0f} s"))
            elif box.expires_at <= now:
                self._lose(late(box.rank))

    def _lose(self, error: CommunicationError) -> None:
        if error.peer is not None and error.peer in self._boxes:
            self._short |= {error.peer} if self._boxes.pop(error.peer).sent.next else set()
            self._lost.append(error)
        self._changed.notify_all()

    @contextmanager
    def _reading(self) -> Iterator[None]:
        with self._changed:
            self._readers += 1
            self._changed.notify_all()
            try:
                yield
            finally:
                self._readers -= 1

    # For who carries.

    def met(self, rank: int) -> None:
        """A peer has shown that it is there."""
        with self._changed:
            self._box(rank).met_at = time.monotonic()

    def lose(self, error: CommunicationError) -> None:
        """The peer of an error is lost for good."""
        with self._changed:
            self._lose(error)

    def next_letter(self, rank: int, seconds: float, wanted: Callable[[], bool]) -> Letter | None:
        """What a peer has not said it has; None: nothing in so many seconds, or not wanted any more."""
        with self._changed:
            expires = time.monotonic() + seconds
            while (letter := self._box(rank).sent.next) is None:
                if not wanted() or expires <= time.monotonic():
                    return None
                self._changed.wait(expires - time.monotonic())
            return letter

    def moved(self, rank: int, place: Place) -> None:
        """A peer has begun to take so much."""
        with self._changed:
            self._box(rank).moved(place)

    def has(self, rank: int, place: Place) -> None:
        """A peer says that it has so much.

        Raises:
            ValueError: it cannot have it.
        """
        with self._changed:
            box = self._box(rank)
            box.sent.has(place.number)
            box.moved(place)
            self._changed.notify_all()

    def place(self, rank: int) -> Place:
        """How much this rank has of a peer's letters."""
        with self._changed:
            return self._box(rank).taken.place

    def begin(self, rank: int, number: int, num_bytes: int) -> int:
        """See `Taken.begin`."""
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
            box.spoke_at = box.met_at = time.monotonic()
            if message is not None:
                box.num_unread_bytes += num_bytes
                self._arrived.append((message, num_bytes))
                self._changed.notify_all()
            return message is None

    def wake(self) -> None:
        """Let all who wait look again at what they wait for."""
        with self._changed:
            self._changed.notify_all()

    def _has_room(self, box: Box, num_bytes: int) -> bool:
        waiting = box.num_unread_bytes + box.taken.place.num_bytes + num_bytes
        return self._readers > 0 or waiting <= WINDOW_BYTES

    def _box(self, rank: int) -> Box:
        if rank not in self._boxes:
            raise PeerIsGoneError
        return self._boxes[rank]
