"""What neighbouring stages send each other: tensors of any shape and dtype, and a number.

Invariant: messages between two stages arrive in order, and each is found by its key; an aborted run uses
other tags, so what it left on the way is never taken for something new. Both sides know how long the first
part of a message is (`letter`).

What stages of one host send each other: it lies in memory that both have mapped, a message in one part.

Invariant: what was received has memory of its own, since a module may change its input, and the buffer
is written again. Messages are found by key and attempt: what an aborted run has left is never taken for
something new, and a neighbour may have begun its next attempt before this stage has given up the last.

What a stage of a pipeline on several hosts sends: in memory to stages of its host, by a backend to others.

Invariant: two stages always take the same way, both ways, so messages between them keep their order. Both
wires give an attempt up together.
"""

from __future__ import annotations

import queue
from collections import deque
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Protocol

import torch
from torch import Tensor

from paceline.comm.handle import Handle
from paceline.comm.net import Net
from paceline.comm.routes.host_messages import HostMessenger
from paceline.errors import CommunicationError, DeadlineError
from paceline.job.mesh import RankGroup
from paceline.parallel.pipeline.p2p_message import (
    HEADER_BYTES,
    MessageHeader,
    message_parts,
    next_first_part_bytes,
    parse_first_part,
    read_message,
    tensor_from_bytes,
    write_message,
)

StageMessage = tuple[list[Tensor], float]


class StageTransport(Protocol):
    """The stages before and after this one."""

    @property
    def num_sent(self) -> int:
        """Parts of messages that were handed over, so far."""

    def send(self, to: int, tensors: Sequence[Tensor], note: float = 0.0, *, key: int = 0) -> None:
        """Start sending; `flush` waits. The tensors must not change until then.

        Args:
            key: says what it is for; messages of one key arrive in order.
        """

    def receive(self, source: int, *, key: int = 0) -> tuple[list[Tensor], float]:
        """Wait for the next message of a neighbour under this key: tensors and a number. Others are kept.

        Raises:
            CommunicationError: it is gone; DeadlineError: it says nothing.
        """

    def await_messages(self, counts: Mapping[int, int]) -> None:
        """So many messages will be asked for, by neighbour: they may come before they are.

        Args:
            counts: all are asked for before this is called again, unless the run is aborted.
        """

    def flush(self, most: int = 0) -> None:
        """Wait until the neighbours have taken what was sent, all but the last `most` messages' parts."""

    def abort(self) -> None:
        """Forget what is on the way."""


class NetTransport:
    """Stages that are ranks of a group.

    Args:
        back: by which messages to earlier stages go; None: the same group. NCCL runs what two ranks send each
            other over one group in one order, and both ways in one order is a deadlock.
    Wire: a description of 512 bytes for each message, longer with many tensors, and the bytes of the tensors.
        On a processor both go in one part where the message before was as long, up to 64 KiB; tensors then
        begin at multiples of 64 bytes.
    """

    def __init__(
        self, group: RankGroup, net: Net, device: torch.device, back: RankGroup | None = None
    ) -> None:
        self._ahead, self._back, self._net, self._device = group, back or group, net, device
        self._under_way: list[Handle] = []
        self._abandoned: list[Handle] = []
        self._attempt = self.num_sent = 0
        self._early: dict[tuple[int, int], deque[StageMessage]] = {}
        self._first_sent: dict[int, int] = {}  # by neighbour, bytes of the first part of the next message
        self._first_taken: dict[int, int] = {}
        self._awaited: dict[int, int] = {}  # by neighbour, messages whose first part may be taken ahead
        self._ahead_of_time: dict[int, Handle] = {}

    def send(self, to: int, tensors: Sequence[Tensor], note: float = 0.0, *, key: int = 0) -> None:
        """See `StageTransport`."""
        way = self._ahead if to > self._ahead.rank else self._back
        letter = MessageHeader.of(tensors, note, key, self._attempt)
        for part in message_parts(letter, tensors, self._first_sent.get(to, HEADER_BYTES)):
            if part.numel():
                self.num_sent += 1
                self._under_way.append(self._net.send(part.to(self._device), way, to, self._attempt))
        self._expect(self._first_sent, to, letter)

    def await_messages(self, counts: Mapping[int, int]) -> None:
        """See `StageTransport`; a message goes at once to whom waits for it, and else has to ask first."""
        if self._device.type == "cpu":  # NCCL runs calls in their order
            self._awaited = dict(counts)
            for source in counts:
                self._take_ahead(source)

    def _take_ahead(self, source: int) -> None:
        if self._awaited.get(source, 0) and source not in self._ahead_of_time:
            self._awaited[source] -= 1
            self._ahead_of_time[source] = self._first_part(source)

    def receive(self, source: int, *, key: int = 0) -> StageMessage:
        """See `StageTransport`."""
        while not self._early.get((source, key)):
            letter, found = self._next(source)
            if letter.attempt == self._attempt:  # without tags, what an aborted run has left comes first
                self._early.setdefault((source, letter.key), deque()).append((found, letter.note))
                self._expect(self._first_taken, source, letter)
                self._take_ahead(source)
        return self._early[source, key].popleft()

    def _next(self, source: int) -> tuple[MessageHeader, list[Tensor]]:
        """The next message of a neighbour."""
        first = (self._ahead_of_time.pop(source, None) or self._first_part(source)).wait()
        words, missing = parse_first_part(first)
        if missing:
            words += self._taken(missing, source).wait().view(torch.int64).tolist()
        letter = MessageHeader.read(words)
        if letter.fits(len(first)):
            return letter, letter.copy_tensors_from(first)
        taken = [self._taken(size, source) for size in letter.sizes]
        return letter, [
            tensor_from_bytes(x.wait(), kind) for x, kind in zip(taken, letter.kinds, strict=True)
        ]

    def _expect(self, sizes: dict[int, int], neighbour: int, letter: MessageHeader) -> None:
        """Elsewhere than on a processor what an aborted run has left may come later, and says nothing."""
        if self._device.type == "cpu":
            sizes[neighbour] = next_first_part_bytes(letter)

    def _first_part(self, source: int) -> Handle:
        return self._taken(self._first_taken.get(source, HEADER_BYTES), source)

    def _taken(self, size: int, source: int) -> Handle:
        x = torch.empty(size, dtype=torch.uint8, device=self._device)
        way = self._back if source > self._ahead.rank else self._ahead
        return self._net.receive(x, way, source, self._attempt) if size else Handle.ready(x)

    def flush(self, most: int = 0) -> None:
        """See `StageTransport`."""
        while len(self._under_way) > most:
            self._under_way.pop(0).wait()

    def abort(self) -> None:
        """Forget what is on the way; its memory stays, since the backend may still read it."""
        self._abandoned += [*self._under_way, *self._ahead_of_time.values()]
        self._under_way, self._early = [], {}
        self._first_sent, self._first_taken = {}, {}
        self._awaited, self._ahead_of_time = {}, {}
        self._attempt += 1


class ThreadTransport:
    """Stages that are threads of one process: what is sent is copied, since a module may change its input.

    Args:
        stage: which one this is.
        boxes: one for each way, by sender and receiver; shared by all stages.
        left: stages that have ended; shared by all.
        deadline_seconds: the longest wait.
    """

    def __init__(self, stage: int, boxes: StageQueues, left: set[int], deadline_seconds: float) -> None:
        self._stage, self._boxes, self._left, self.num_sent = stage, boxes, left, 0
        self._deadline_seconds = deadline_seconds

    def send(self, to: int, tensors: Sequence[Tensor], note: float = 0.0, *, key: int = 0) -> None:
        """See `StageTransport`; what is sent one way is asked for in that order."""
        if to in self._left:
            raise self._gone(to)
        self._boxes[self._stage, to].put(([x.detach().clone() for x in tensors], note))

    def receive(self, source: int, *, key: int = 0) -> StageMessage:
        """See `StageTransport`."""
        try:
            found = self._boxes[source, self._stage].get(timeout=self._deadline_seconds)
        except queue.Empty:
            raise DeadlineError(
                f"stage {source} sent nothing within {self._deadline_seconds:g} s",
                where=f"stage {self._stage}",
                next_step="look at what that stage computes, or raise runtime.deadline_seconds",
            ) from None
        if found is None:
            raise self._gone(source)
        return found

    def await_messages(self, counts: Mapping[int, int]) -> None:
        """Does nothing: they come by themselves."""

    def leave(self) -> None:
        """Tell the neighbours that nothing more will come in this step."""
        self._left.add(self._stage)
        for (source, _), box in self._boxes.items():
            if source == self._stage:
                box.put(None)

    def flush(self, most: int = 0) -> None:
        """Does nothing: the queues have no limit."""

    def abort(self) -> None:
        """See `StageTransport`; every stage has ended."""
        self._left.clear()
        for box in self._boxes.values():
            while not box.empty():
                box.get_nowait()

    def _gone(self, stage: int) -> CommunicationError:
        return CommunicationError(f"stage {stage} has ended", where=f"stage {self._stage}")


StageQueues = dict[tuple[int, int], "queue.SimpleQueue[StageMessage | None]"]


def thread_transports(num_stages: int, deadline_seconds: float) -> list[ThreadTransport]:
    """The wires of stages in threads, by stage."""
    ways = [(a, b) for a in range(num_stages) for b in (a - 1, a + 1) if 0 <= b < num_stages]
    boxes: StageQueues = {way: queue.SimpleQueue() for way in ways}
    left: set[int] = set()
    return [ThreadTransport(stage, boxes, left, deadline_seconds) for stage in range(num_stages)]


class HostMemoryTransport:
    """Stages that are ranks of a group, on one host.

    Args:
        mail: between them; `close` closes it.
    Attributes:
        stages: those that it reaches.
    Wire: nothing. The ledger counts a description of 512 bytes for each message, longer with many tensors,
        and the tensors, which begin at multiples of 64 bytes.
    """

    def __init__(self, mail: HostMessenger) -> None:
        self._mail, self.stages = mail, mail.places
        self._attempt = self.num_sent = 0
        self._early: dict[tuple[int, int, int], deque[StageMessage]] = {}

    def send(self, to: int, tensors: Sequence[Tensor], note: float = 0.0, *, key: int = 0) -> None:
        """See `StageTransport`; the tensors may change afterwards."""
        letter = MessageHeader.of(tensors, note, key, self._attempt)
        self._mail.send(to, letter.num_bytes, partial(write_message, letter, tensors))
        self.num_sent += 1

    def receive(self, source: int, *, key: int = 0) -> StageMessage:
        """See `StageTransport`."""
        wanted = source, key, self._attempt
        while not self._early.get(wanted):
            letter, found = self._mail.take(source, read_message)
            if letter.attempt >= self._attempt:
                place = source, letter.key, letter.attempt
                self._early.setdefault(place, deque()).append((found, letter.note))
        return self._early[wanted].popleft()

    def acknowledge_read(self) -> None:
        """See `HostMessenger`."""
        self._mail.acknowledge_read()

    def await_messages(self, counts: Mapping[int, int]) -> None:
        """Does nothing: they come by themselves."""

    def flush(self, most: int = 0) -> None:
        """See `StageTransport`; the tensors are free before, and this holds a stage back that runs ahead."""
        self._mail.flush(most)

    def abort(self) -> None:
        """See `StageTransport`."""
        self._mail.abort()
        self._attempt += 1
        self._early = {place: found for place, found in self._early.items() if place[2] >= self._attempt}

    def close(self) -> None:
        """Leave the neighbours."""
        self._mail.close()


class MultiHostTransport:
    """Stages that are ranks of a group, some of them on this host.

    Args:
        near: reaches those of this host.
        far: reaches the others.
    Wire: that of `far`. The ledger counts what both count.
    """

    def __init__(self, near: HostMemoryTransport, far: NetTransport) -> None:
        self._near, self._far = near, far

    @property
    def num_sent(self) -> int:
        """See `StageTransport`."""
        return self._near.num_sent + self._far.num_sent

    def send(self, to: int, tensors: Sequence[Tensor], note: float = 0.0, *, key: int = 0) -> None:
        """See `StageTransport`."""
        self._to(to).send(to, tensors, note, key=key)

    def receive(self, source: int, *, key: int = 0) -> StageMessage:
        """See `StageTransport`; a stage of this host may wait for a word meanwhile."""
        if source not in self._near.stages:
            self._near.acknowledge_read()
        return self._to(source).receive(source, key=key)

    def await_messages(self, counts: Mapping[int, int]) -> None:
        """See `StageTransport`; those of this host come by themselves."""
        self._far.await_messages({stage: n for stage, n in counts.items() if stage not in self._near.stages})

    def flush(self, most: int = 0) -> None:
        """See `StageTransport`; so many may be left of each way, and nobody here waits for a word meanwhile."""
        self._near.acknowledge_read()
        self._near.flush(most)
        self._far.flush(most)

    def abort(self) -> None:
        """See `StageTransport`."""
        self._near.abort()
        self._far.abort()

    def _to(self, stage: int) -> StageTransport:
        return self._near if stage in self._near.stages else self._far
