"""A group of one that has taken over what coding had lost: it is added to the next gradient, once."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence

import torch
from torch import Tensor

from paceline.comm.reduction.gradients import Gradients
from paceline.comm.reduction.local import LocalReducer
from paceline.slot import Slot

_NO_LOSS = ("factor", "velocity")


def all_lost(found: Mapping[tuple[str, str], Tensor]) -> dict[str, Tensor]:
    """By the slot's name, the sum of what was lost on all sides; factors and velocities are no loss."""
    sums: dict[str, Tensor] = {}
    for (side, name), value in sorted(found.items(), key=lambda entry: entry[0]):
        if not side.endswith(_NO_LOSS):
            sums[name] = sums[name] + value if name in sums else value
    return sums


class OwedReducer(LocalReducer):
    """Gradients of this rank, and with the first that is applied what it has taken over.

    Args:
        tensors: what this rank computes with, by slot.
        others: other ranks have taken over some of it, too.
    """

    def __init__(self, tensors: Mapping[Slot, Tensor], *, others: bool = True) -> None:
        super().__init__(tensors)
        self._tensors, self._others = tensors, others
        self._owed: dict[Slot, Tensor] = {}
        self._is_paid, self._scale = False, 1.0

    @property
    def names(self) -> Collection[str]:
        """Of the slots that have a gradient in this step, whether they are used or not."""
        return () if self._is_paid else [slot.name for slot in self._owed]

    def ran(self, scale: float) -> None:
        """This step's losses were multiplied with `scale` before backward."""
        self._scale = scale

    def finish(self) -> Gradients:
        """See `Reduction`."""
        for slot, owed in () if self._is_paid else self._owed.items():
            grad = self._grads[slot]
            self._grads[slot] = owed * self._scale if grad is None else grad + owed * self._scale
        return super().finish()

    def commit(self) -> None:
        """What was owed has been applied."""
        self._is_paid = True
        if not self._others:
            self.forget()

    def forget(self) -> None:
        """All ranks have applied what they owed: it is state no more."""
        self._owed = {}

    def lost(self) -> Sequence[tuple[str, Slot, Tensor]]:
        """What is owed, unscaled; zeros once it is paid, as others may still owe theirs."""
        return [
            ("sent", slot, torch.zeros_like(owed) if self._is_paid else owed)
            for slot, owed in self._owed.items()
        ]

    def set_lost(self, found: Mapping[tuple[str, str], Tensor]) -> None:
        """Owe the sum of all sides, unscaled."""
        sums = all_lost(found)
        self._is_paid = False
        self._owed = {
            slot: torch.empty_like(p).copy_(sums[slot.name]).detach()
            for slot, p in self._tensors.items()
            if slot.name in sums
        }
