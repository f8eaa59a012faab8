"""Buffers that one rank writes and another reads, a message in each.

They are made when messages need them, as large as these are; where only smaller ones are free, a larger one
takes the place of the largest. Invariant: a buffer is not written again before its message was taken. There
are as many as messages were on the way at a time, so none waits for its reader.

Messages between two ranks of a host: they lie in buffers that both have mapped, and a signal says where.

A rank writes into buffers of its own, which its reader maps when it first hears of them. There are as many as
messages are on the way at a time, so a message needs its sender no more: that may wait for others meanwhile.
That a message was taken is said with the next one the other way, where that comes soon: a word of its own
would wake a rank that waits for something else.

Invariant: a reader is lent a buffer until it says that the message is taken, so nothing that it keeps may lie
there. No rank waits here before it has said what it has taken. Every wait has the deadline of the net, and
ends at once if the other rank is gone. The memory has no name, so it is gone when the last rank is.
"""

from __future__ import annotations

import mmap
import os
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import NamedTuple, TypeVar

import torch
from torch import Tensor

from paceline.comm.net import Net
from paceline.comm.routes.host_links import HostLinks, HostSignal
from paceline.comm.routes.shared_memory import allocate_shared_memory, map_shared_tensor
from paceline.errors import CommunicationError
from paceline.job.mesh import RankGroup


class MessageBuffer(NamedTuple):
    """One that a message is written into.

    Args:
        number: counted from 0.
        memory: uint8 [n], of which the message takes the beginning.
        file: of memory that the reader has not mapped yet; None: it has.
    """

    number: int
    memory: Tensor
    file: int | None


class MessageBuffers:
    """What this rank writes for one other, who takes messages in their order."""

    def __init__(self) -> None:
        self._memory: list[Tensor] = []
        self._in_flight_buffers: deque[int] = deque()  # the oldest message first

    @contextmanager
    def lend(self, num_bytes: int) -> Iterator[MessageBuffer]:
        """A free buffer, from now on that of a message on the way: the smallest that is large enough, or new.

        After an error the message was never there.

        Raises:
            CommunicationError: the machine has no memory left.
        """
        number, file, is_sent = self._choose(num_bytes), None, False
        try:
            if self._size(number) < num_bytes:
                file = self._make(number, num_bytes)
            yield MessageBuffer(number, self._memory[number], file)
            is_sent = True
        finally:
            if file is not None:
                os.close(file)
            if is_sent:
                self._in_flight_buffers.append(number)
            else:
                self._drop(number)  # its reader may not know it

    def has_free(self, num_bytes: int) -> bool:
        """Whether a message of so many bytes needs no new buffer."""
        return self._size(self._choose(num_bytes)) >= num_bytes

    def free_oldest(self) -> None:
        """The reader has taken the oldest message."""
        self._in_flight_buffers.popleft()

    def _choose(self, num_bytes: int) -> int:
        """The smallest free one that is large enough; else the largest that is free; else a new one."""
        free = {*range(len(self._memory))} - {*self._in_flight_buffers}
        enough = [number for number in free if self._size(number) >= num_bytes]
        return min(enough, key=self._size) if enough else max(free, key=self._size, default=len(self._memory))

    def _size(self, number: int) -> int:
        return self._memory[number].numel() if number < len(self._memory) else 0

    def _make(self, number: int, num_bytes: int) -> int:
        """Reserve memory for a buffer, new or in place of a smaller one; its open file."""
        size = round_up_to_pages(num_bytes)
        self._drop(number)  # before there is more
        file = allocate_shared_memory(size, "paceline-messages")
        self._memory[number] = map_shared_tensor(file, size, torch.uint8)
        return file

    def _drop(self, number: int) -> None:
        self._memory[number : number + 1] = [torch.empty(0, dtype=torch.uint8)]


def round_up_to_pages(num_bytes: int) -> int:
    """Bytes of a buffer for a message of so many."""
    return -(-num_bytes // mmap.PAGESIZE) * mmap.PAGESIZE


_MESSAGE_WRITTEN, _MESSAGE_READ = 0, 1
_MAX_UNACKNOWLEDGED = 2
"""Messages that were taken, when it is said at the latest; a sender counts them as on the way."""

ReadResult = TypeVar("ReadResult")


class _PeerTraffic:
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


class HostMessenger:
    """Messages of one rank with those of its group that are on its host; for one thread.

    Args:
        links: connects them, for nothing else; `close` closes it.
    Attributes:
        places: in the group, of those that this one sends to and hears.
    Wire: nothing. The ledger counts each message as one that is sent.
    Memory: for each rank that this one sends to, as many buffers as messages to it are on the way at a time.
    """

    def __init__(self, net: Net, group: RankGroup, links: HostLinks) -> None:
        self._net, self._group, self._links = net, group, links
        self._ways = {
            place: _PeerTraffic(rank) for place, rank in enumerate(group.ranks) if rank in links.ranks
        }
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
        self._net.ledger.count_call("send", self._group.name, num_bytes, self._group.size)
        self._free(way, num_bytes)
        with way.buffers.lend(num_bytes) as (number, memory, file):
            write(memory)
            label = f"{number} {memory.numel()} {int(file is not None)}"
            self._tell(way, [HostSignal(_MESSAGE_WRITTEN, way.sent, label)], file)
        way.sent += 1

    def take(self, source: int, read: Callable[[Tensor], ReadResult]) -> ReadResult:
        """Wait for the next message of a place in the group.

        Args:
            read: is lent memory, uint8 [n], that the message begins; what it returns lies elsewhere.
        Raises:
            CommunicationError: that rank is gone; DeadlineError: it sends nothing.
        """
        way = self._ways[source]
        label = self._links.poll_signal(way.rank, _MESSAGE_WRITTEN, way.read)
        if label is None:
            self.acknowledge_read()
            label = self._links.wait_for_rank(way.rank, _MESSAGE_WRITTEN, way.read, "sent nothing")
        number, size, is_new = map(int, label.split())
        if is_new:
            self._map(way, number, size)
        found = read(way.theirs[number])
        way.read += 1
        if way.read - way.told == _MAX_UNACKNOWLEDGED:
            self._tell(way)
        return found

    def acknowledge_read(self) -> None:
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
            self.acknowledge_read()
        while sum(way.waiting for way in ways) > most:
            way = max(ways, key=lambda way: way.waiting)
            self._links.wait_for_rank(way.rank, _MESSAGE_READ, way.freed, "took nothing")
            self._release_oldest(way)

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

    def _tell(self, way: _PeerTraffic, signals: Sequence[HostSignal] = (), file: int | None = None) -> None:
        """Say what was taken, and more."""
        taken = [HostSignal(_MESSAGE_READ, number, "") for number in range(way.told, way.read)]
        self._links.signal_rank(way.rank, [*taken, *signals], file)
        way.told = way.read

    def _free(self, way: _PeerTraffic, num_bytes: int) -> None:
        """Use again what was taken by now, if a message needs it."""
        if way.buffers.has_free(num_bytes):
            return
        self._process_acknowledgements(way)  # what was said with other messages
        if not way.buffers.has_free(num_bytes):
            self._links.read_pending()
            self._process_acknowledgements(way)

    def _process_acknowledgements(self, way: _PeerTraffic) -> None:
        while self._links.pop_signal(way.rank, _MESSAGE_READ, way.freed):
            self._release_oldest(way)

    def _release_oldest(self, way: _PeerTraffic) -> None:
        way.buffers.free_oldest()
        way.freed += 1

    def _map(self, way: _PeerTraffic, number: int, size: int) -> None:
        """Know a new buffer of another rank."""
        way.theirs.pop(number, None)
        file = self._links.pop_file(way.rank)
        try:
            way.theirs[number] = map_shared_tensor(file, size, torch.uint8)
        finally:
            os.close(file)
