"""What neighbouring stages send each other: tensors of any shape and dtype, and a number.

Invariant: messages between two stages arrive in order, and each is found by its key; an aborted run uses
other tags, so what it left on the way is never taken for something new. Both sides know how long the first
part of a message is (`letter`).
"""

from __future__ import annotations

import queue
from collections import deque
from collections.abc import Mapping, Sequence
from typing import Protocol

import torch
from torch import Tensor

from paceline.comm import Handle, Net
from paceline.errors import CommunicationError, DeadlineError
from paceline.layout.pipeline.letter import HEAD_BYTES, Letter, next_size, parts_of, shaped, words_in
from paceline.mesh import Group

Message = tuple[list[Tensor], float]


class Neighbours(Protocol):
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


class StageWire:
    """Stages that are ranks of a group.

    Args:
        back: by which messages to earlier stages go; None: the same group. NCCL runs what two ranks send each
            other over one group in one order, and both ways in one order is a deadlock.
    Wire: a description of 512 bytes for each message, longer with many tensors, and the bytes of the tensors.
        On a processor both go in one part where the message before was as long, up to 64 KiB; tensors then
        begin at multiples of 64 bytes.
    """

    def __init__(self, group: Group, net: Net, device: torch.device, back: Group | None = None) -> None:
        self._ahead, self._back, self._net, self._device = group, back or group, net, device
        self._under_way: list[Handle] = []
        self._abandoned: list[Handle] = []
        self._attempt = self.num_sent = 0
        self._early: dict[tuple[int, int], deque[Message]] = {}
        self._first_sent: dict[int, int] = {}  # by neighbour, bytes of the first part of the next message
        self._first_taken: dict[int, int] = {}
        self._awaited: dict[int, int] = {}  # by neighbour, messages whose first part may be taken ahead
        self._ahead_of_time: dict[int, Handle] = {}

    def send(self, to: int, tensors: Sequence[Tensor], note: float = 0.0, *, key: int = 0) -> None:
        """See `Neighbours`."""
        way = self._ahead if to > self._ahead.rank else self._back
        letter = Letter.of(tensors, note, key, self._attempt)
        for part in parts_of(letter, tensors, self._first_sent.get(to, HEAD_BYTES)):
            if part.numel():
                self.num_sent += 1
                self._under_way.append(self._net.send(part.to(self._device), way, to, self._attempt))
        self._expect(self._first_sent, to, letter)

    def await_messages(self, counts: Mapping[int, int]) -> None:
        """See `Neighbours`; a message goes at once to whom waits for it, and else has to ask first."""
        if self._device.type == "cpu":  # NCCL runs calls in their order
            self._awaited = dict(counts)
            for source in counts:
                self._take_ahead(source)

    def _take_ahead(self, source: int) -> None:
        if self._awaited.get(source, 0) and source not in self._ahead_of_time:
            self._awaited[source] -= 1
            self._ahead_of_time[source] = self._first_part(source)

    def receive(self, source: int, *, key: int = 0) -> Message:
        """See `Neighbours`."""
        while not self._early.get((source, key)):
            letter, found = self._next(source)
            if letter.attempt == self._attempt:  # without tags, what an aborted run has left comes first
                self._early.setdefault((source, letter.key), deque()).append((found, letter.note))
                self._expect(self._first_taken, source, letter)
                self._take_ahead(source)
        return self._early[source, key].popleft()

    def _next(self, source: int) -> tuple[Letter, list[Tensor]]:
        """The next message of a neighbour."""
        first = (self._ahead_of_time.pop(source, None) or self._first_part(source)).wait()
        words, missing = words_in(first)
        if missing:
            words += self._taken(missing, source).wait().view(torch.int64).tolist()
        letter = Letter.read(words)
        if letter.fits(len(first)):
            return letter, letter.taken_from(first)
        taken = [self._taken(size, source) for size in letter.sizes]
        return letter, [shaped(x.wait(), kind) for x, kind in zip(taken, letter.kinds, strict=True)]

    def _expect(self, sizes: dict[int, int], neighbour: int, letter: Letter) -> None:
        """Elsewhere than on a processor what an aborted run has left may come later, and says nothing."""
        if self._device.type == "cpu":
            sizes[neighbour] = next_size(letter)

    def _first_part(self, source: int) -> Handle:
        return self._taken(self._first_taken.get(source, HEAD_BYTES), source)

    def _taken(self, size: int, source: int) -> Handle:
        x = torch.empty(size, dtype=torch.uint8, device=self._device)
        way = self._back if source > self._ahead.rank else self._ahead
        return self._net.receive(x, way, source, self._attempt) if size else Handle.ready(x)

    def flush(self, most: int = 0) -> None:
        """See `Neighbours`."""
        while len(self._under_way) > most:
            self._under_way.pop(0).wait()

    def abort(self) -> None:
        """Forget what is on the way; its memory stays, since the backend may still read it."""
        self._abandoned += [*self._under_way, *self._ahead_of_time.values()]
        self._under_way, self._early = [], {}
        self._first_sent, self._first_taken = {}, {}
        self._awaited, self._ahead_of_time = {}, {}
        self._attempt += 1


class ThreadWire:
    """Stages that are threads of one process: what is sent is copied, since a module may change its input.

    Args:
        stage: which one this is.
        boxes: one for each way, by sender and receiver; shared by all stages.
        left: stages that have ended; shared by all.
        deadline_seconds: the longest wait.
    """

    def __init__(self, stage: int, boxes: Boxes, left: set[int], deadline_seconds: float) -> None:
        self._stage, self._boxes, self._left, self.num_sent = stage, boxes, left, 0
        self._deadline_seconds = deadline_seconds

    def send(self, to: int, tensors: Sequence[Tensor], note: float = 0.0, *, key: int = 0) -> None:
        """See `Neighbours`; what is sent one way is asked for in that order."""
        if to in self._left:
            raise self._gone(to)
        self._boxes[self._stage, to].put(([x.detach().clone() for x in tensors], note))

    def receive(self, source: int, *, key: int = 0) -> Message:
        """See `Neighbours`."""
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
        """See `Neighbours`; every stage has ended."""
        self._left.clear()
        for box in self._boxes.values():
            while not box.empty():
                box.get_nowait()

    def _gone(self, stage: int) -> CommunicationError:
        return CommunicationError(f"stage {stage} has ended", where=f"stage {self._stage}")


Boxes = dict[tuple[int, int], "queue.SimpleQueue[Message | None]"]


def thread_wires(num_stages: int, deadline_seconds: float) -> list[ThreadWire]:
    """The wires of stages in threads, by stage."""
    ways = [(a, b) for a in range(num_stages) for b in (a - 1, a + 1) if 0 <= b < num_stages]
    boxes: Boxes = {way: queue.SimpleQueue() for way in ways}
    left: set[int] = set()
    return [ThreadWire(stage, boxes, left, deadline_seconds) for stage in range(num_stages)]
