"""ZeRO 1 and 2: every rank computes with whole tensors, updates its parts, and is given those of the others.

Source: Rajbhandari et al. 2020, ZeRO, arXiv:1910.02054, section 5.1 (optimizer state partitioning).
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

import torch
from torch import Tensor

from paceline.comm import Collective
from paceline.comm.reduction import PartBuffer
from paceline.comm.reduction.part_buffer import bytes_in_turn, plan_buckets
from paceline.comm.routes import SharedMemoryCollective
from paceline.layout.holding import Holding

_GROUP_BYTES = 2**26  # a buffer is there only while it is filled and read
_READ_BYTES = 2**24  # ranks meet for each, and its buffer stays


class GatherAfterUpdate:
    """Collective over the shard group; call it after an update.

    Args:
        holding: whose updated parts share memory with what they are parts of.
        collective: over the shard group; exact.
    Wire: (S-1)/S n bytes, in an all_gather for every 64 MiB of each dtype.
    """

    def __init__(self, holding: Holding, collective: Collective) -> None:
        self._collective = collective
        self._tensors, self._parts = holding.computes, holding.parts
        self._groups = plan_buckets(self._tensors, _GROUP_BYTES)

    def __call__(self) -> None:
        """Fill in this rank's parts, and read everybody's."""
        place = self._collective.group.rank
        for number, slots in enumerate(self._groups):
            buffer = PartBuffer(slots, self._tensors, self._parts, _zeros)
            buffer.write_row(place, self._tensors)
            rows = self._collective.all_gather(buffer.rows[place], f"parameters.{number}").wait()
            buffer.rows.copy_(rows)
            for slot in buffer.slots:
                buffer.read(slot, self._tensors[slot].data)


class ReadAfterUpdate:
    """The same on one host: each rank reads the others' parts where these have put them, some at a time.

    Args:
        holding: see `GatherAfterUpdate`.
        memory: of the ranks of the shard group.
    Wire: nothing; the ledger counts an all_gather for each 16 MiB, or part of all. A call allocates nothing.
    """

    def __init__(self, holding: Holding, memory: SharedMemoryCollective) -> None:
        self._memory, self._tensors = memory, holding.computes
        together = bytes_in_turn(self._tensors.values(), _READ_BYTES)
        self._shapes = [
            PartBuffer(slots, self._tensors, holding.parts, _without_memory)
            for slots in plan_buckets(self._tensors, together)
        ]
        by_width = sorted(self._shapes, key=lambda shape: shape.rows.shape[1])
        widest = {shape.rows.dtype: shape for shape in by_width}
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


def _key(dtype: torch.dtype) -> str:
    return f"parameters.{dtype}"


def _size(shape: PartBuffer) -> tuple[int, Tensor]:
    """Values of a row, and a tensor without any that it is like."""
    return shape.rows.shape[1], torch.empty(0, dtype=shape.rows.dtype)


def _without_memory(num_values: int, like: Tensor) -> Tensor:
    return like.new_empty(num_values, device="meta")


def _zeros(num_values: int, like: Tensor) -> Tensor:
    return like.new_zeros(num_values)
