"""Messages between two ranks of a host: they lie in buffers that both have mapped, and a signal says where.

A rank writes into buffers of its own, which its reader maps when it first hears of them. There are as many as
messages are on the way at a time, so a message needs its sender no more: that may wait for others meanwhile.
That a message was taken is said with the next one the other way, where that comes soon: a word of its own
would wake a rank that waits for something else.

Invariant: a reader is lent a buffer until it says that the message is taken, so nothing that it keeps may lie
there. No rank waits here before it has said what it has taken. Every wait has the deadline of the net, and
ends at once if the other rank is gone. The memory has no name, so it is gone when the last rank is.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import TypeVar

import torch
from torch import Tensor

from paceline.comm.net import Net
from paceline.comm.routes.host_links import HostLinks
from paceline.comm.routes.host_memory import mapped
from paceline.comm.routes.host_peer import Signal
from paceline.comm.routes.message_buffers import MessageBuffers
from paceline.errors import CommunicationError
from paceline.mesh import Group

_WRITTEN, _TAKEN = 0, 1
_MOST_UNTOLD = 2
"""Messages that were taken, when it is said at the latest; a sender counts them as on the way."""

Read = TypeVar("Read")


class _Way:
    """From this rank to another, and back; messages of each way are numbered from 0."""

    def __init__(self, rank: int) -> None:
        self.rank = rank
        self.buffers = MessageBuffers()
        self.sent = self.freed = self.forgotten = 0  # the first messages were taken, or nobody waits for them
        self.theirs: dict[int, Tensor] = {}
        self.read = self.told = 0  # the first messages were read, and that was said

    @property
    def waiting(self) -> int:
        """Messages that the other rank has not taken."""
        return self.sent - max(self.freed, self.forgotten)


class HostMail:
    """Messages of one rank with those of its group that are on its host; for one thread.

    Args:
        links: connects them, for nothing else; `close` closes it.
    Attributes:
        places: in the group, of those that this one sends to and hears.
    Wire: nothing. The ledger counts each message as one that is sent.
    Memory: for each rank that this one sends to, as many buffers as messages to it are on the way at a time.
    """

    def __init__(self, net: Net, group: Group, links: HostLinks) -> None:
        self._net, self._group, self._links = net, group, links
        self._ways = {place: _Way(rank) for place, rank in enumerate(group.ranks) if rank in links.ranks}
        self.places = frozenset(self._ways)

    def send(self, to: int, num_bytes: int, write: Callable[[Tensor], None]) -> None:
        """Send a message to a place in the group.

        Args:
            write: fills memory, uint8 [n] with n >= num_bytes, and does not keep it.
        Raises:
            CommunicationError: that rank is gone, or there is no memory left.
            DeadlineError: it has not heard of many messages before.
        """
        way = self._ways[to]
        self._net.ledger.launched("send", self._group.name, num_bytes, self._group.size)
        self._free(way, num_bytes)
        with way.buffers.lend(num_bytes) as (number, memory, file):
            write(memory)
            label = f"{number} {memory.numel()} {int(file is not None)}"
            self._tell(way, [Signal(_WRITTEN, way.sent, label)], file)
        way.sent += 1

    def take(self, source: int, read: Callable[[Tensor], Read]) -> Read:
        """Wait for the next message of a place in the group.

        Args:
            read: is lent memory, uint8 [n], that the message begins; what it returns lies elsewhere.
        Raises:
            CommunicationError: that rank is gone; DeadlineError: it sends nothing.
        """
        way = self._ways[source]
        label = self._links.heard(way.rank, _WRITTEN, way.read)
        if label is None:
            self.say_taken()
            label = self._links.hear_one(way.rank, _WRITTEN, way.read, "sent nothing")
        number, size, is_new = map(int, label.split())
        if is_new:
            self._map(way, number, size)
        found = read(way.theirs[number])
        way.read += 1
        if way.read - way.told == _MOST_UNTOLD:
            self._tell(way)
        return found

    def say_taken(self) -> None:
        """Say what was taken, before a wait for something else."""
        for way in self._ways.values():
            if way.told < way.read:
                self._tell(way)

    def flush(self, most: int = 0) -> None:
        """Wait until the others have taken what was sent, all but `most`; say what was taken here.

        Raises:
            CommunicationError: one of them is gone; DeadlineError: it takes nothing.
        """
        ways = self._ways.values()
        if not most or sum(way.waiting for way in ways) > most:
            self.say_taken()
        while sum(way.waiting for way in ways) > most:
            way = max(ways, key=lambda way: way.waiting)
            self._links.hear_one(way.rank, _TAKEN, way.freed, "took nothing")
            self._has_taken(way)

    def abort(self) -> None:
        """Nobody waits for what was written; its buffers stay until it is taken."""
        for way in self._ways.values():
            way.forgotten = way.sent
            if way.told < way.read:
                with suppress(CommunicationError):  # it may be gone by now
                    self._tell(way)

    def close(self) -> None:
        """Leave the others, and let go of all memory."""
        self._links.close()
        self._ways.clear()

    def _tell(self, way: _Way, signals: Sequence[Signal] = (), file: int | None = None) -> None:
        """Say what was taken, and more."""
        taken = [Signal(_TAKEN, number, "") for number in range(way.told, way.read)]
        self._links.tell_one(way.rank, [*taken, *signals], file)
        way.told = way.read

    def _free(self, way: _Way, num_bytes: int) -> None:
        """Use again what was taken by now, if a message needs it."""
        if way.buffers.has_free(num_bytes):
            return
        self._note_taken(way)  # what was said with other messages
        if not way.buffers.has_free(num_bytes):
            self._links.catch_up()
            self._note_taken(way)

    def _note_taken(self, way: _Way) -> None:
        while self._links.has_said(way.rank, _TAKEN, way.freed):
            self._has_taken(way)

    def _has_taken(self, way: _Way) -> None:
        way.buffers.free_oldest()
        way.freed += 1

    def _map(self, way: _Way, number: int, size: int) -> None:
        """Know a new buffer of another rank."""
        way.theirs.pop(number, None)
        file = self._links.take_file(way.rank)
        try:
            way.theirs[number] = mapped(file, size, torch.uint8)
        finally:
            os.close(file)
