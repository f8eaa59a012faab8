"""A member's end of the store: one question after another, each with a deadline.

Invariant: an interrupted question leaves no harm: its late answer is known by its number, and thrown away.
Threads may share a client; whoever waits lets the others in between.
"""

from __future__ import annotations

import itertools
import secrets
import select
import socket
import threading
import time
from collections.abc import Sequence
from contextlib import suppress

from paceline.errors import CommunicationError, DeadlineError
from paceline.job import store_protocol
from paceline.job.store_protocol import (
    AWAIT,
    DONE,
    GONE,
    LATE,
    LOST,
    StoreMessage,
    decode_members,
    encode_members,
    encode_message,
    pop_message,
)

_READ_BYTES = 1 << 16
_SLICE_SECONDS = 0.2  # of a wait, at a time: a signal is seen, and other threads come in between
_ANSWER_SECONDS = 10.0  # what the server itself may take, beside what it was asked to wait


class KeyTimeoutError(DeadlineError):
    """Keys that were not there at the deadline, in `keys`."""

    def __init__(self, keys: Sequence[str]) -> None:
        super().__init__(
            f"at the deadline there was no {', '.join(keys)} in the store of the job",
            next_step="look at the logs of the other ranks, or raise runtime.deadline_seconds",
        )
        self.keys = tuple(keys)


class MemberLostError(CommunicationError):
    """Members that are gone, in `members`; what was waited for will not come."""

    def __init__(self, members: Sequence[int]) -> None:
        super().__init__(
            f"rank {', '.join(map(str, members))} is gone: its connection to the store of the job has ended",
            next_step="look at the first rank that ended: it is the cause",
        )
        self.members = tuple(members)


class StoreClient:
    """Asks the store.

    Args:
        connection: to the server; this client does not own it before `close`.
    """

    def __init__(self, connection: socket.socket) -> None:
        self._connection = connection
        connection.setblocking(False)
        self._heard, self._unsent = bytearray(), bytearray()
        self._numbers = itertools.count(secrets.randbelow(1 << 30))
        self._lock = threading.Lock()

    def close(self) -> None:
        """End the connection; for the others this member is gone."""
        self._connection.close()

    def ask(self, word: bytes, *fields: bytes) -> tuple[bytes, ...]:
        """One of the words of `Values`.

        Raises:
            CommunicationError: the server is gone, refuses, or does not answer.
        """
        answer = self._ask(word, fields, 0.0)
        if answer.word != DONE:
            said = b" ".join(answer.fields).decode(errors="replace")
            raise CommunicationError(f"the store of the job refuses: {said}")
        return answer.fields

    def wait(self, keys: Sequence[str], seconds: float, watched: Sequence[int] = ()) -> list[bytes]:
        """The values of some keys, once all of them are there.

        Args:
            watched: members that must not leave before.
        Raises:
            Late: they are not there after so many seconds.
            Lost: some of the watched are gone, and keys are missing.
            CommunicationError: the server is gone, or does not answer.
        """
        expires = time.monotonic() + seconds
        encoded = [key.encode() for key in keys]
        while True:
            left = max(0.0, expires - time.monotonic())
            part = min(left, _SLICE_SECONDS)
            answer = self._ask(AWAIT, (b"%f" % part, encode_members(watched), *encoded), part)
            if answer.word == DONE:
                return list(answer.fields)
            if answer.word == GONE:
                raise MemberLostError(sorted(decode_members(answer.fields[0])))
            if answer.word != LATE:
                raise CommunicationError("the store of the job refuses to wait")
            if left <= _SLICE_SECONDS:
                raise KeyTimeoutError([key.decode() for key in answer.fields])

    def lost(self) -> frozenset[int]:
        """Members that have come and are gone."""
        return decode_members(self.ask(LOST)[0])

    def tell(self, text: str) -> None:
        """Have something said where the store is served."""
        self.ask(store_protocol.LOG_TEXT, text.encode())

    def _ask(self, word: bytes, fields: Sequence[bytes], patience: float) -> StoreMessage:
        with self._lock:
            number = next(self._numbers) & 0xFFFFFFFF
            expires = time.monotonic() + patience + _ANSWER_SECONDS
            try:
                self._unsent += encode_message(StoreMessage(number, word, tuple(fields)))
                self._send(expires)
                while (answer := self._next(expires)).number != number:
                    pass
                return answer
            except (OSError, ValueError) as error:
                raise CommunicationError(
                    f"the store of the job is gone: {error}",
                    next_step="look at the launcher of node 0: it serves the store",
                ) from error

    def _send(self, expires: float) -> None:
        while self._unsent:
            self._await(expires, select.POLLOUT)
            with suppress(BlockingIOError):  # there is room, but not for all of an encrypted record
                del self._unsent[: self._connection.send(self._unsent)]

    def _next(self, expires: float) -> StoreMessage:
        while (message := pop_message(self._heard)) is None:
            self._await(expires, select.POLLIN)
            with suppress(BlockingIOError):  # a part of an encrypted record is there
                part = self._connection.recv(_READ_BYTES)
                if not part:
                    raise ConnectionResetError("it has hung up")
                self._heard += part
        return message

    def _await(self, expires: float, event: int) -> None:
        poll = select.poll()
        poll.register(self._connection, event)
        if not poll.poll(max(0.0, expires - time.monotonic()) * 1000):
            raise TimeoutError("it does not answer")
