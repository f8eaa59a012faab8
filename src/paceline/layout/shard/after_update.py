"""ZeRO 1 and 2: every rank computes with whole tensors, updates its parts, and is given those of the others.

Source: Rajbhandari et al. 2020, ZeRO, arXiv:1910.02054, section 5.1 (optimizer state partitioning).
"""

from __future__ import annotations

from torch import Tensor

from paceline.comm import Collective
from paceline.comm.reduction import PartBuffer
from paceline.comm.reduction.part_buffer import plan_buckets
from paceline.layout.holding import Holding

_EVERYTHING = 2**62


class GatherAfterUpdate:
    """Collective over the shard group; call it after an update.

    Args:
        holding: whose updated parts share memory with what they are parts of.
        collective: over the shard group; exact.
    Wire: (S-1)/S n bytes, in one all_gather for each dtype.
    """

    def __init__(self, holding: Holding, collective: Collective) -> None:
        self._collective = collective
        self._tensors = holding.computes
        parts = holding.parts
        self._buffers = [
            PartBuffer(slots, self._tensors, parts, _zeros)
            for slots in plan_buckets(self._tensors, _EVERYTHING)
        ]

    def __call__(self) -> None:
        """Fill in this rank's parts, and read everybody's."""
        place = self._collective.group.rank
        for number, buffer in enumerate(self._buffers):
            buffer.write_row(place, self._tensors)
            rows = self._collective.all_gather(buffer.rows[place], f"parameters.{number}").wait()
            buffer.rows.copy_(rows)
            for slot in buffer.slots:
                buffer.read(slot, self._tensors[slot].data)


def _zeros(num_values: int, like: Tensor) -> Tensor:
    return like.new_zeros(num_values)
