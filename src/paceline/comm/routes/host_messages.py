"""Messages between two ranks of a host, in buffers that both have mapped; a signal says which buffer.

A rank writes into buffers of its own, which its reader maps when it first gets a message there. There are as
many as messages are in flight at a time, so a sender may wait for other ranks meanwhile. An acknowledgement
is sent with the next message the other way, if that comes soon: a signal of its own would wake a rank that
waits for something else.

Buffers are allocated when messages need them, as large as these are; if only smaller ones are free, a larger
one replaces the largest of these.

Invariants: a reader may use a buffer only until it acknowledges the message, and must keep nothing that lies
there; a buffer is not written again before. No rank waits here before it has acknowledged what it has read,
except for the newest messages, if it keeps these.
Every wait has the deadline of the net, and ends at once if the other rank is gone. The memory has no name, so
it is freed with the last process that has mapped it.
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
    """A buffer for one message.

    Args:
        number: number of the buffer, counted from 0.
        memory: uint8 [n], of which the message takes the beginning.
        file: open file of memory that the reader has not mapped yet; None: it has.
    """

    number: int
    memory: Tensor
    file: int | None


class MessageBuffers:
    """The buffers of this rank for messages to one other rank, which reads them in order."""

    def __init__(self) -> None:
        self._memory: list[Tensor] = []
        # The buffer of the oldest message first.
        self._in_flight_buffers: deque[int] = deque()

    @contextmanager
    def lend(self, num_bytes: int) -> Iterator[MessageBuffer]:
        """Yield a free buffer, which is then that of a message in flight: the smallest that is large enough,
        or a new one.

        After an error the message counts as not sent.

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
                # The reader may not have got the file, so it cannot use the buffer.
                self._drop(number)

    def has_free(self, num_bytes: int) -> bool:
        """Return whether a message of `num_bytes` needs no new buffer."""
        return self._size(self._choose(num_bytes)) >= num_bytes

    def free_oldest(self) -> None:
        """Free the buffer of the oldest message, which the reader has acknowledged."""
        self._in_flight_buffers.popleft()

    def _choose(self, num_bytes: int) -> int:
        """Return the smallest free buffer that is large enough; else the largest free one; else a new
        number.
        """
        free = {*range(len(self._memory))} - {*self._in_flight_buffers}
        large_enough = [number for number in free if self._size(number) >= num_bytes]
        return (
            min(large_enough, key=self._size)
            if large_enough
            else max(free, key=self._size, default=len(self._memory))
        )

    def _size(self, number: int) -> int:
        return self._memory[number].numel() if number < len(self._memory) else 0

    def _make(self, number: int, num_bytes: int) -> int:
        """Allocate memory for a buffer, new or in place of a smaller one, and return its open file."""
        size = round_up_to_pages(num_bytes)
        # Free the smaller memory before the larger is allocated.
        self._drop(number)
        file = allocate_shared_memory(size, "paceline-messages")
        self._memory[number] = map_shared_tensor(file, size, torch.uint8)
        return file

    def _drop(self, number: int) -> None:
        self._memory[number : number + 1] = [torch.empty(0, dtype=torch.uint8)]


def round_up_to_pages(num_bytes: int) -> int:
    """Return the bytes of a buffer for a message of `num_bytes`."""
    return -(-num_bytes // mmap.PAGESIZE) * mmap.PAGESIZE


_MESSAGE_WRITTEN, _MESSAGE_READ = 0, 1
_MAX_UNACKNOWLEDGED = 2
"""Number of messages after which they are acknowledged at the latest; for the sender they are in flight."""

ReadResult = TypeVar("ReadResult")


class _PeerTraffic:
    """The messages between this rank and another one; those of each direction are numbered from 0."""

    def __init__(self, rank: int) -> None:
        self.rank = rank
        self.buffers = MessageBuffers()
        # The first `freed` messages were acknowledged; nothing waits for the first `forgotten`.
        self.sent = self.freed = self.forgotten = 0
        self.remote_buffers: dict[int, Tensor] = {}
        # The first `read` messages were read, and the first `acknowledged` of them acknowledged.
        self.read = self.acknowledged = 0

    @property
    def waiting(self) -> int:
        """Number of messages that the other rank has not acknowledged."""
        return self.sent - max(self.freed, self.forgotten)


class HostMessenger:
    """Messages of one rank with those of its group that are on its host; for one thread.

    Args:
        links: connects them, for nothing else; `close` closes it.
        num_kept: number of the newest messages from each rank that are not acknowledged, so that what lies
            in their buffers can be used.
    Attributes:
        places: ranks of the group with which this one exchanges messages.
    Wire: nothing. The ledger counts each message as one that is sent.
    Memory: for each rank that this one sends to, as many buffers as messages to it are in flight at a time.
    """

    def __init__(self, net: Net, group: RankGroup, links: HostLinks, num_kept: int = 0) -> None:
        self._net, self._group, self._links, self._num_kept = net, group, links, num_kept
        self._traffic = {
            group_rank: _PeerTraffic(rank)
            for group_rank, rank in enumerate(group.ranks)
            if rank in links.ranks
        }
        self.places = frozenset(self._traffic)

    def send(self, to: int, num_bytes: int, write: Callable[[Tensor], None]) -> None:
        """Send a message to a rank of the group.

        Args:
            write: fills memory, uint8 [n] with n >= num_bytes, which may be read until it is written again.
        Raises:
            CommunicationError: that rank is gone, or there is no memory left.
            DeadlineError: it does not read the signals of earlier messages.
        """
        traffic = self._traffic[to]
        self._net.ledger.count_call("send", self._group.name, num_bytes, self._group.size)
        self._free(traffic, num_bytes)
        with traffic.buffers.lend(num_bytes) as (number, memory, file):
            write(memory)
            label = f"{number} {memory.numel()} {int(file is not None)}"
            self._send_signals(traffic, [HostSignal(_MESSAGE_WRITTEN, traffic.sent, label)], file)
        traffic.sent += 1

    def take(self, source: int, read: Callable[[Tensor], ReadResult]) -> ReadResult:
        """Wait for the next message of a rank of the group.

        Args:
            read: called with memory, uint8 [n], that begins with the message; its result must not lie there,
                unless the newest messages are kept.
        Raises:
            CommunicationError: that rank is gone; DeadlineError: it sends nothing.
        """
        traffic = self._traffic[source]
        # Acknowledge only before a real wait: a message that is already here needs no extra signal.
        label = self._links.poll_signal(traffic.rank, _MESSAGE_WRITTEN, traffic.read)
        if label is None:
            self.acknowledge_read()
            label = self._links.wait_for_rank(traffic.rank, _MESSAGE_WRITTEN, traffic.read, "sent no message")
        number, size, is_new = map(int, label.split())
        if is_new:
            self._map(traffic, number, size)
        result = read(traffic.remote_buffers[number])
        traffic.read += 1
        if traffic.read - traffic.acknowledged == _MAX_UNACKNOWLEDGED + self._num_kept:
            self._send_signals(traffic)
        return result

    def acknowledge_read(self) -> None:
        """Acknowledge all messages that were read and are not kept, before a wait for something else."""
        for traffic in self._traffic.values():
            if traffic.acknowledged < traffic.read - self._num_kept:
                self._send_signals(traffic)

    def flush(self, most: int = 0) -> None:
        """Wait until the others have acknowledged all messages but `most`; acknowledge those that were read
        here.

        Raises:
            CommunicationError: one of them is gone; DeadlineError: it reads nothing.
        """
        all_traffic = self._traffic.values()
        if not most or sum(traffic.waiting for traffic in all_traffic) > most:
            self.acknowledge_read()
        while sum(traffic.waiting for traffic in all_traffic) > most:
            traffic = max(all_traffic, key=lambda traffic: traffic.waiting)
            self._links.wait_for_rank(traffic.rank, _MESSAGE_READ, traffic.freed, "read no message")
            self._release_oldest(traffic)

    def abort(self) -> None:
        """Stop waiting for messages that were sent; their buffers stay until they are acknowledged."""
        for traffic in self._traffic.values():
            traffic.forgotten = traffic.sent
            if traffic.acknowledged < traffic.read - self._num_kept:
                # The rank may be gone by now.
                with suppress(CommunicationError):
                    self._send_signals(traffic)

    def close(self) -> None:
        """Close the links, and free all memory."""
        self._links.close()
        self._traffic.clear()

    def _send_signals(
        self, traffic: _PeerTraffic, signals: Sequence[HostSignal] = (), file: int | None = None
    ) -> None:
        """Send acknowledgements, and further signals."""
        used_up = max(traffic.acknowledged, traffic.read - self._num_kept)
        acknowledgements = [
            HostSignal(_MESSAGE_READ, number, "") for number in range(traffic.acknowledged, used_up)
        ]
        self._links.signal_rank(traffic.rank, [*acknowledgements, *signals], file)
        traffic.acknowledged = used_up

    def _free(self, traffic: _PeerTraffic, num_bytes: int) -> None:
        """Free acknowledged buffers if a message needs one."""
        if traffic.buffers.has_free(num_bytes):
            return
        # First those that arrived with other messages: they cost no system call.
        self._process_acknowledgements(traffic)
        if not traffic.buffers.has_free(num_bytes):
            self._links.read_pending()
            self._process_acknowledgements(traffic)

    def _process_acknowledgements(self, traffic: _PeerTraffic) -> None:
        while self._links.pop_signal(traffic.rank, _MESSAGE_READ, traffic.freed):
            self._release_oldest(traffic)

    def _release_oldest(self, traffic: _PeerTraffic) -> None:
        traffic.buffers.free_oldest()
        traffic.freed += 1

    def _map(self, traffic: _PeerTraffic, number: int, size: int) -> None:
        """Map a new buffer of another rank."""
        traffic.remote_buffers.pop(number, None)
        file = self._links.pop_file(traffic.rank)
        try:
            traffic.remote_buffers[number] = map_shared_tensor(file, size, torch.uint8)
        finally:
            os.close(file)
