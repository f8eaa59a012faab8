"""Memory that every step uses again: the first step allocates it, later ones find it.

Invariant: a tensor that was taken is valid until its name is taken again. One thread uses a workspace. Memory
    is never
freed: the largest tensor that was requested under each name stays.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import prod

import torch
from torch import Tensor

_CPU = torch.device("cpu")


class Workspace:
    """Tensors by name, dtype and device."""

    def __init__(self) -> None:
        self._tensors: dict[tuple[str, torch.dtype, torch.device], Tensor] = {}

    @property
    def num_bytes(self) -> int:
        """Bytes of all tensors."""
        return sum(x.nbytes for x in self._tensors.values())

    def take(
        self,
        name: str,
        shape: Sequence[int],
        dtype: torch.dtype,
        device: torch.device = _CPU,
        *,
        room: int = 0,
    ) -> Tensor:
        """Return a contiguous tensor [shape] with undefined values.

        Args:
            room: number of values that a later request of this name may have; new memory is made so large.
        """
        key, num_values = (name, dtype, device), prod(shape)
        x = self._tensors.get(key)
        if x is None or x.numel() < num_values:
            x = None
            # Free the old memory before the larger one is allocated, which may then reuse it.
            self._tensors.pop(key, None)
            x = self._tensors[key] = torch.empty(max(num_values, room), dtype=dtype, device=device)
        return x[:num_values].view(*shape)

    def like(self, name: str, x: Tensor) -> Tensor:
        """Return a contiguous tensor of the shape, dtype and device of `x`."""
        return self.take(name, x.shape, x.dtype, x.device)

    def copy(self, name: str, x: Tensor, dtype: torch.dtype | None = None) -> Tensor:
        """Return the values of `x`, contiguous, in another dtype; `x` itself if it already is."""
        if x.is_contiguous() and dtype in (None, x.dtype):
            return x
        return self.take(name, x.shape, dtype or x.dtype, x.device).copy_(x)
