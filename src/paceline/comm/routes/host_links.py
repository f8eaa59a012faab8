"""Links between ranks of one host: signals and open files, over sockets without a name in the file system.

The kernel delivers every signal, so it also orders memory: everything that a rank wrote before it sent a
signal is visible to a rank that has received the signal, on every processor. A wait sleeps, has a deadline,
and ends at once if a peer is killed.

Ranks are on one host if they share a running kernel and its network: two containers with networks of their
own are two hosts, and so are two hosts of the lab. Addresses are of the abstract kind: they disappear with
their sockets.
"""

from __future__ import annotations

import json
import os
import select
import socket
import struct
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import NamedTuple

from paceline.comm.group_collectives import all_gather_texts
from paceline.comm.net import Net
from paceline.errors import CommunicationError, DeadlineError, format_count
from paceline.job.mesh import RankGroup

# Bytes of a message, which may have several signals.
_MAX_SIGNAL_BYTES = 4096


class HostSignal(NamedTuple):
    """A signal that a rank sends to other ranks of the host, once.

    Args:
        phase: what has been done.
        number: number of the sum or message, counted from 0 on every rank.
        label: what is summed or sent; a rank that sends another label is out of step.
    """

    phase: int
    number: int
    label: str

    def encode(self) -> bytes:
        """Return one line of a message."""
        return f"{self.phase} {self.number} {self.label}".encode()

    @classmethod
    def decode(cls, message: bytes) -> HostSignal:
        """Return the inverse of `encode`."""
        phase, number, label = message.decode().split(" ", 2)
        return cls(int(phase), int(number), label)


class HostPeer:
    """The socket to another rank of this host, and the signals and files that it has sent."""

    def __init__(self, rank: int, connection: socket.socket) -> None:
        self.rank, self.socket = rank, connection
        self.signals: dict[tuple[int, int], str] = {}
        self.files: list[int] = []
        self.gone = False

    def read(self) -> bool:
        """Read one message, if there is one, and return whether there was."""
        try:
            data, files, _, _ = socket.recv_fds(self.socket, _MAX_SIGNAL_BYTES, 1, socket.MSG_DONTWAIT)
        # After a reset the messages that the peer sent before are still to be read.
        except (BlockingIOError, ConnectionResetError):
            return False
        except OSError:
            data, files = b"", []
        self.gone = not data
        self.files += files
        # A message with a file has no signals; see `share` and `signal_rank`.
        if data and not files:
            for line in data.split(b"\n"):
                signal = HostSignal.decode(line)
                self.signals[signal.phase, signal.number] = signal.label
        return bool(data)


_SEND_FLAGS = socket.MSG_DONTWAIT | socket.MSG_NOSIGNAL
_DID_NOT_JOIN, _DID_NOT_READ = "did not join a sum", "did not read its signals"
_NEXT_STEP = "look at the first rank that ended: it is the cause"


class HostLinks:
    """Connections of one rank with all others of its group, on one host.

    Threads may wait at the same time: one of them reads what arrives for all, and wakes the others.

    Args:
        peers: connected sockets of type SEQPACKET, by global rank.
        group, net: for the texts of errors, and for the deadline.
    Attributes:
        ranks: the ranks at the other ends.
    """

    def __init__(self, peers: Mapping[int, socket.socket], group: RankGroup, net: Net) -> None:
        self._by_rank = {rank: HostPeer(rank, s) for rank, s in sorted(peers.items())}
        self._peers, self.ranks = [*self._by_rank.values()], frozenset(peers)
        self._group, self._net = group, net
        self._lock, self._reader_active = threading.Condition(), False

    def broadcast_signal(self, signal: HostSignal) -> None:
        """Send a signal to all other ranks.

        Raises:
            CommunicationError: a rank is gone; DeadlineError: it does not read.
        """
        self._send(signal.encode(), [], self._peers, _DID_NOT_JOIN)

    def wait_for_all(self, signal: HostSignal) -> None:
        """Wait until every other rank has sent the same signal.

        Raises:
            CommunicationError: a rank is gone, or is out of step; DeadlineError: it sends nothing.
        """
        key = (signal.phase, signal.number)
        self._wait_for_signals(lambda peer: key in peer.signals, self._peers, _DID_NOT_JOIN)
        for peer in self._peers:
            if (label := peer.signals.pop(key)) != signal.label:
                raise self._error(
                    f"rank {peer.rank} sums {label}, but this rank sums {signal.label}",
                    "every rank must sum the same buffers in the same order",
                )

    def poll_all(self, signal: HostSignal) -> bool:
        """Return whether every other rank has sent a signal, without waiting; `wait_for_all` takes it."""
        key = (signal.phase, signal.number)
        silent = [peer for peer in self._peers if key not in peer.signals]
        if silent:
            with self._lock:
                while self._read_available(silent):
                    silent = [peer for peer in silent if key not in peer.signals]
        return not silent

    def share(self, file: int) -> dict[int, int]:
        """Send an open file to every other rank, and return theirs by rank; the caller closes them."""
        self._send(b"file", [file], self._peers, _DID_NOT_JOIN)
        self._wait_for_signals(lambda peer: bool(peer.files), self._peers, _DID_NOT_JOIN)
        return {peer.rank: peer.files.pop(0) for peer in self._peers}

    # -- with one of them -----------------------------------------------------------------------------------

    def signal_rank(self, rank: int, signals: Sequence[HostSignal], file: int | None = None) -> None:
        """Send some signals to one rank at once, and an open file before; the caller closes that.

        Raises:
            CommunicationError: the rank is gone; DeadlineError: it does not read.
        """
        to = [self._by_rank[rank]]
        if file is not None:
            self._send(b"file", [file], to, _DID_NOT_READ)
        self._send(b"\n".join([signal.encode() for signal in signals]), [], to, _DID_NOT_READ)

    def wait_for_rank(self, rank: int, phase: int, number: int, what: str) -> str:
        """Wait until one rank has sent a signal, and return its label.

        Args:
            what: what the rank failed to do, if it is late.
        Raises:
            CommunicationError: the rank is gone; DeadlineError: it sends nothing.
        """
        peer, key = self._by_rank[rank], (phase, number)
        self._wait_for_signals(lambda peer: key in peer.signals, [peer], what)
        return peer.signals.pop(key)

    def poll_signal(self, rank: int, phase: int, number: int) -> str | None:
        """Return the label of a signal of one rank if it has arrived; None if not."""
        signals, key = self._by_rank[rank].signals, (phase, number)
        if key not in signals:
            with self._lock:
                while key not in signals and self._read_available([self._by_rank[rank]]):
                    pass
        return signals.pop(key, None)

    def pop_signal(self, rank: int, phase: int, number: int) -> bool:
        """Return whether a signal of one rank has been read, and remove it."""
        return self._by_rank[rank].signals.pop((phase, number), None) is not None

    def pop_file(self, rank: int) -> int:
        """Return the oldest file that one rank has sent; the caller closes it."""
        return self._by_rank[rank].files.pop(0)

    def read_pending(self) -> None:
        """Read everything that has arrived, without waiting."""
        with self._lock:
            while self._read_available(self._peers):
                pass

    def close(self) -> None:
        """Close all connections, and the files that were not taken."""
        for peer in self._peers:
            peer.socket.close()
            while peer.files:
                os.close(peer.files.pop())

    def _send(self, data: bytes, files: Sequence[int], to: Sequence[HostPeer], what: str) -> None:
        expires = time.monotonic() + self._net.deadline_seconds
        for peer in to:
            while not self._try_send(peer, data, files):
                with self._lock:
                    self._sleep([peer], peer, expires, what)

    def _try_send(self, peer: HostPeer, data: bytes, files: Sequence[int]) -> bool:
        try:
            if files:
                socket.send_fds(peer.socket, [data], files, _SEND_FLAGS)
            else:
                peer.socket.send(data, _SEND_FLAGS)
        except BlockingIOError:
            return False
        except OSError as error:
            raise self._error(f"rank {peer.rank} is gone: {error}", _NEXT_STEP) from error
        return True

    def _read_available(self, peers: Sequence[HostPeer]) -> bool:
        """Read messages that have arrived from some peers, unless another thread is reading; the lock is
        held.
        """
        if self._reader_active or not any(peer.read() for peer in peers if not peer.gone):
            return False
        self._lock.notify_all()
        return True

    def _wait_for_signals(
        self, has_signal: Callable[[HostPeer], bool], to: Sequence[HostPeer], what: str
    ) -> None:
        expires = time.monotonic() + self._net.deadline_seconds
        with self._lock:
            while silent := [peer for peer in to if not has_signal(peer)]:
                if gone := [peer.rank for peer in silent if peer.gone]:
                    raise self._error(f"rank {gone[0]} is gone", _NEXT_STEP)
                self._sleep(silent, None, expires, what)

    def _sleep(self, silent: Sequence[HostPeer], full: HostPeer | None, expires: float, failure: str) -> None:
        """Sleep until a peer sends a signal, or `full` takes more, and read. The lock is held."""
        left = max(0.0, expires - time.monotonic())
        # One thread reads for all: the others sleep on the lock until it wakes them.
        if self._reader_active and full is None:
            has_arrived = self._lock.wait(left)
        else:
            has_arrived = self._read(full, left)
        if not has_arrived:
            raise self._deadline_error([peer.rank for peer in silent], failure)

    def _read(self, full: HostPeer | None, seconds: float) -> bool:
        """Wait without the lock, and read for all threads, unless one is reading. Return whether something
        was ready.
        """
        reads = not self._reader_active
        self._reader_active = True
        # Other threads may send, and take signals that were read, while this one sleeps in the kernel.
        self._lock.release()
        try:
            poll = select.poll()
            by_file = {peer.socket.fileno(): peer for peer in self._peers if not peer.gone}
            for file, peer in by_file.items():
                events = (select.POLLIN if reads else 0) | (select.POLLOUT if peer is full else 0)
                if events:
                    poll.register(file, events)
            ready = poll.poll(seconds * 1e3)
            for file, _ in ready if reads else ():
                by_file[file].read()
        finally:
            self._lock.acquire()
            if reads:
                self._reader_active = False
                self._lock.notify_all()
        return bool(ready)

    def _error(self, what: str, next_step: str) -> CommunicationError:
        return CommunicationError(what, where=self._location(), next_step=next_step)

    def _deadline_error(self, ranks: Sequence[int], what: str) -> DeadlineError:
        return DeadlineError(
            f"ranks {list(ranks)} {what} within {self._net.deadline_seconds:g} s",
            where=self._location(),
            next_step="look for the rank that is stuck, or raise runtime.deadline_seconds",
        )

    def _location(self) -> str:
        group = self._group
        return (
            f"rank {group.ranks[group.rank]}, shared memory of group '{group.name}' {group.ranks}, "
            f"step {self._net.step}"
        )


_HELLO = struct.Struct("<Q")
# Process, user and group of the other end.
_CREDENTIALS = struct.Struct("3i")
_BACKLOG = 1024
_MAX_CALLERS = 4096
_HELLO_SECONDS = 5.0
_RETRY_SECONDS, _POLL_SECONDS = 0.01, 0.25


def connect_single_host_group(group: RankGroup, net: Net) -> HostLinks | None:
    """Connect this rank with every other of its group; None if they are not all on one host.

    Collective, and None on one rank is None on every rank.

    Raises:
        DeadlineError: a rank did not come within the deadline of the net.
        CommunicationError: a rank cannot be reached.
    Wire: one ragged all_gather of about a hundred bytes a rank.
    """
    return _connect_here(group, net, fewest=group.size)


def connect_ranks_of_host(group: RankGroup, net: Net) -> HostLinks | None:
    """Connect this rank with those of its group that are on its host; None if it is alone there.

    Collective. Raises and sends what `connect_single_host_group` does.
    """
    return _connect_here(group, net, fewest=2)


def host_id() -> str:
    """Return an id of this host, equal in processes that can share memory; empty if that is not supported."""
    kernel, network = Path("/proc/sys/kernel/random/boot_id"), Path("/proc/self/ns/net")
    if sys.platform != "linux" or not (kernel.exists() and network.exists()):
        return ""
    return f"{kernel.read_text().strip()} {network.stat().st_ino}"


def _connect_here(group: RankGroup, net: Net, fewest: int) -> HostLinks | None:
    """Connect the ranks of this host if there are at least `fewest` of the group."""
    host = host_id()
    with ExitStack() as closing:
        listener = closing.enter_context(_open_listener()) if host else None
        address = listener.getsockname().hex() if listener else ""
        answers = [json.loads(text) for text in all_gather_texts(json.dumps([host, address]), group, net)]
        addresses = {
            group_rank: address
            for group_rank, (their_host, address) in enumerate(answers)
            if their_host == host
        }
        if listener is None or len(addresses) < fewest:
            return None
        expires = time.monotonic() + net.deadline_seconds
        return HostLinks(_connect_all(listener, addresses, group, expires), group, net)


def _open_listener() -> socket.socket:
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    # The kernel chooses an abstract address.
    listener.bind("")
    listener.listen(_BACKLOG)
    listener.setblocking(False)
    return listener


def _connect_all(
    listener: socket.socket, addresses: Mapping[int, str], group: RankGroup, expires: float
) -> dict[int, socket.socket]:
    """Call the ranks before this one and accept those after it, all at the same time; addresses are by
    group rank.
    """
    rendezvous = _HostRendezvous(
        listener, {group_rank: bytes.fromhex(text) for group_rank, text in addresses.items()}, group
    )
    with ExitStack() as failing:
        failing.callback(rendezvous.give_up)
        try:
            while rendezvous.missing:
                if time.monotonic() > expires:
                    raise TimeoutError("timed out")
                rendezvous.advance()
        except OSError as error:
            late = isinstance(error, TimeoutError)
            raise (DeadlineError if late else CommunicationError)(
                f"ranks {rendezvous.missing} cannot be reached on this host: {error}"
                f"{rendezvous.stranger_summary()}",
                where=f"rank {group.ranks[group.rank]}, shared memory of group '{group.name}' {group.ranks}",
                next_step="look at what these ranks printed, or choose route=native",
            ) from error
        failing.pop_all()
    rendezvous.close_callers()
    return rendezvous.connections


class _HostRendezvous:
    """The connections that one rank makes and accepts.

    An abstract address has no access rights: any user may connect, so callers have to be checked.

    Args:
        addresses: addresses of all ranks that connect, by group rank.
    """

    def __init__(self, listener: socket.socket, addresses: Mapping[int, bytes], group: RankGroup) -> None:
        self._listener, self._group_ranks, self._group = listener, {*addresses} - {group.rank}, group
        self._calls = {
            group_rank: address for group_rank, address in addresses.items() if group_rank < group.rank
        }
        self._callers: dict[socket.socket, float] = {}
        self.connections: dict[int, socket.socket] = {}
        self.num_rejected = 0

    @property
    def missing(self) -> list[int]:
        """Ranks that are not connected."""
        return sorted(
            {self._group.ranks[group_rank] for group_rank in self._group_ranks} - self.connections.keys()
        )

    def advance(self) -> None:
        """Do whatever can be done now; wait a moment if that is nothing."""
        for group_rank in [*self._calls]:
            self._call_rank(group_rank)
        # The last rank calls all others and accepts none, so it need not wait.
        if not self.missing:
            return
        poll = select.poll()
        for waitable in (self._listener, *self._callers):
            poll.register(waitable, select.POLLIN)
        ready = {file for file, _ in poll.poll(_RETRY_SECONDS * 1e3 if self._calls else _POLL_SECONDS * 1e3)}
        if self._listener.fileno() in ready:
            self._accept()
        now = time.monotonic()
        for caller, expires in [*self._callers.items()]:
            if caller.fileno() in ready:
                self._read_hello(caller)
            elif now > expires:
                self._reject(caller)

    def give_up(self) -> None:
        """Close everything."""
        self.close_callers()
        for connection in self.connections.values():
            connection.close()

    def close_callers(self) -> None:
        """Close connections of callers that have not sent their rank."""
        for caller in [*self._callers]:
            self._reject(caller)

    def stranger_summary(self) -> str:
        """Return a clause that says how many callers were rejected, for an error."""
        count = format_count(self.num_rejected, "caller")
        return f"; rejected {count} from outside this job" if self.num_rejected else ""

    def _call_rank(self, group_rank: int) -> None:
        connection = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        connection.setblocking(False)
        try:
            connection.connect(self._calls[group_rank])
            connection.send(_HELLO.pack(self._group.rank))
        # The backlog is full of strangers: try again.
        except BlockingIOError:
            connection.close()
            return
        except OSError:
            connection.close()
            raise
        del self._calls[group_rank]
        self.connections[self._group.ranks[group_rank]] = connection

    def _accept(self) -> None:
        for _ in range(_BACKLOG):
            try:
                caller, _ = self._listener.accept()
            except BlockingIOError:
                return
            # Processes of the same user could read this one's memory anyway; others must not get at it.
            if _peer_user_id(caller) == os.getuid() and len(self._callers) < _MAX_CALLERS:
                caller.setblocking(False)
                self._callers[caller] = time.monotonic() + _HELLO_SECONDS
            else:
                self.num_rejected += 1
                caller.close()

    def _read_hello(self, caller: socket.socket) -> None:
        try:
            hello = caller.recv(_HELLO.size + 1)
        except OSError:
            hello = b""
        group_rank = int(_HELLO.unpack(hello)[0]) if len(hello) == _HELLO.size else -1
        group = self._group
        # Only later ranks call, each once: anything else is a stranger.
        if (
            group_rank > group.rank
            and group_rank in self._group_ranks
            and group.ranks[group_rank] not in self.connections
        ):
            del self._callers[caller]
            self.connections[group.ranks[group_rank]] = caller
        else:
            self._reject(caller)

    def _reject(self, caller: socket.socket) -> None:
        self.num_rejected += 1
        del self._callers[caller]
        caller.close()


def _peer_user_id(caller: socket.socket) -> int:
    raw = caller.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
    return int(_CREDENTIALS.unpack(raw)[1])
