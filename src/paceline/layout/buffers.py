"""Buffers that the forward pass changes, such as the running statistics of BatchNorm.

Every unit of a step starts from the buffers before the step, and the buffers after it are those plus the
mean change over all units of all ranks. So they depend on the virtual shards, never on the world size,
and the sum can be taken in any order. Integer buffers (counters) are rounded.

Invariant: between steps, buffers are equal on all ranks. Non-persistent buffers (masks) are not touched.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn


class UnitBuffers:
    """The persistent buffers of one model, around the units of a step."""

    def __init__(self, model: nn.Module) -> None:
        state = set(model.state_dict().keys())
        self._buffers = [b for name, b in model.named_buffers() if name in state]
        self._base = self._flat()
        self._change = torch.zeros_like(self._base)

    @property
    def num_values(self) -> int:
        """Total number of values: what a tally carries for them."""
        return self._base.numel()

    def begin_step(self) -> None:
        """Remember the values before the step."""
        if self._buffers:
            self._base = self._flat()
            self._change = torch.zeros_like(self._base)

    def end_unit(self) -> None:
        """Add this unit's change, and put the values before the step back."""
        if self._buffers:
            self._change += self._flat() - self._base
            self._write(self._base)

    @property
    def change(self) -> Tensor:
        """Sum of the changes of this rank's units, float64 [num_values]."""
        return self._change

    def end_step(self, change: Tensor, units: float) -> None:
        """Apply the mean change.

        Args:
            change: summed over all units of all ranks, float64 [num_values].
            units: how many units that is.
        """
        if self._buffers and units:
            self._write(self._base + change.to(self._base.device) / units)

    def _flat(self) -> Tensor:
        if not self._buffers:
            return torch.zeros(0, dtype=torch.float64)
        return torch.cat([b.detach().reshape(-1).to(torch.float64) for b in self._buffers])

    def _write(self, flat: Tensor) -> None:
        with torch.no_grad():
            for b, piece in zip(self._buffers, flat.split([b.numel() for b in self._buffers]), strict=True):
                value = piece.view_as(b)
                b.copy_(value if b.dtype.is_floating_point else value.round())
