"""Memory that buckets take in turn, so that a steady step allocates nothing."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor


class Blocks:
    """Pieces of memory, each as large as the largest bucket of its dtype; made when none is free.

    Args:
        sizes: values of the largest bucket, by dtype.
        device: where the memory lies.
    """

    def __init__(self, sizes: Mapping[torch.dtype, int], device: torch.device) -> None:
        self._sizes, self._device = sizes, device
        self.memory: list[Tensor] = []
        self._free: list[int] = []

    def take(self, dtype: torch.dtype) -> int:
        """The number of a block that nobody has; its values are whatever was left in it."""
        for number in self._free:
            if self.memory[number].dtype == dtype:
                self._free.remove(number)
                return number
        self.memory.append(torch.empty(self._sizes[dtype], dtype=dtype, device=self._device))
        return len(self.memory) - 1

    def give(self, number: int) -> None:
        """It may be taken again."""
        self._free.append(number)

    def give_all(self) -> None:
        """Nobody has any."""
        self._free = [*range(len(self.memory))]
