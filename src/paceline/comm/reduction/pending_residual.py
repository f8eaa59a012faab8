"""What coding had lost, where nobody codes gradients any more: it is added to the next one, once.

What gradients are multiples of: the scale of an fp16 loss, and the size of a batch, as a mean is a sum of
more or of fewer samples.

Invariant: what coding has lost of earlier steps counts in the update of a step as it would have in its own.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence

import torch
from torch import Tensor

from paceline.comm.reduction.gradients import Gradients
from paceline.state.slot import TensorSlot

_NOT_RESIDUALS = ("factor", "velocity")


def sum_residuals(found: Mapping[tuple[str, str], Tensor]) -> dict[str, Tensor]:
    """By the slot's name, the sum of what was lost on all sides; factors and velocities are no loss."""
    sums: dict[str, Tensor] = {}
    for (side, name), value in sorted(found.items(), key=lambda entry: entry[0]):
        if not side.endswith(_NOT_RESIDUALS):
            sums[name] = sums[name] + value if name in sums else value
    return sums


class PendingResidual:
    """What all ranks had lost, as every replica has it that trains alone.

    Each adds all of it, as its part of the mean of all, to the first of its gradients that is applied. So the
    mean of how they move, whatever the weights are, has moved by it once. Who has not paid when the first
    mean comes of replicas that have, has not to.

    Args:
        tensors: what this rank updates, by slot.
        counted: those of them that it counts in a norm.
        items: of how many items it is a sum, beside others, where updates are of means; None: of sums.
        others: other replicas have taken it over, too.
    """

    def __init__(
        self,
        tensors: Mapping[TensorSlot, Tensor],
        counted: Collection[TensorSlot],
        items: float | None,
        *,
        others: bool = True,
    ) -> None:
        self._tensors, self._counted, self._items, self._others = tensors, counted, items, others
        self._owed: dict[TensorSlot, Tensor] = {}
        self._applied_here, self._in_mean = set[TensorSlot](), set[TensorSlot]()

    @property
    def names(self) -> Collection[str]:
        """Of the slots that have a gradient in this step, whether they are used or not."""
        return [slot.name for slot in self._due]

    @property
    def _due(self) -> list[TensorSlot]:
        return [slot for slot in self._owed if slot not in self._applied_here]

    def add_to(self, grads: Gradients, count: float) -> Gradients:
        """Sums of a step, of so many items, and what is owed."""
        if not self._due:
            return grads
        tensors, factor = dict(grads.tensors), grads.scale
        factor *= 1.0 if self._items is None else count / self._items
        for slot in self._due:
            grad, owed = tensors.get(slot), self._owed[slot] * factor
            tensors[slot] = owed if grad is None else grad + owed
        there = {slot: grad for slot, grad in tensors.items() if grad is not None}
        counted = [grad for slot, grad in there.items() if slot in self._counted]
        norms = torch._foreach_norm(counted) if counted else []
        return Gradients(tensors, [*there.values()], norms, grads.scale)

    def mark_applied(self) -> None:
        """An update has been made of what was `add_to`."""
        if not self._others:
            self._owed = {}
        self._applied_here.update(self._owed)

    def settle_mean(self, slots: Collection[TensorSlot], *, is_applied: bool, mixing: float = 0.0) -> None:
        """A mean of how these have moved has come.

        Args:
            is_applied: it is of replicas that have made an update; else nobody had when it left.
            mixing: the share of what this replica has that stays, beside the mean.
        """
        for slot in {*slots} & {*self._owed}:
            if is_applied:
                self._in_mean.add(slot)
            here, there = (
                slot in self._applied_here,
                slot in self._in_mean,
            )  # whether this replica has it, and all
            left = 1.0 - mixing * here - (1.0 - mixing) * there
            self._applied_here.discard(slot)
            if left:
                self._owed[slot] = self._owed[slot] * left
            else:
                del self._owed[slot]

    def residuals(self) -> Sequence[tuple[str, TensorSlot, Tensor]]:
        """What is owed, unscaled; alike on all replicas where they have met."""
        return [("sent", slot, owed) for slot, owed in self._owed.items()]

    def set_residuals(self, found: Mapping[tuple[str, str], Tensor]) -> None:
        """Owe the sum of all sides, unscaled."""
        sums = sum_residuals(found)
        self._applied_here, self._in_mean = set(), set()
        self._owed = {
            slot: torch.empty_like(p).copy_(sums[slot.name]).detach()
            for slot, p in self._tensors.items()
            if slot.name in sums
        }


class GradientUnit:
    """Of the present step; what coding has lost follows.

    Args:
        rescale: multiplies what coding has lost; see `GradientReduction`.
        scale: what gradients of the first step are multiplied with; equal on all ranks, as all that follows.
        items: how many items they are a sum of.
        divides: an update is of their mean; or else of their sum, whatever their number.
    """

    def __init__(
        self, rescale: Callable[[float], None], scale: float, items: float, *, divides: bool
    ) -> None:
        self._rescale, self._divides = rescale, divides
        self.scale, self.items = scale, items

    def follow(self, scale: float, items: float) -> None:
        """Before a step begins: what its gradients are multiples of. Powers of two change no digit."""
        factor = scale / self.scale * (items / self.items if self._divides else 1.0)
        if factor != 1.0:
            self._rescale(factor)
        self.scale, self.items = scale, items

    def resume(self, scale: float, items: float | None) -> float:
        """What was lost, and comes next, is a multiple of these (None: of as many items as now), as it is."""
        self.scale, self.items = scale, self.items if items is None else items
        return 1.0
