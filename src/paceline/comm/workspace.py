"""Memory that every step takes again: the first one allocates it, the others find it.

Invariant: what was taken by a name is good until that name is taken again. One thread uses a workspace. It
does not free: it keeps the largest that was asked for by each name.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import prod

import torch
from torch import Tensor

_CPU = torch.device("cpu")


class Workspace:
    """Tensors by name, type and device."""

    def __init__(self) -> None:
        self._kept: dict[tuple[str, torch.dtype, torch.device], Tensor] = {}

    @property
    def num_bytes(self) -> int:
        """Of all that it keeps."""
        return sum(x.nbytes for x in self._kept.values())

    def take(
        self,
        name: str,
        shape: Sequence[int],
        dtype: torch.dtype,
        device: torch.device = _CPU,
        *,
        room: int = 0,
    ) -> Tensor:
        """A contiguous tensor [shape] whose values are anything.

        Args:
            room: values that a later one of this name may have; memory that is made is for so many.
        """
        place, num_values = (name, dtype, device), prod(shape)
        found = self._kept.get(place)
        if found is None or found.numel() < num_values:
            found = None
            self._kept.pop(place, None)  # its memory may be that of the larger one
            found = self._kept[place] = torch.empty(max(num_values, room), dtype=dtype, device=device)
        return found[:num_values].view(*shape)

    def like(self, name: str, x: Tensor) -> Tensor:
        """One of the shape, type and device of `x`, contiguous."""
        return self.take(name, x.shape, x.dtype, x.device)

    def copy(self, name: str, x: Tensor, dtype: torch.dtype | None = None) -> Tensor:
        """The values of `x`, contiguous, as another type; `x` itself where it is that already."""
        if x.is_contiguous() and dtype in (None, x.dtype):
            return x
        return self.take(name, x.shape, dtype or x.dtype, x.device).copy_(x)
