"""The values of a store, and what its words do to them. Pure: no sockets, no clock.

Invariant: keys and values together hold at most `MAX_STORE_BYTES`.

The door of a store that is called from other nodes: who shows that it knows the key comes in.

Invariant: nothing is read from a caller that has not, but its greeting (`paceline.job.handshake`). Where the job
encrypts, nothing else is said before the connection does (`paceline.job.tls`).

The side of the store that holds the values: one thread, which waits for nobody.

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

from paceline.errors import CommunicationError
from paceline.job import store_protocol
from paceline.job.handshake import HELLO_SECONDS, VISITOR_OFFSET, AuthenticatingListener
from paceline.job.store_protocol import (
    ADD,
    APPEND,
    AWAIT,
    CHECK,
    COMPARE,
    COUNT,
    DELETE,
    DONE,
    GONE,
    LATE,
    LOG_TEXT,
    LOST,
    REFUSED,
    SET,
    StoreMessage,
    encode_message,
)

MAX_STORE_BYTES = 1 << 28


class KeyValueTable:
    """Bytes by key."""

    def __init__(self) -> None:
        self._values: dict[bytes, bytes] = {}
        self._num_bytes = 0
        self._words: dict[bytes, Callable[..., list[bytes]]] = {
            SET: self._set,
            ADD: self._add,
            APPEND: self._append,
            COMPARE: self._compare_set,
            DELETE: self._delete,
            CHECK: lambda *keys: [_encode_flag(not self.missing(keys))],
            COUNT: lambda: [b"%d" % len(self._values)],
        }

    def answer(self, word: bytes, fields: Sequence[bytes]) -> list[bytes]:
        """Do what a message asks for.

        Raises:
            ValueError: it is no such message, or there is no room.
        """
        try:
            return self._words[word](*fields)
        except (KeyError, TypeError) as error:
            raise ValueError("no such question") from error

    def get(self, keys: Sequence[bytes]) -> list[bytes]:
        """Values that are there."""
        return [self._values[key] for key in keys]

    def missing(self, keys: Sequence[bytes]) -> list[bytes]:
        """Keys that have no value yet."""
        return [key for key in keys if key not in self._values]

    def _set(self, key: bytes, value: bytes) -> list[bytes]:
        self._put(key, value)
        return []

    def _add(self, key: bytes, amount: bytes) -> list[bytes]:
        total = b"%d" % (int(self._values.get(key, b"0")) + int(amount))
        self._put(key, total)
        return [total]

    def _append(self, key: bytes, more: bytes) -> list[bytes]:
        self._put(key, self._values.get(key, b"") + more)
        return []

    def _compare_set(self, key: bytes, expected: bytes, wanted: bytes) -> list[bytes]:
        """As torch's stores do it: a key that is not there is set if nothing was expected."""
        present = self._values.get(key)
        if present == expected or (present is None and not expected):
            self._put(key, wanted)
            return [wanted]
        return [expected if present is None else present]

    def _delete(self, key: bytes) -> list[bytes]:
        value = self._values.pop(key, None)
        self._num_bytes -= 0 if value is None else len(key) + len(value)
        return [_encode_flag(value is not None)]

    def _put(self, key: bytes, value: bytes) -> None:
        old = self._values.get(key)
        grown = len(value) - len(old) if old is not None else len(key) + len(value)
        if self._num_bytes + grown > MAX_STORE_BYTES:
            raise ValueError(f"the store of the job holds at most {MAX_STORE_BYTES} bytes")
        self._num_bytes += grown
        self._values[key] = value


def _encode_flag(truth: bool) -> bytes:
    return b"1" if truth else b"0"


_POLL_SECONDS = 0.25
_MAX_LINE_LENGTH, _MAX_LOGGED_MEMBERS = 300, 20


class StoreListener:
    """Keeps a listening socket.

    Args:
        token: the key of the job.
        adopt: takes the number and the connection of one that came in.
        has_come: whether a number is in already.
        say: is told of members with another key, once each.
        tls: whether connections are encrypted.
    """

    def __init__(
        self,
        listener: socket.socket,
        token: str,
        adopt: Callable[[int, socket.socket], None],
        has_come: Callable[[int], bool],
        say: Callable[[str], object],
        *,
        tls: bool = False,
    ) -> None:
        self._listener, self._adopt_connection, self._say = listener, adopt, say
        self._guests = AuthenticatingListener(listener, token, range(2 * VISITOR_OFFSET), has_come, tls=tls)
        self._admit_connection = ConnectionEncryption(token, adopt, has_come, say) if tls else adopt
        self._told: set[int] = set()

    def keep(self, closing: Callable[[], bool]) -> None:
        """Until it is closing."""
        try:
            while not closing():
                self._guests.hear(_POLL_SECONDS)
                for number in [*self._guests.found]:
                    self._admit_connection(number, self._guests.found.pop(number))
                self._tell()
        finally:
            self._guests.close()
            self._listener.close()

    def _tell(self) -> None:
        wrong = {number % VISITOR_OFFSET: what for number, what in self._guests.unfit.items()}
        for number in sorted(wrong.keys() - self._told)[: _MAX_LOGGED_MEMBERS - len(self._told)]:
            self._told.add(number)
            self._say(rejection_line(f"Rank {number} has {wrong[number]} than this job"))


class ConnectionEncryption:
    """Encrypts the connections of those that have come in, each in a thread of its own: nobody waits for one.

    Args:
        token, adopt, has_come, say: as for `StoreListener`.
    """

    def __init__(
        self,
        token: str,
        adopt: Callable[[int, socket.socket], None],
        has_come: Callable[[int], bool],
        say: Callable[[str], object],
    ) -> None:
        from paceline.job.tls import EphemeralCertificate

        self._token, self._adopt_connection, self._is_known, self._say = token, adopt, has_come, say
        self._certificate = EphemeralCertificate.make()

    def __call__(self, number: int, connection: socket.socket) -> None:
        threading.Thread(
            target=self._secure, args=(number, connection), daemon=True, name="paceline-store-tls"
        ).start()

    def _secure(self, number: int, connection: socket.socket) -> None:
        from paceline.job.tls import encrypt_server_side

        try:
            line = encrypt_server_side(connection, self._certificate, self._token, number, HELLO_SECONDS)
        except CommunicationError as error:
            self._say(rejection_line(error.what))
            return
        except OSError:
            return  # it has hung up, or says nothing: it calls again, or its own deadline ends it
        if self._is_known(number):
            line.close()
        else:
            self._adopt_connection(number, line)


def rejection_line(what: str) -> str:
    """A short line, whatever a stranger has written into it."""
    plain = "".join(letter if letter.isprintable() else "?" for letter in what[:_MAX_LINE_LENGTH])
    return f"turned away: {plain}\n"


_READ_BYTES = 1 << 16
_MAX_UNREAD_BYTES = 1 << 26


@dataclass
class _MemberConnection:
    """The connection of a member; what it has said, and what it has not read yet."""

    member: int
    connection: socket.socket
    said: bytearray = field(default_factory=bytearray)
    unread: bytearray = field(default_factory=bytearray)


@dataclass(frozen=True)
class _PendingWait:
    """A question that has no answer yet."""

    line: _MemberConnection
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
        self._values = KeyValueTable()
        self._lines: dict[int, _MemberConnection] = {}
        self._lost: set[int] = set()
        self._waiting: list[_PendingWait] = []
        self._selector = selectors.DefaultSelector()
        self._wake_sender, self._wake_receiver = socket.socketpair()
        self._wake_receiver.setblocking(False)
        self._selector.register(self._wake_receiver, selectors.EVENT_READ)
        self._orders: list[Callable[[], object]] = []
        self._lock = threading.Lock()
        self._closing = False
        self._threads = [threading.Thread(target=self._serve, daemon=True, name="paceline-store")]
        self._threads[0].start()

    # -- from other threads -----------------------------------------------------------------------------

    def connection_for(self, member: int) -> socket.socket:
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
        door = StoreListener(listener, token, self.adopt, self._lines.__contains__, self._say, tls=tls)
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
        self._wake_sender.send(b"!")

    # -- the thread -------------------------------------------------------------------------------------

    def _serve(self) -> None:
        while not self._closing:
            for key, events in self._selector.select(self._seconds_until_expiry()):
                if key.fileobj is self._wake_receiver:
                    self._run_queued_calls()
                elif key.data.member in self._lines:
                    self._serve_connection(key.data, events)
            self._answer_pending_waits()
        for line in [*self._lines.values()]:
            line.connection.close()
        self._selector.close()
        self._wake_sender.close()
        self._wake_receiver.close()

    def _stop(self) -> None:
        self._closing = True

    def _seconds_until_expiry(self) -> float | None:
        if not self._waiting:
            return None
        return max(0.0, min(one.expires for one in self._waiting) - time.monotonic())

    def _run_queued_calls(self) -> None:
        self._wake_receiver.recv(_READ_BYTES)
        with self._lock:
            orders, self._orders = self._orders, []
        for order in orders:
            order()

    def _begin(self, member: int, connection: socket.socket) -> None:
        if member in self._lines:
            self._end(self._lines[member])
        self._lost.discard(member)
        connection.setblocking(False)
        line = self._lines[member] = _MemberConnection(member, connection)
        self._selector.register(connection, selectors.EVENT_READ, line)

    def _end(self, line: _MemberConnection) -> None:
        self._selector.unregister(line.connection)
        line.connection.close()
        del self._lines[line.member]
        self._lost.add(line.member)
        self._waiting = [one for one in self._waiting if one.line is not line]

    def _serve_connection(self, line: _MemberConnection, events: int) -> None:
        try:
            if events & selectors.EVENT_WRITE:
                self._send(line)
            if events & selectors.EVENT_READ:
                part = line.connection.recv(_READ_BYTES)
                line.said += part
                if not part:
                    self._end(line)
            while (
                line.member in self._lines and (message := store_protocol.pop_message(line.said)) is not None
            ):
                self._answer(line, message)
        except BlockingIOError:
            return
        except (OSError, ValueError):
            if self._lines.get(line.member) is line:
                self._end(line)

    def _answer(self, line: _MemberConnection, message: StoreMessage) -> None:
        number, word, fields = message.number, message.word, message.fields
        if word == AWAIT:
            seconds, watched, *keys = fields
            expires = time.monotonic() + float(seconds)
            self._waiting.append(
                _PendingWait(line, number, tuple(keys), store_protocol.decode_members(watched), expires)
            )
        elif word == LOST:
            self._reply(line, number, DONE, [store_protocol.encode_members(sorted(self._lost))])
        elif word == LOG_TEXT:
            self._say(rejection_line(fields[0].decode(errors="replace")))
            self._reply(line, number, DONE, [])
        else:
            try:
                self._reply(line, number, DONE, self._values.answer(word, fields))
            except ValueError as error:
                self._reply(line, number, REFUSED, [str(error).encode()])

    def _answer_pending_waits(self) -> None:
        """Answer those whose keys are all there, whose time is over, or who wait for somebody gone."""
        now, still = time.monotonic(), []
        for one in self._waiting:
            missing, lost = self._values.missing(one.keys), one.watched & self._lost
            if not missing:
                self._reply(one.line, one.number, DONE, self._values.get(one.keys))
            elif lost:
                self._reply(one.line, one.number, GONE, [store_protocol.encode_members(sorted(lost))])
            elif now >= one.expires:
                self._reply(one.line, one.number, LATE, missing)
            else:
                still.append(one)
        self._waiting = [one for one in still if one.line.member in self._lines]

    def _reply(self, line: _MemberConnection, number: int, word: bytes, fields: Sequence[bytes]) -> None:
        if self._lines.get(line.member) is not line:
            return
        line.unread += encode_message(StoreMessage(number, word, tuple(fields)))
        try:
            self._send(line)
            if len(line.unread) > _MAX_UNREAD_BYTES:
                raise OSError("it does not read")
        except OSError:
            self._end(line)

    def _send(self, line: _MemberConnection) -> None:
        with contextlib.suppress(BlockingIOError):
            while line.unread:
                del line.unread[: line.connection.send(line.unread)]
        wanted = selectors.EVENT_READ | (selectors.EVENT_WRITE if line.unread else 0)
        self._selector.modify(line.connection, wanted, line)
