"""What coding had lost, where nobody codes gradients any more: it is added to the next one, once."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence

import torch
from torch import Tensor

from paceline.comm.reduction.gradients import Gradients
from paceline.slot import Slot

_NO_LOSS = ("factor", "velocity")


def all_lost(found: Mapping[tuple[str, str], Tensor]) -> dict[str, Tensor]:
    """By the slot's name, the sum of what was lost on all sides; factors and velocities are no loss."""
    sums: dict[str, Tensor] = {}
    for (side, name), value in sorted(found.items(), key=lambda entry: entry[0]):
        if not side.endswith(_NO_LOSS):
            sums[name] = sums[name] + value if name in sums else value
    return sums


class Owed:
    """What all ranks had lost, as every replica has it that trains alone.

    Each adds all of it, as its part of the mean of all, to the first of its gradients that is applied. So the
    mean of how they move, whatever the weights are, has moved by it once.

    Args:
        tensors: what this rank updates, by slot.
        counted: those of them that it counts in a norm.
        items: of how many items it is a sum, beside others, where updates are of means; None: of sums.
        others: other replicas have taken it over, too.
    """

    def __init__(
        self,
        tensors: Mapping[Slot, Tensor],
        counted: Collection[Slot],
        items: float | None,
        *,
        others: bool = True,
    ) -> None:
        self._tensors, self._counted, self._items, self._others = tensors, counted, items, others
        self._owed: dict[Slot, Tensor] = {}
        self._is_paid = False

    @property
    def names(self) -> Collection[str]:
        """Of the slots that have a gradient in this step, whether they are used or not."""
        return () if self._is_paid else [slot.name for slot in self._owed]

    def added(self, grads: Gradients, count: float) -> Gradients:
        """Sums of a step, of so many items, and what is owed."""
        if self._is_paid or not self._owed:
            return grads
        tensors, factor = dict(grads.tensors), grads.scale
        factor *= 1.0 if self._items is None else count / self._items
        for slot, owed in self._owed.items():
            grad = tensors.get(slot)
            tensors[slot] = owed * factor if grad is None else grad + owed * factor
        there = {slot: grad for slot, grad in tensors.items() if grad is not None}
        counted = [grad for slot, grad in there.items() if slot in self._counted]
        norms = torch._foreach_norm(counted) if counted else []
        return Gradients(tensors, [*there.values()], norms, grads.scale)

    def pay(self) -> None:
        """An update has been made of what was `added`."""
        self._is_paid = True
        if not self._others:
            self.forget()

    def forget(self) -> None:
        """All replicas that count have paid: it is state no more."""
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
