"""ZeRO 1 and 2: every rank computes with whole tensors, updates its parts, and is given those of the others.

Source: Rajbhandari et al. 2020, ZeRO, arXiv:1910.02054, section 5.1 (optimizer state partitioning).
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

from torch import Tensor

from paceline.comm import Collective
from paceline.comm.reduction import PartBuffer
from paceline.comm.reduction.part_buffer import nothing_like, plan_buckets
from paceline.comm.routes import SharedMemoryCollective
from paceline.layout.holding import Holding

_GROUP_BYTES = 2**26  # a buffer is there only while it is filled and read
_ALL_BYTES = 2**62


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
    """The same on one host: each rank reads the others' parts where these have put them.

    Args:
        holding: see `GatherAfterUpdate`.
        memory: of the ranks of the shard group.
    Wire: nothing; the ledger counts an all_gather for each dtype. A call allocates nothing.
    """

    def __init__(self, holding: Holding, memory: SharedMemoryCollective) -> None:
        self._memory, self._tensors = memory, holding.computes
        self._rows: list[tuple[str, PartBuffer, Tensor]] = []
        for number, slots in enumerate(plan_buckets(self._tensors, _ALL_BYTES)):
            shape = PartBuffer(slots, self._tensors, holding.parts, _without_memory)
            key, like = f"parameters.{number}", nothing_like(self._tensors[slots[0]])
            self._rows.append((key, shape, memory.buffer(shape.rows.shape[1], like, key)))

    def __call__(self) -> None:
        """Put this rank's parts where the others read them, and read theirs."""
        group = self._memory.group
        for key, shape, own in self._rows:
            shape.write_row(group.rank, self._tensors, own)
            calls = [("all_gather", group, own.nbytes)]
            self._memory.combine([key], calls, partial(self._read, shape)).wait()

    def _read(self, shape: PartBuffer, parts: Sequence[Sequence[Tensor]]) -> None:
        for row, part in enumerate(parts[0]):
            if row != self._memory.group.rank:
                shape.read_row(row, part, self._tensors)


def _without_memory(num_values: int, like: Tensor) -> Tensor:
    return like.new_empty(num_values, device="meta")


def _zeros(num_values: int, like: Tensor) -> Tensor:
    return like.new_zeros(num_values)
