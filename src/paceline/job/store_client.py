"""A member's end of the store: one request after the other, each with a deadline.

Invariant: an interrupted request does no harm, since its late answer is recognised by its number and dropped.
Threads can share a client; a thread that waits for keys lets the requests of others pass in between.
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
_SLICE_SECONDS = 0.2  # a wait is divided into slices, between which signals and other threads are served
_ANSWER_SECONDS = 10.0  # time for the server itself, in addition to the requested wait


class KeyTimeoutError(DeadlineError):
    """An error about keys that did not appear in time, in `keys`."""

    def __init__(self, keys: Sequence[str]) -> None:
        super().__init__(
            f"{', '.join(keys)} did not appear in the store of the job in time",
            next_step="look at the logs of the other ranks, or raise runtime.deadline_seconds",
        )
        self.keys = tuple(keys)


class MemberLostError(CommunicationError):
    """An error about members that are gone, in `members`, so that a wait for their keys cannot succeed."""

    def __init__(self, members: Sequence[int]) -> None:
        super().__init__(
            f"rank {', '.join(map(str, members))} is gone: its connection to the store of the job has ended",
            next_step="look at the first rank that ended: it is the cause",
        )
        self.members = tuple(members)


class StoreLostError(CommunicationError):
    """An error about the store itself: its server has ended the connection, or does not answer."""


class StoreClient:
    """A connection to the store, which sends requests and waits for their answers.

    Args:
        connection: a socket to the server, which is made non-blocking.
    """

    def __init__(self, connection: socket.socket) -> None:
        self._connection = connection
        connection.setblocking(False)
        self._received, self._unsent = bytearray(), bytearray()
        self._numbers = itertools.count(secrets.randbelow(1 << 30))
        self._lock = threading.Lock()

    def close(self) -> None:
        """Close the connection; the other members then see this one as gone."""
        self._connection.close()

    def request(self, word: bytes, *fields: bytes) -> tuple[bytes, ...]:
        """Send a request of `KeyValueTable` and return the fields of the answer.

        Raises:
            StoreLostError: the server is gone, or does not answer.
            CommunicationError: it refuses the request.
        """
        answer = self._request(word, fields, 0.0)
        if answer.word != DONE:
            reason = b" ".join(answer.fields).decode(errors="replace")
            raise CommunicationError(f"the store of the job refused a request: {reason}")
        return answer.fields

    def wait(self, keys: Sequence[str], seconds: float, watched: Sequence[int] = ()) -> list[bytes]:
        """Wait until all `keys` exist; returns their values.

        Args:
            watched: members without which the wait is pointless.
        Raises:
            KeyTimeoutError: some keys did not appear within `seconds`.
            MemberLostError: keys are missing, and some of the watched members are gone.
            StoreLostError: the server is gone, or does not answer.
        """
        expires = time.monotonic() + seconds
        encoded = [key.encode() for key in keys]
        while True:
            remaining = max(0.0, expires - time.monotonic())
            slice_seconds = min(remaining, _SLICE_SECONDS)
            fields = (b"%f" % slice_seconds, encode_members(watched), *encoded)
            answer = self._request(AWAIT, fields, slice_seconds)
            if answer.word == DONE:
                return list(answer.fields)
            if answer.word == GONE:
                raise MemberLostError(sorted(decode_members(answer.fields[0])))
            if answer.word != LATE:
                raise CommunicationError("the store of the job refused to wait")
            if remaining <= _SLICE_SECONDS:
                raise KeyTimeoutError([key.decode() for key in answer.fields])

    def lost(self) -> frozenset[int]:
        """Return the members that had joined and are gone."""
        return decode_members(self.request(LOST)[0])

    def log_text(self, text: str) -> None:
        """Print a line in the process that serves the store."""
        self.request(store_protocol.LOG_TEXT, text.encode())

    def _request(self, word: bytes, fields: Sequence[bytes], wait_seconds: float) -> StoreMessage:
        with self._lock:
            number = next(self._numbers) & 0xFFFFFFFF
            expires = time.monotonic() + wait_seconds + _ANSWER_SECONDS
            try:
                self._unsent += encode_message(StoreMessage(number, word, tuple(fields)))
                self._send(expires)
                while (answer := self._next(expires)).number != number:
                    pass
                return answer
            except (OSError, ValueError) as error:
                raise StoreLostError(
                    f"the store of the job is gone: {error}",
                    next_step="look at the launcher of node 0, which serves the store",
                ) from error

    def _send(self, expires: float) -> None:
        while self._unsent:
            self._poll(expires, select.POLLOUT)
            with suppress(BlockingIOError):  # there is room, but not for a whole encrypted record
                del self._unsent[: self._connection.send(self._unsent)]

    def _next(self, expires: float) -> StoreMessage:
        while (message := pop_message(self._received)) is None:
            self._poll(expires, select.POLLIN)
            with suppress(BlockingIOError):  # only a part of an encrypted record has arrived
                data = self._connection.recv(_READ_BYTES)
                if not data:
                    raise ConnectionResetError("the server has hung up")
                self._received += data
        return message

    def _poll(self, expires: float, event: int) -> None:
        poll = select.poll()
        poll.register(self._connection, event)
        if not poll.poll(max(0.0, expires - time.monotonic()) * 1000):
            raise TimeoutError("the server does not respond")
