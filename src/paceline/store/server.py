"""The side of the store that holds the values: one thread, which waits for nobody.

Invariant: a member that says nonsense, or does not read, loses its connection and nothing else happens; who
is gone is known, so that nobody waits for what it would have said.
"""

from __future__ import annotations

import contextlib
import selectors
import socket
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from types import TracebackType
from typing import Self

from paceline.store import messages
from paceline.store.door import Door, turned_away
from paceline.store.messages import AWAIT, DONE, GONE, LATE, LOST, REFUSED, SET, TELL, Message, encode
from paceline.store.values import Values

_READ_BYTES = 1 << 16
_MOST_UNREAD = 1 << 26


@dataclass
class _Line:
    """The connection of a member; what it has said, and what it has not read yet."""

    member: int
    connection: socket.socket
    said: bytearray = field(default_factory=bytearray)
    unread: bytearray = field(default_factory=bytearray)


@dataclass(frozen=True)
class _Waiting:
    """A question that has no answer yet."""

    line: _Line
    number: int
    keys: tuple[bytes, ...]
    watched: frozenset[int]
    expires: float


class StoreServer:
    """Serves the members of one job until it is closed.

    Args:
        say: is told of those that were turned away.
    """

    def __init__(self, say: Callable[[str], object] = lambda text: None) -> None:
        self._say = say
        self._values = Values()
        self._lines: dict[int, _Line] = {}
        self._lost: set[int] = set()
        self._waiting: list[_Waiting] = []
        self._selector = selectors.DefaultSelector()
        self._waker, self._wakes = socket.socketpair()
        self._wakes.setblocking(False)
        self._selector.register(self._wakes, selectors.EVENT_READ)
        self._orders: list[Callable[[], object]] = []
        self._lock = threading.Lock()
        self._closing = False
        self._threads = [threading.Thread(target=self._serve, daemon=True, name="paceline-store")]
        self._threads[0].start()

    # -- from other threads -----------------------------------------------------------------------------

    def line_for(self, member: int) -> socket.socket:
        """The far end of a new connection, which a process inherits: whoever holds it is that member."""
        near, far = socket.socketpair()
        self.adopt(member, near)
        return far

    def put(self, key: str, value: str) -> None:
        """Set a value."""
        self._order(lambda: self._values.answer(SET, [key.encode(), value.encode()]))

    def adopt(self, member: int, connection: socket.socket) -> None:
        """Serve a connection whose other end is that member."""
        self._order(lambda: self._begin(member, connection))

    def admit(self, listener: socket.socket, token: str, *, tls: bool = False) -> None:
        """Serve those that call here and show that they know the key; others are turned away.

        Args:
            listener: a listening socket; it is closed with this server.
            tls: whether their connections are encrypted.
        """
        door = Door(listener, token, self.adopt, self._lines.__contains__, self._say, tls=tls)
        doorkeeper = threading.Thread(
            target=door.keep, args=(lambda: self._closing,), daemon=True, name="paceline-store-door"
        )
        self._threads.append(doorkeeper)
        doorkeeper.start()

    def lose(self, member: int) -> None:
        """A process has ended, whatever its connection says: children of its own may hold it."""
        self._order(lambda: self._end(self._lines[member]) if member in self._lines else None)

    def close(self) -> None:
        """End the threads and all connections."""
        self._order(self._stop)
        for thread in self._threads:
            thread.join()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: object, traceback: TracebackType | None
    ) -> None:
        self.close()

    def _order(self, what: Callable[[], object]) -> None:
        with self._lock:
            if self._closing:
                return
            self._orders.append(what)
        self._waker.send(b"!")

    # -- the thread -------------------------------------------------------------------------------------

    def _serve(self) -> None:
        while not self._closing:
            for key, events in self._selector.select(self._seconds_left()):
                if key.fileobj is self._wakes:
                    self._obey()
                elif key.data.member in self._lines:
                    self._attend(key.data, events)
            self._answer_waiting()
        for line in [*self._lines.values()]:
            line.connection.close()
        self._selector.close()
        self._waker.close()
        self._wakes.close()

    def _stop(self) -> None:
        self._closing = True

    def _seconds_left(self) -> float | None:
        if not self._waiting:
            return None
        return max(0.0, min(one.expires for one in self._waiting) - time.monotonic())

    def _obey(self) -> None:
        self._wakes.recv(_READ_BYTES)
        with self._lock:
            orders, self._orders = self._orders, []
        for order in orders:
            order()

    def _begin(self, member: int, connection: socket.socket) -> None:
        if member in self._lines:
            self._end(self._lines[member])
        self._lost.discard(member)
        connection.setblocking(False)
        line = self._lines[member] = _Line(member, connection)
        self._selector.register(connection, selectors.EVENT_READ, line)

    def _end(self, line: _Line) -> None:
        self._selector.unregister(line.connection)
        line.connection.close()
        del self._lines[line.member]
        self._lost.add(line.member)
        self._waiting = [one for one in self._waiting if one.line is not line]

    def _attend(self, line: _Line, events: int) -> None:
        try:
            if events & selectors.EVENT_WRITE:
                self._send(line)
            if events & selectors.EVENT_READ:
                part = line.connection.recv(_READ_BYTES)
                line.said += part
                if not part:
                    self._end(line)
            while line.member in self._lines and (message := messages.take(line.said)) is not None:
                self._answer(line, message)
        except BlockingIOError:
            return
        except (OSError, ValueError):
            if self._lines.get(line.member) is line:
                self._end(line)

    def _answer(self, line: _Line, message: Message) -> None:
        number, word, fields = message.number, message.word, message.fields
        if word == AWAIT:
            seconds, watched, *keys = fields
            expires = time.monotonic() + float(seconds)
            self._waiting.append(_Waiting(line, number, tuple(keys), messages.members_of(watched), expires))
        elif word == LOST:
            self._reply(line, number, DONE, [messages.text_of(sorted(self._lost))])
        elif word == TELL:
            self._say(turned_away(fields[0].decode(errors="replace")))
            self._reply(line, number, DONE, [])
        else:
            try:
                self._reply(line, number, DONE, self._values.answer(word, fields))
            except ValueError as error:
                self._reply(line, number, REFUSED, [str(error).encode()])

    def _answer_waiting(self) -> None:
        """Answer those whose keys are all there, whose time is over, or who wait for somebody gone."""
        now, still = time.monotonic(), []
        for one in self._waiting:
            missing, lost = self._values.missing(one.keys), one.watched & self._lost
            if not missing:
                self._reply(one.line, one.number, DONE, self._values.get(one.keys))
            elif lost:
                self._reply(one.line, one.number, GONE, [messages.text_of(sorted(lost))])
            elif now >= one.expires:
                self._reply(one.line, one.number, LATE, missing)
            else:
                still.append(one)
        self._waiting = [one for one in still if one.line.member in self._lines]

    def _reply(self, line: _Line, number: int, word: bytes, fields: Sequence[bytes]) -> None:
        if self._lines.get(line.member) is not line:
            return
        line.unread += encode(Message(number, word, tuple(fields)))
        try:
            self._send(line)
            if len(line.unread) > _MOST_UNREAD:
                raise OSError("it does not read")
        except OSError:
            self._end(line)

    def _send(self, line: _Line) -> None:
        with contextlib.suppress(BlockingIOError):
            while line.unread:
                del line.unread[: line.connection.send(line.unread)]
        wanted = selectors.EVENT_READ | (selectors.EVENT_WRITE if line.unread else 0)
        self._selector.modify(line.connection, wanted, line)
