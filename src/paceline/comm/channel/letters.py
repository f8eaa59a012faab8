"""Messages with numbers: kept until the other side has them, and taken once, however often they come.

A letter is a message as bytes, in chunks; the letters of one sender are numbered from 1. The taker says how
far it has come, as the number of its last whole letter and the bytes that it has of the next, and the sender
goes on from there. Invariant: whatever is sent again, or ends in the middle, every letter is taken exactly
once and in order. Pure: no sockets, no clock.
Source: sequence numbers and cumulative acknowledgement, as of TCP (RFC 9293, section 3.4), here by message.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from typing import NamedTuple

from paceline.comm.channel.channel import FRAME_LENGTHS, MOST_BYTES, Message, as_bytes
from paceline.comm.channel.frame_header import MOST_HEADER_BYTES

CHUNK_BYTES = 1 << 20


class Place(NamedTuple):
    """How far somebody has come: the last whole letter, and the bytes that there are of the next."""

    number: int
    num_bytes: int


class Letter(NamedTuple):
    """A message that is on its way."""

    number: int
    chunks: tuple[bytes, ...]

    def after(self, num_bytes: int) -> Iterator[bytes]:
        """The chunks behind the first bytes."""
        for chunk in self.chunks:
            if num_bytes < len(chunk):
                yield chunk[num_bytes:] if num_bytes else chunk
            num_bytes = max(0, num_bytes - len(chunk))


def chunks_of(message: Message) -> tuple[bytes, ...]:
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


class Sent:
    """The letters for one taker that it has not said it has."""

    def __init__(self) -> None:
        self._letters: deque[Letter] = deque()
        self._last = 0

    def put(self, chunks: tuple[bytes, ...]) -> int:
        """One more letter; returns its number."""
        self._last += 1
        self._letters.append(Letter(self._last, chunks))
        return self._last

    @property
    def next(self) -> Letter | None:
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


class Taken:
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
    def place(self) -> Place:
        """How far it has come."""
        return Place(self._number, len(self._head) + len(self._body))

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

    def take(self, call: int, chunk: bytes) -> Message | None:
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
        message = Message.decode(head, as_bytes(self._body), self._sender)
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
        if head > MOST_HEADER_BYTES or body > MOST_BYTES:
            raise ValueError(f"a header of {head} bytes and tensors of {body}")
        return FRAME_LENGTHS.size + head, body
