"""The server of the job's store: a table of values, one thread that serves all members, and a listener.

Paceline has its own store because torch's does not know its clients: this one knows which member is gone, so
that nobody waits for its keys, it admits only processes that know the key of the job, and it limits their
memory.

Invariants: the thread never waits for a member. A member that sends garbage or does not read loses its
connection, and nothing else happens. An unexpected error ends one connection and is logged, but neither
thread. Keys and values together hold at most `MAX_STORE_BYTES`. From a caller
that has not proved that it knows the key, only its greeting is read (`paceline.job.handshake`); if the job
encrypts, nothing else is sent before the connection does (`paceline.job.tls`, imported only then, because of
ssl).
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
from paceline.job.handshake import (
    HELLO_SECONDS,
    VISITOR_OFFSET,
    AuthenticatingListener,
    ContainedErrors,
    plain_line,
)
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
    decode_members,
    encode_members,
    encode_message,
    pop_message,
)

MAX_STORE_BYTES = 1 << 28


class KeyValueTable:
    """The values of the store by key, as bytes. Pure: no sockets, no clock."""

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
        """Carry out a request and return the fields of the answer.

        Raises:
            ValueError: the request is invalid, or the store is full.
        """
        try:
            return self._words[word](*fields)
        except (KeyError, TypeError) as error:
            raise ValueError("unknown request") from error

    def get(self, keys: Sequence[bytes]) -> list[bytes]:
        """Return the values of existing keys."""
        return [self._values[key] for key in keys]

    def missing(self, keys: Sequence[bytes]) -> list[bytes]:
        """Return the keys that have no value yet."""
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
        # as in torch's stores, a missing key is set if nothing is expected
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


def _encode_flag(flag: bool) -> bytes:
    return b"1" if flag else b"0"


_POLL_SECONDS = 0.25
_MAX_LOGGED_MEMBERS = 20


class StoreListener:
    """A listening socket of the store, which admits processes that know the key of the job.

    Args:
        token: the key of the job.
        adopt: receives the number and the connection of each admitted process.
        is_known: returns whether a number is connected already.
        log: prints a line for each member with another key, once.
        tls: whether connections are encrypted.
    """

    def __init__(
        self,
        listener: socket.socket,
        token: str,
        adopt: Callable[[int, socket.socket], None],
        is_known: Callable[[int], bool],
        log: Callable[[str], object],
        *,
        tls: bool = False,
    ) -> None:
        self._listener, self._log = listener, log
        self._callers = AuthenticatingListener(
            listener,
            token,
            range(2 * VISITOR_OFFSET),
            is_known,
            tls=tls,
            log=lambda text: log(rejection_line(text)),
        )
        self._admit = ConnectionEncryption(token, adopt, is_known, log) if tls else adopt
        self._logged: set[int] = set()

    def serve(self, closing: Callable[[], bool]) -> None:
        """Admit callers until `closing` returns True."""
        try:
            while not closing():
                # Without this thread, no rank could join the job.
                with ContainedErrors(self._log_line, "the listener of the store continues after") as errors:
                    self._admit_callers()
                if errors.occurred:
                    time.sleep(_POLL_SECONDS)  # the cause may last
        finally:
            self._callers.close()
            self._listener.close()

    def _log_line(self, text: str) -> None:
        self._log(f"{text}\n")

    def _admit_callers(self) -> None:
        self._callers.receive(_POLL_SECONDS)
        for number in [*self._callers.accepted]:
            self._admit(number, self._callers.accepted.pop(number))
        self._log_rejected()

    def _log_rejected(self) -> None:
        reasons = {number % VISITOR_OFFSET: why for number, why in self._callers.rejected_ranks.items()}
        for number in sorted(reasons.keys() - self._logged)[: _MAX_LOGGED_MEMBERS - len(self._logged)]:
            self._logged.add(number)
            self._log(rejection_line(f"rank {number} has {reasons[number]} than this job"))


class ConnectionEncryption:
    """Encryption of admitted connections, each in its own thread, so that a slow one delays no other.

    Args:
        token, adopt, is_known, log: as for `StoreListener`.
    """

    def __init__(
        self,
        token: str,
        adopt: Callable[[int, socket.socket], None],
        is_known: Callable[[int], bool],
        log: Callable[[str], object],
    ) -> None:
        from paceline.job.tls import EphemeralCertificate

        self._token, self._adopt, self._is_known, self._log = token, adopt, is_known, log
        self._certificate = EphemeralCertificate.make()

    def __call__(self, number: int, connection: socket.socket) -> None:
        threading.Thread(
            target=self._encrypt, args=(number, connection), daemon=True, name="paceline-store-tls"
        ).start()

    def _encrypt(self, number: int, connection: socket.socket) -> None:
        from paceline.job.tls import encrypt_server_side

        try:
            encrypted = encrypt_server_side(connection, self._certificate, self._token, number, HELLO_SECONDS)
        except CommunicationError as error:
            self._log(rejection_line(error.what))
            return
        except OSError:
            return  # the caller connects again, or its own deadline ends it
        if self._is_known(number):
            encrypted.close()
        else:
            self._adopt(number, encrypted)


def rejection_line(what: str) -> str:
    """Return a line of limited length without control characters, as strangers can choose its text."""
    return f"rejected: {plain_line(what)}\n"


_READ_BYTES = 1 << 16
_MAX_UNREAD_BYTES = 1 << 26
_MAX_WAIT_SECONDS = 1e6


@dataclass
class _MemberConnection:
    """The connection of a member, with the bytes that it has sent and those that it has not read yet."""

    member: int
    connection: socket.socket
    received: bytearray = field(default_factory=bytearray)
    unread: bytearray = field(default_factory=bytearray)


@dataclass(frozen=True)
class _PendingWait:
    """A request that has no answer yet."""

    client: _MemberConnection
    number: int
    keys: tuple[bytes, ...]
    watched: frozenset[int]
    expires: float


class StoreServer:
    """The store of one job, which serves its members until it is closed.

    Args:
        log: prints a client for each process that was rejected.
    """

    def __init__(self, log: Callable[[str], object] = lambda text: None) -> None:
        self._log = log
        self._values = KeyValueTable()
        self._clients: dict[int, _MemberConnection] = {}
        self._lost: set[int] = set()
        self._waiting: list[_PendingWait] = []
        self._selector = selectors.DefaultSelector()
        self._wake_sender, self._wake_receiver = socket.socketpair()
        self._wake_receiver.setblocking(False)
        self._selector.register(self._wake_receiver, selectors.EVENT_READ)
        self._queued_calls: list[Callable[[], object]] = []
        self._lock = threading.Lock()
        self._closing = False
        self._threads = [threading.Thread(target=self._serve, daemon=True, name="paceline-store")]
        self._threads[0].start()

    # -- called from other threads -----------------------------------------------------------------------

    def connection_for(self, member: int) -> socket.socket:
        """Return one end of a new connection for a process to inherit; its holder is that member."""
        near, far = socket.socketpair()
        self.adopt(member, near)
        return far

    def put(self, key: str, value: str) -> None:
        """Set a value."""
        self._enqueue_call(lambda: self._values.answer(SET, [key.encode(), value.encode()]))

    def adopt(self, member: int, connection: socket.socket) -> None:
        """Serve a connection whose other end is that member."""
        self._enqueue_call(lambda: self._begin(member, connection))

    def admit(self, listener: socket.socket, token: str, *, tls: bool = False) -> None:
        """Serve callers at a listening socket that prove that they know the key; others are rejected.

        Args:
            listener: a listening socket; it is closed with this server.
            tls: whether the connections are encrypted.
        """
        is_known = self._clients.__contains__
        store_listener = StoreListener(listener, token, self.adopt, is_known, self._log, tls=tls)
        thread = threading.Thread(
            target=store_listener.serve,
            args=(lambda: self._closing,),
            daemon=True,
            name="paceline-store-listener",
        )
        self._threads.append(thread)
        thread.start()

    def mark_lost(self, member: int) -> None:
        """Count a member as gone whose process has ended, even if a child of it keeps the connection open."""
        self._enqueue_call(lambda: self._end(self._clients[member]) if member in self._clients else None)

    def close(self) -> None:
        """End the threads and all connections."""
        self._enqueue_call(self._stop)
        for thread in self._threads:
            thread.join()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: object, traceback: TracebackType | None
    ) -> None:
        self.close()

    def _enqueue_call(self, call: Callable[[], object]) -> None:
        with self._lock:
            if self._closing:
                return
            self._queued_calls.append(call)
        self._wake_sender.send(b"!")

    # -- called in the thread of the server ---------------------------------------------------------------

    def _serve(self) -> None:
        while not self._closing:
            for key, events in self._selector.select(self._seconds_until_expiry()):
                if key.fileobj is self._wake_receiver:
                    self._run_queued_calls()
                elif key.data.member in self._clients:
                    self._serve_connection(key.data, events)
            self._answer_pending_waits()
        for client in [*self._clients.values()]:
            client.connection.close()
        self._selector.close()
        self._wake_sender.close()
        self._wake_receiver.close()

    def _stop(self) -> None:
        self._closing = True

    def _seconds_until_expiry(self) -> float | None:
        if not self._waiting:
            return None
        return max(0.0, min(wait.expires for wait in self._waiting) - time.monotonic())

    def _run_queued_calls(self) -> None:
        self._wake_receiver.recv(_READ_BYTES)
        with self._lock:
            calls, self._queued_calls = self._queued_calls, []
        for call in calls:
            call()

    def _begin(self, member: int, connection: socket.socket) -> None:
        if member in self._clients:
            self._end(self._clients[member])
        self._lost.discard(member)
        connection.setblocking(False)
        client = self._clients[member] = _MemberConnection(member, connection)
        self._selector.register(connection, selectors.EVENT_READ, client)

    def _end(self, client: _MemberConnection) -> None:
        self._selector.unregister(client.connection)
        client.connection.close()
        del self._clients[client.member]
        self._lost.add(client.member)
        self._waiting = [wait for wait in self._waiting if wait.client is not client]

    def _serve_connection(self, client: _MemberConnection, events: int) -> None:
        consequence = f"the store has lost rank {client.member} because of"
        with ContainedErrors(lambda text: self._log(f"{text}\n"), consequence) as errors:
            self._exchange(client, events)
        if errors.occurred:
            self._end_if_present(client)

    def _exchange(self, client: _MemberConnection, events: int) -> None:
        try:
            if events & selectors.EVENT_WRITE:
                self._send(client)
            if events & selectors.EVENT_READ:
                data = client.connection.recv(_READ_BYTES)
                client.received += data
                if not data:
                    self._end(client)
            while client.member in self._clients and (message := pop_message(client.received)) is not None:
                self._answer(client, message)
        except BlockingIOError:
            return
        except (OSError, ValueError):
            self._end_if_present(client)

    def _end_if_present(self, client: _MemberConnection) -> None:
        if self._clients.get(client.member) is client:
            self._end(client)

    def _answer(self, client: _MemberConnection, message: StoreMessage) -> None:
        number, word, fields = message.number, message.word, message.fields
        if word == AWAIT:
            seconds, watched, *keys = fields
            # a selector cannot wait for a number that is not finite
            expires = time.monotonic() + min(max(0.0, float(seconds)), _MAX_WAIT_SECONDS)
            self._waiting.append(_PendingWait(client, number, tuple(keys), decode_members(watched), expires))
        elif word == LOST:
            self._reply(client, number, DONE, [encode_members(sorted(self._lost))])
        elif word == LOG_TEXT:
            (text,) = fields
            self._log(rejection_line(text.decode(errors="replace")))
            self._reply(client, number, DONE, [])
        else:
            try:
                self._reply(client, number, DONE, self._values.answer(word, fields))
            except ValueError as error:
                self._reply(client, number, REFUSED, [str(error).encode()])

    def _answer_pending_waits(self) -> None:
        """Answer waits whose keys all exist, whose time is over, or whose watched members are gone."""
        now, pending = time.monotonic(), []
        for wait in self._waiting:
            missing, lost_members = self._values.missing(wait.keys), wait.watched & self._lost
            if not missing:
                self._reply(wait.client, wait.number, DONE, self._values.get(wait.keys))
            elif lost_members:
                self._reply(wait.client, wait.number, GONE, [encode_members(sorted(lost_members))])
            elif now >= wait.expires:
                self._reply(wait.client, wait.number, LATE, missing)
            else:
                pending.append(wait)
        self._waiting = [wait for wait in pending if wait.client.member in self._clients]

    def _reply(self, client: _MemberConnection, number: int, word: bytes, fields: Sequence[bytes]) -> None:
        if self._clients.get(client.member) is not client:
            return
        try:
            message = encode_message(StoreMessage(number, word, tuple(fields)))
        except ValueError as error:  # together, the values of a request are too long for one message
            message = encode_message(StoreMessage(number, REFUSED, (str(error).encode(),)))
        client.unread += message
        try:
            self._send(client)
            if len(client.unread) > _MAX_UNREAD_BYTES:
                raise OSError("the member does not read")
        except OSError:
            self._end(client)

    def _send(self, client: _MemberConnection) -> None:
        with contextlib.suppress(BlockingIOError):
            while client.unread:
                del client.unread[: client.connection.send(client.unread)]
        wanted = selectors.EVENT_READ | (selectors.EVENT_WRITE if client.unread else 0)
        self._selector.modify(client.connection, wanted, client)
