"""ZeRO 1 and 2: every rank computes with whole tensors, updates its parts, and is given those of the others.

Source: Rajbhandari et al. 2020, ZeRO, arXiv:1910.02054, section 5.1 (optimizer state partitioning).
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Sequence
from functools import partial

import torch
from torch import Tensor

from paceline.comm import Collective, Handle
from paceline.comm.reduction import PartBuffer
from paceline.comm.reduction.blocks import UNDER_WAY, moving
from paceline.comm.reduction.part_buffer import bytes_in_turn, plan_buckets
from paceline.comm.routes import SharedMemoryCollective
from paceline.comm.workspace import Workspace
from paceline.layout.holding import Holding

_READ_BYTES = 2**24  # ranks meet for each, and its buffer stays


class GatherAfterUpdate:
    """Collective over the shard group; call it after an update.

    Args:
        holding: whose updated parts share memory with what they are parts of.
        collective: over the shard group; exact.
        bucket_bytes: of parameters that go together; see `bytes_in_turn`.
        memory: of what is under way, two buckets at a time; others may use it between calls.
    Wire: (S-1)/S n bytes, in an all_gather for each bucket. A call allocates nothing, but what the backend
        takes for itself.
    """

    def __init__(
        self, holding: Holding, collective: Collective, bucket_bytes: int, memory: Workspace
    ) -> None:
        self._collective, self._memory = collective, memory
        self._tensors, self._device = holding.computes, holding.device
        self._shapes = _shapes(holding, bytes_in_turn(self._tensors.values(), bucket_bytes))
        for number in range(len(self._shapes)):  # none has to grow while a thread of a backend has it
            self._rows(number)

    def __call__(self) -> None:
        """Send this rank's parts, and read everybody's."""
        arriving: deque[tuple[PartBuffer, Handle]] = deque()
        for number, shape in enumerate(self._shapes):
            if len(arriving) == UNDER_WAY:
                self._read(*arriving.popleft())
            arriving.append((shape, self._start(number)))
        for one in arriving:
            self._read(*one)

    def _start(self, number: int) -> Handle:
        place, shape, rows = self._collective.group.rank, self._shapes[number], self._rows(number)
        shape.write_row(place, self._tensors, rows[place])
        key = f"parameters.{rows.dtype}.{number % UNDER_WAY}"
        return self._collective.all_gather(rows[place], key, rows)

    def _rows(self, number: int) -> Tensor:
        """Memory of a bucket, which the next but one has as well."""
        rows = self._shapes[number].rows
        return self._memory.take(moving(number % UNDER_WAY), rows.shape, rows.dtype, self._device)

    def _read(self, shape: PartBuffer, arriving: Handle) -> None:
        for row, part in enumerate(arriving.wait()):
            if row != self._collective.group.rank:
                shape.read_row(row, part, self._tensors)


class ReadAfterUpdate:
    """The same on one host: each rank reads the others' parts where these have put them, some at a time.

    Args:
        holding: see `GatherAfterUpdate`.
        memory: of the ranks of the shard group.
    Wire: nothing; the ledger counts an all_gather for each 16 MiB, or part of all. A call allocates nothing.
    """

    def __init__(self, holding: Holding, memory: SharedMemoryCollective) -> None:
        self._memory, self._tensors = memory, holding.computes
        self._shapes = _shapes(holding, bytes_in_turn(self._tensors.values(), _READ_BYTES))
        widest = _widest(self._shapes)
        self._own = {dtype: memory.buffer(*_size(shape), _key(dtype)) for dtype, shape in widest.items()}

    def __call__(self) -> None:
        """Put this rank's parts where the others read them, and read theirs."""
        group = self._memory.group
        for shape in self._shapes:
            dtype, width = shape.rows.dtype, shape.rows.shape[1]
            own = self._own[dtype][:width]
            shape.write_row(group.rank, self._tensors, own)
            calls = [("all_gather", group, own.nbytes)]
            self._memory.combine([_key(dtype)], calls, partial(self._read, shape, width)).wait()

    def _read(self, shape: PartBuffer, width: int, parts: Sequence[Sequence[Tensor]]) -> None:
        for row, part in enumerate(parts[0]):
            if row != self._memory.group.rank:
                shape.read_row(row, part[:width], self._tensors)


def _shapes(holding: Holding, together: int) -> list[PartBuffer]:
    """Where parts lie in what goes together."""
    return [
        PartBuffer(slots, holding.computes, holding.parts, _without_memory)
        for slots in plan_buckets(holding.computes, together)
    ]


def _widest(shapes: Iterable[PartBuffer]) -> dict[torch.dtype, PartBuffer]:
    by_width = sorted(shapes, key=lambda shape: shape.rows.shape[1])
    return {shape.rows.dtype: shape for shape in by_width}


def _key(dtype: torch.dtype) -> str:
    return f"parameters.{dtype}"


def _size(shape: PartBuffer) -> tuple[int, Tensor]:
    """Values of a row, and a tensor without any that it is like."""
    return shape.rows.shape[1], torch.empty(0, dtype=shape.rows.dtype)


def _without_memory(num_values: int, like: Tensor) -> Tensor:
    return like.new_empty(num_values, device="meta")
