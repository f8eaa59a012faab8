"""Another rank of this host as a link knows it: a socket, and what was heard through it.

Links between ranks of one host: signals and open files, over sockets that have no name on any disk.

The kernel carries every signal, so it also orders memory: what a rank wrote before it told is there for
who has heard it, on every processor. A wait sleeps, has a deadline, and ends at once if a peer is killed.

How the ranks of one host find each other, and whether they are on one host at all.

A host is what shares a running kernel and its network: two containers with networks of their own are two
hosts, and so are two hosts of the lab. Addresses are of the abstract kind: they end with their sockets.
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
from paceline.errors import CommunicationError, DeadlineError
from paceline.job.mesh import RankGroup

_MAX_SIGNAL_BYTES = 4096  # of a message


class HostSignal(NamedTuple):
    """What a rank says to all others of the host, once.

    Args:
        phase: what has been done.
        number: to which sum, counted from 0 on every rank.
        label: of what; a rank that says another one is out of step.
    """

    phase: int
    number: int
    label: str

    def encode(self) -> bytes:
        """One line of a message."""
        return f"{self.phase} {self.number} {self.label}".encode()

    @classmethod
    def decode(cls, message: bytes) -> HostSignal:
        """The inverse of `encode`."""
        phase, number, label = message.decode().split(" ", 2)
        return cls(int(phase), int(number), label)


class HostPeer:
    """One rank at the other end of a socket, and what it has said."""

    def __init__(self, rank: int, connection: socket.socket) -> None:
        self.rank, self.socket = rank, connection
        self.signals: dict[tuple[int, int], str] = {}
        self.files: list[int] = []
        self.gone = False

    def read(self) -> bool:
        """Take one message, if there is one; whether there was."""
        try:
            data, files, _, _ = socket.recv_fds(self.socket, _MAX_SIGNAL_BYTES, 1, socket.MSG_DONTWAIT)
        except (BlockingIOError, ConnectionResetError):  # it left unheard; what it said before is still there
            return False
        except OSError:
            data, files = b"", []
        self.gone = not data
        self.files += files
        if data and not files:
            for line in data.split(b"\n"):
                signal = HostSignal.decode(line)
                self.signals[signal.phase, signal.number] = signal.label
        return bool(data)


_SEND_FLAGS = socket.MSG_DONTWAIT | socket.MSG_NOSIGNAL
_DID_NOT_JOIN, _DID_NOT_READ = "did not join in a sum", "did not listen"
_NEXT_STEP = "look at the first rank that ended: it is the cause"


class HostLinks:
    """Connections of one rank with all others of its group, on one host.

    Threads may wait side by side: one of them reads what comes for all, and wakes the others.

    Args:
        peers: connected sockets of type SEQPACKET, by global rank.
        group, net: for what errors say, and for the deadline.
    Attributes:
        ranks: those at the other ends.
    """

    def __init__(self, peers: Mapping[int, socket.socket], group: RankGroup, net: Net) -> None:
        self._by_rank = {rank: HostPeer(rank, s) for rank, s in sorted(peers.items())}
        self._peers, self.ranks = [*self._by_rank.values()], frozenset(peers)
        self._group, self._net = group, net
        self._turn, self._is_reading = threading.Condition(), False

    def broadcast_signal(self, signal: HostSignal) -> None:
        """Say something to all.

        Raises:
            CommunicationError: a rank is gone; DeadlineError: it does not listen.
        """
        self._send(signal.encode(), [], self._peers, _DID_NOT_JOIN)

    def wait_for_all(self, signal: HostSignal) -> None:
        """Wait until every other rank has said the same.

        Raises:
            CommunicationError: a rank is gone, or is out of step; DeadlineError: it says nothing.
        """
        key = (signal.phase, signal.number)
        self._listen(lambda peer: key in peer.signals, self._peers, _DID_NOT_JOIN)
        for peer in self._peers:
            if (label := peer.signals.pop(key)) != signal.label:
                raise self._error(
                    f"rank {peer.rank} sums {label}, this rank {signal.label}",
                    "every rank must sum the same buffers in the same order",
                )

    def share(self, file: int) -> dict[int, int]:
        """Give an open file to every other rank, and get theirs, by rank; the caller closes them."""
        self._send(b"file", [file], self._peers, _DID_NOT_JOIN)
        self._listen(lambda peer: bool(peer.files), self._peers, _DID_NOT_JOIN)
        return {peer.rank: peer.files.pop(0) for peer in self._peers}

    # -- with one of them -----------------------------------------------------------------------------------

    def signal_rank(self, rank: int, signals: Sequence[HostSignal], file: int | None = None) -> None:
        """Say some things to one rank at once, and give it an open file before; the caller closes that.

        Raises:
            CommunicationError: it is gone; DeadlineError: it does not listen.
        """
        to = [self._by_rank[rank]]
        if file is not None:
            self._send(b"file", [file], to, _DID_NOT_READ)
        self._send(b"\n".join([signal.encode() for signal in signals]), [], to, _DID_NOT_READ)

    def wait_for_rank(self, rank: int, phase: int, number: int, what: str) -> str:
        """Wait until one rank has said something; its label.

        Args:
            what: it failed to do, if it is late.
        Raises:
            CommunicationError: it is gone; DeadlineError: it says nothing.
        """
        peer, key = self._by_rank[rank], (phase, number)
        self._listen(lambda peer: key in peer.signals, [peer], what)
        return peer.signals.pop(key)

    def poll_signal(self, rank: int, phase: int, number: int) -> str | None:
        """As `wait_for_rank`, of what has come by now; None: it has not."""
        said, key = self._by_rank[rank].signals, (phase, number)
        if key not in said:
            with self._turn:
                while key not in said and self._read_available([self._by_rank[rank]]):
                    pass
        return said.pop(key, None)

    def pop_signal(self, rank: int, phase: int, number: int) -> bool:
        """Whether one rank has said so by now; once."""
        return self._by_rank[rank].signals.pop((phase, number), None) is not None

    def pop_file(self, rank: int) -> int:
        """The oldest file that one rank has given; the caller closes it."""
        return self._by_rank[rank].files.pop(0)

    def read_pending(self) -> None:
        """Read all that has come, without a wait."""
        with self._turn:
            while self._read_available(self._peers):
                pass

    def close(self) -> None:
        """Leave."""
        for peer in self._peers:
            peer.socket.close()
            while peer.files:
                os.close(peer.files.pop())

    def _send(self, data: bytes, files: Sequence[int], to: Sequence[HostPeer], what: str) -> None:
        expires = time.monotonic() + self._net.deadline_seconds
        for peer in to:
            while not self._sent(peer, data, files):
                with self._turn:
                    self._await([peer], peer, expires, what)

    def _sent(self, peer: HostPeer, data: bytes, files: Sequence[int]) -> bool:
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
        """Read what has come of some, one message or more, unless another thread reads; the turn is held."""
        if self._is_reading or not any(peer.read() for peer in peers if not peer.gone):
            return False
        self._turn.notify_all()
        return True

    def _listen(self, has_said: Callable[[HostPeer], bool], to: Sequence[HostPeer], what: str) -> None:
        expires = time.monotonic() + self._net.deadline_seconds
        with self._turn:
            while silent := [peer for peer in to if not has_said(peer)]:
                if lost := [peer.rank for peer in silent if peer.gone]:
                    raise self._error(f"rank {lost[0]} is gone", _NEXT_STEP)
                self._await(silent, None, expires, what)

    def _await(self, silent: Sequence[HostPeer], full: HostPeer | None, expires: float, what: str) -> None:
        """Sleep until a peer says something, or `full` takes more; read what was said. The turn is held."""
        left = max(0.0, expires - time.monotonic())
        if self._is_reading and full is None:
            has_come = self._turn.wait(left)
        else:
            has_come = self._read(full, left)
        if not has_come:
            raise self._late([peer.rank for peer in silent], what)

    def _read(self, full: HostPeer | None, seconds: float) -> bool:
        """Wait without the turn; read for all threads, unless one does so. Whether there was anything."""
        reads = not self._is_reading
        self._is_reading = True
        self._turn.release()
        try:
            poll = select.poll()
            by_file = {peer.socket.fileno(): peer for peer in self._peers if not peer.gone}
            for file, peer in by_file.items():
                wanted = (select.POLLIN if reads else 0) | (select.POLLOUT if peer is full else 0)
                if wanted:
                    poll.register(file, wanted)
            ready = poll.poll(seconds * 1e3)
            for file, _ in ready if reads else ():
                by_file[file].read()
        finally:
            self._turn.acquire()
            if reads:
                self._is_reading = False
                self._turn.notify_all()
        return bool(ready)

    def _error(self, what: str, next_step: str) -> CommunicationError:
        return CommunicationError(what, where=self._where(), next_step=next_step)

    def _late(self, ranks: Sequence[int], what: str) -> DeadlineError:
        return DeadlineError(
            f"ranks {list(ranks)} {what} within {self._net.deadline_seconds:g} s",
            where=self._where(),
            next_step="look for the rank that is stuck, or raise runtime.deadline_seconds",
        )

    def _where(self) -> str:
        group = self._group
        return (
            f"rank {group.ranks[group.rank]}, shared memory of group '{group.name}' {group.ranks}, "
            f"step {self._net.step}"
        )


_HELLO = struct.Struct("<Q")
_CREDENTIALS = struct.Struct("3i")  # process, user and group of the other end
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
    """An id of this host, equal in processes that can share memory; empty where that is not supported."""
    kernel, network = Path("/proc/sys/kernel/random/boot_id"), Path("/proc/self/ns/net")
    if sys.platform != "linux" or not (kernel.exists() and network.exists()):
        return ""
    return f"{kernel.read_text().strip()} {network.stat().st_ino}"


def _connect_here(group: RankGroup, net: Net, fewest: int) -> HostLinks | None:
    """Connect the ranks of this host if there are so many of the group."""
    host = host_id()
    with ExitStack() as closing:
        listener = closing.enter_context(_open_listener()) if host else None
        address = listener.getsockname().hex() if listener else ""
        said = [json.loads(text) for text in all_gather_texts(json.dumps([host, address]), group, net)]
        here = {place: address for place, (there, address) in enumerate(said) if there == host}
        if listener is None or len(here) < fewest:
            return None
        expires = time.monotonic() + net.deadline_seconds
        return HostLinks(_connect_all(listener, here, group, expires), group, net)


def _open_listener() -> socket.socket:
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    listener.bind("")  # the kernel makes up an abstract address
    listener.listen(_BACKLOG)
    listener.setblocking(False)
    return listener


def _connect_all(
    listener: socket.socket, addresses: Mapping[int, str], group: RankGroup, expires: float
) -> dict[int, socket.socket]:
    """Call those before this rank, hear those after it, all side by side; addresses are by place."""
    meeting = _HostRendezvous(
        listener, {place: bytes.fromhex(text) for place, text in addresses.items()}, group
    )
    with ExitStack() as failing:
        failing.callback(meeting.give_up)
        try:
            while meeting.missing:
                if time.monotonic() > expires:
                    raise TimeoutError("timed out")
                meeting.advance()
        except OSError as error:
            late = isinstance(error, TimeoutError)
            raise (DeadlineError if late else CommunicationError)(
                f"ranks {meeting.missing} cannot be reached on this host: {error}{meeting.stranger_summary()}",
                where=f"rank {group.ranks[group.rank]}, shared memory of group '{group.name}' {group.ranks}",
                next_step="look at what these ranks printed, or choose route=native",
            ) from error
        failing.pop_all()
    meeting.close_callers()
    return meeting.found


class _HostRendezvous:
    """The calls of one rank. An abstract address has no rights: any user may call it, so strangers may come.

    Args:
        addresses: of the ranks that meet, this one among them, by place in the group.
    """

    def __init__(self, listener: socket.socket, addresses: Mapping[int, bytes], group: RankGroup) -> None:
        self._listener, self._places, self._group = listener, {*addresses} - {group.rank}, group
        self._calls = {place: address for place, address in addresses.items() if place < group.rank}
        self._callers: dict[socket.socket, float] = {}
        self.found: dict[int, socket.socket] = {}
        self.strangers = 0

    @property
    def missing(self) -> list[int]:
        """Ranks that are not connected."""
        return sorted({self._group.ranks[place] for place in self._places} - self.found.keys())

    def advance(self) -> None:
        """Whatever can be done now; wait a moment if that is nothing."""
        for place in [*self._calls]:
            self._call(place)
        if not self.missing:  # the last rank calls all others and hears none
            return
        poll = select.poll()
        for one in (self._listener, *self._callers):
            poll.register(one, select.POLLIN)
        ready = {file for file, _ in poll.poll(_RETRY_SECONDS * 1e3 if self._calls else _POLL_SECONDS * 1e3)}
        if self._listener.fileno() in ready:
            self._accept()
        now = time.monotonic()
        for caller, expires in [*self._callers.items()]:
            if caller.fileno() in ready:
                self._hear(caller)
            elif now > expires:
                self._turn_away(caller)

    def give_up(self) -> None:
        """Close everything."""
        self.close_callers()
        for connection in self.found.values():
            connection.close()

    def close_callers(self) -> None:
        """Close what has not said who it is."""
        for caller in [*self._callers]:
            self._turn_away(caller)

    def stranger_summary(self) -> str:
        """How many strangers have called, for an error."""
        return (
            f"; {self.strangers} callers that are not of this job were turned away" if self.strangers else ""
        )

    def _call(self, place: int) -> None:
        connection = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        connection.setblocking(False)
        try:
            connection.connect(self._calls[place])
            connection.send(_HELLO.pack(self._group.rank))
        except BlockingIOError:  # strangers crowd it: call again
            connection.close()
            return
        except OSError:
            connection.close()
            raise
        del self._calls[place]
        self.found[self._group.ranks[place]] = connection

    def _accept(self) -> None:
        for _ in range(_BACKLOG):
            try:
                caller, _ = self._listener.accept()
            except BlockingIOError:
                return
            if _peer_user_id(caller) == os.getuid() and len(self._callers) < _MAX_CALLERS:
                caller.setblocking(False)
                self._callers[caller] = time.monotonic() + _HELLO_SECONDS
            else:
                self.strangers += 1
                caller.close()

    def _hear(self, caller: socket.socket) -> None:
        try:
            said = caller.recv(_HELLO.size + 1)
        except OSError:
            said = b""
        place = int(_HELLO.unpack(said)[0]) if len(said) == _HELLO.size else -1
        group = self._group
        if place > group.rank and place in self._places and group.ranks[place] not in self.found:
            del self._callers[caller]
            self.found[group.ranks[place]] = caller
        else:
            self._turn_away(caller)

    def _turn_away(self, caller: socket.socket) -> None:
        self.strangers += 1
        del self._callers[caller]
        caller.close()


def _peer_user_id(caller: socket.socket) -> int:
    raw = caller.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
    return int(_CREDENTIALS.unpack(raw)[1])
