"""What neighbouring stages send each other: tensors of any shape and dtype, and a number.

Invariant: messages between two stages arrive in order, and each is found by its key; an aborted run uses
other tags, so what it left on the way is never taken for something new.
"""

from __future__ import annotations

import queue
from collections import deque
from collections.abc import Sequence
from math import prod
from typing import Protocol

import torch
from torch import Tensor

from paceline.comm import Handle, Net
from paceline.errors import CommunicationError, DeadlineError
from paceline.mesh import Group

Message = tuple[list[Tensor], float]
_HEAD = 64  # whole numbers; a description that is longer goes on in a second message
_DTYPES = tuple(sorted({x for x in vars(torch).values() if isinstance(x, torch.dtype)}, key=str))


class Neighbours(Protocol):
    """The stages before and after this one."""

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

    def flush(self, most: int = 0) -> None:
        """Wait until the neighbours have taken what was sent, all but the last `most` messages' parts."""

    def abort(self) -> None:
        """Forget what is on the way."""


class StageWire:
    """Stages that are ranks of a group.

    Args:
        back: by which messages to earlier stages go; None: the same group. NCCL runs what two ranks send each
            other over one group in one order, and both ways in one order is a deadlock.
    Wire: a header of 512 bytes for each message, longer with many tensors, and the bytes of the tensors.
    """

    def __init__(self, group: Group, net: Net, device: torch.device, back: Group | None = None) -> None:
        self._ahead, self._back, self._net, self._device = group, back or group, net, device
        self._under_way: list[Handle] = []
        self._abandoned: list[Handle] = []
        self._attempt = 0
        self._early: dict[tuple[int, int], deque[Message]] = {}

    def send(self, to: int, tensors: Sequence[Tensor], note: float = 0.0, *, key: int = 0) -> None:
        """See `Neighbours`."""
        way = self._ahead if to > self._ahead.rank else self._back
        words = _describe(tensors, note, key, self._attempt)
        words += [0] * (_HEAD - len(words))
        parts = [torch.tensor(words[:_HEAD]), torch.tensor(words[_HEAD:])]
        for x in (*(part.to(self._device) for part in parts), *map(_as_bytes, tensors)):
            if x.numel():
                self._under_way.append(self._net.send(x, way, to, self._attempt))

    def receive(self, source: int, *, key: int = 0) -> Message:
        """See `Neighbours`."""
        while not self._early.get((source, key)):
            found, of, attempt = self._next(source)
            if attempt == self._attempt:  # NCCL knows no tags: what an aborted run has left comes first
                self._early.setdefault((source, of), deque()).append(found)
        return self._early[source, key].popleft()

    def _next(self, source: int) -> tuple[Message, int, int]:
        """The next message of a neighbour, its key, and of which attempt it is."""
        words: list[int] = self._take(_HEAD, torch.int64, source).tolist()
        words += self._take(max(0, words[0] - _HEAD), torch.int64, source).tolist()
        num_tensors, note, key, attempt = words[1], torch.tensor(words[2]).view(torch.float64), *words[3:5]
        place = 5
        found = []
        for _ in range(num_tensors):
            dtype, dims = _DTYPES[words[place]], words[place + 1]
            shape = words[place + 2 : place + 2 + dims]
            place += 2 + dims
            data = self._take(prod(shape) * dtype.itemsize, torch.uint8, source)
            found.append(data.view(dtype).view(shape))
        return (found, float(note)), key, attempt

    def _take(self, size: int, dtype: torch.dtype, source: int) -> Tensor:
        x = torch.empty(size, dtype=dtype, device=self._device)
        way = self._back if source > self._ahead.rank else self._ahead
        return self._net.receive(x, way, source, self._attempt).wait() if size else x

    def flush(self, most: int = 0) -> None:
        """See `Neighbours`."""
        while len(self._under_way) > most:
            self._under_way.pop(0).wait()

    def abort(self) -> None:
        """Forget what is on the way; its memory stays, since the backend may still read it."""
        self._abandoned += self._under_way
        self._under_way, self._early = [], {}
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
        self._stage, self._boxes, self._left = stage, boxes, left
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


def _describe(tensors: Sequence[Tensor], note: float, key: int, attempt: int) -> list[int]:
    """A header: how many numbers and tensors, note, key, attempt; type, dimensions and sizes of each."""
    rows = [x for t in tensors for x in (_DTYPES.index(t.dtype), t.dim(), *t.shape)]
    return [
        5 + len(rows),
        len(tensors),
        int(torch.tensor(note, dtype=torch.float64).view(torch.int64)),
        key,
        attempt,
        *rows,
    ]


def _as_bytes(x: Tensor) -> Tensor:
    """Gloo carries few types, and bytes carry all."""
    return x.detach().resolve_conj().resolve_neg().contiguous().view(-1).view(torch.uint8)
