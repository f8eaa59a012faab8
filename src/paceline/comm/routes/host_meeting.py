"""How the ranks of one host find each other, and whether they are on one host at all.

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
import time
from collections.abc import Mapping
from contextlib import ExitStack
from pathlib import Path

from paceline.comm.net import Net
from paceline.comm.routes.host_links import HostLinks
from paceline.comm.text import gather_texts
from paceline.errors import CommunicationError, DeadlineError
from paceline.mesh import Group

_HELLO = struct.Struct("<Q")
_CREDENTIALS = struct.Struct("3i")  # process, user and group of the other end
_BACKLOG = 1024
_MOST_CALLERS = 4096
_HELLO_SECONDS = 5.0
_CALL_AGAIN_SECONDS, _LOOK_SECONDS = 0.01, 0.25


def meet_on_host(group: Group, net: Net) -> HostLinks | None:
    """Connect this rank with every other of its group; None if they are not all on one host.

    Collective, and None on one rank is None on every rank.

    Raises:
        DeadlineError: a rank did not come within the deadline of the net.
        CommunicationError: a rank cannot be reached.
    Wire: one ragged all_gather of about a hundred bytes a rank.
    """
    return _meet_here(group, net, fewest=group.size)


def meet_those_here(group: Group, net: Net) -> HostLinks | None:
    """Connect this rank with those of its group that are on its host; None if it is alone there.

    Collective. Raises and sends what `meet_on_host` does.
    """
    return _meet_here(group, net, fewest=2)


def this_host() -> str:
    """An id of this host, equal in processes that can share memory; empty where that is not supported."""
    kernel, network = Path("/proc/sys/kernel/random/boot_id"), Path("/proc/self/ns/net")
    if sys.platform != "linux" or not (kernel.exists() and network.exists()):
        return ""
    return f"{kernel.read_text().strip()} {network.stat().st_ino}"


def _meet_here(group: Group, net: Net, fewest: int) -> HostLinks | None:
    """Connect the ranks of this host if there are so many of the group."""
    host = this_host()
    with ExitStack() as closing:
        listener = closing.enter_context(_listen()) if host else None
        address = listener.getsockname().hex() if listener else ""
        said = [json.loads(text) for text in gather_texts(json.dumps([host, address]), group, net)]
        here = {place: address for place, (there, address) in enumerate(said) if there == host}
        if listener is None or len(here) < fewest:
            return None
        expires = time.monotonic() + net.deadline_seconds
        return HostLinks(_meet(listener, here, group, expires), group, net)


def _listen() -> socket.socket:
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    listener.bind("")  # the kernel makes up an abstract address
    listener.listen(_BACKLOG)
    listener.setblocking(False)
    return listener


def _meet(
    listener: socket.socket, addresses: Mapping[int, str], group: Group, expires: float
) -> dict[int, socket.socket]:
    """Call those before this rank, hear those after it, all side by side; addresses are by place."""
    meeting = _Meeting(listener, {place: bytes.fromhex(text) for place, text in addresses.items()}, group)
    with ExitStack() as failing:
        failing.callback(meeting.give_up)
        try:
            while meeting.missing:
                if time.monotonic() > expires:
                    raise TimeoutError("timed out")
                meeting.go_on()
        except OSError as error:
            late = isinstance(error, TimeoutError)
            raise (DeadlineError if late else CommunicationError)(
                f"ranks {meeting.missing} cannot be reached on this host: {error}{meeting.strangers_told()}",
                where=f"rank {group.ranks[group.rank]}, shared memory of group '{group.name}' {group.ranks}",
                next_step="look at what these ranks printed, or choose route=native",
            ) from error
        failing.pop_all()
    meeting.hang_up()
    return meeting.found


class _Meeting:
    """The calls of one rank. An abstract address has no rights: any user may call it, so strangers may come.

    Args:
        addresses: of the ranks that meet, this one among them, by place in the group.
    """

    def __init__(self, listener: socket.socket, addresses: Mapping[int, bytes], group: Group) -> None:
        self._listener, self._places, self._group = listener, {*addresses} - {group.rank}, group
        self._calls = {place: address for place, address in addresses.items() if place < group.rank}
        self._callers: dict[socket.socket, float] = {}
        self.found: dict[int, socket.socket] = {}
        self.strangers = 0

    @property
    def missing(self) -> list[int]:
        """Ranks that are not connected."""
        return sorted({self._group.ranks[place] for place in self._places} - self.found.keys())

    def go_on(self) -> None:
        """Whatever can be done now; wait a moment if that is nothing."""
        for place in [*self._calls]:
            self._call(place)
        if not self.missing:  # the last rank calls all others and hears none
            return
        poll = select.poll()
        for one in (self._listener, *self._callers):
            poll.register(one, select.POLLIN)
        ready = {
            file for file, _ in poll.poll(_CALL_AGAIN_SECONDS * 1e3 if self._calls else _LOOK_SECONDS * 1e3)
        }
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
        self.hang_up()
        for connection in self.found.values():
            connection.close()

    def hang_up(self) -> None:
        """Close what has not said who it is."""
        for caller in [*self._callers]:
            self._turn_away(caller)

    def strangers_told(self) -> str:
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
            if _user_of(caller) == os.getuid() and len(self._callers) < _MOST_CALLERS:
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


def _user_of(caller: socket.socket) -> int:
    raw = caller.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
    return int(_CREDENTIALS.unpack(raw)[1])
