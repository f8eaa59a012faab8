"""Quantisation errors of earlier steps after gradients stop being encoded, or change their unit.

A pending residual is added to a later gradient, once. Gradients are multiples of the scale of an fp16 loss,
and, as a mean is a sum of more or fewer samples, of the size of a batch; a unit keeps the errors in
proportion.
Invariant: errors of earlier steps count in the update of a step as they would have in their own.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence

import torch
from torch import Tensor

from paceline.comm.reduction.gradients import Gradients
from paceline.state.slot import TensorSlot

_NOT_RESIDUALS = ("factor", "velocity")


def sum_residuals(residuals: Mapping[tuple[str, str], Tensor]) -> dict[str, Tensor]:
    """Return the sum over all sides by name of the slot; factors and velocities are no errors."""
    sums: dict[str, Tensor] = {}
    for (side, name), value in sorted(residuals.items(), key=lambda entry: entry[0]):
        if not side.endswith(_NOT_RESIDUALS):
            sums[name] = sums[name] + value if name in sums else value
    return sums


class PendingResidual:
    """The errors of all ranks, held by every replica that trains alone.

    Each adds all of them, as its part of the mean over all, to the first of its gradients that is applied.
    Whatever the weights are, the mean of the updates then contains them once. A replica that has not applied
    them when the first mean arrives from replicas that have, need not.

    Args:
        tensors: the tensors that this rank updates, by slot.
        counted: those of them that it counts in a norm.
        items: number of items of which the residual is a sum, if updates are of means; None: of sums.
        others: other replicas have the residual, too.
    """

    def __init__(
        self,
        tensors: Mapping[TensorSlot, Tensor],
        counted: Collection[TensorSlot],
        items: float | None,
        *,
        others: bool = True,
    ) -> None:
        self._tensors, self._counted, self._items, self._has_others = tensors, counted, items, others
        self._pending: dict[TensorSlot, Tensor] = {}
        self._applied_here, self._in_mean = set[TensorSlot](), set[TensorSlot]()

    @property
    def names(self) -> Collection[str]:
        """Names of the slots that have a gradient in this step, whether they are used or not."""
        return [slot.name for slot in self._due]

    @property
    def _due(self) -> list[TensorSlot]:
        return [slot for slot in self._pending if slot not in self._applied_here]

    def add_to(self, grads: Gradients, count: float) -> Gradients:
        """Return sums of a step over `count` items with the pending residual."""
        if not self._due:
            return grads
        tensors, factor = dict(grads.tensors), grads.scale
        # The residual is unscaled; gradients are sums of `count` items, times the scale of the loss.
        factor *= 1.0 if self._items is None else count / self._items
        for slot in self._due:
            grad, residual = tensors.get(slot), self._pending[slot] * factor
            tensors[slot] = residual if grad is None else grad + residual
        present = {slot: grad for slot, grad in tensors.items() if grad is not None}
        counted = [grad for slot, grad in present.items() if slot in self._counted]
        norms = torch._foreach_norm(counted) if counted else []
        return Gradients(tensors, [*present.values()], norms, grads.scale)

    def mark_applied(self) -> None:
        """Record that an update was made of gradients from `add_to`."""
        if not self._has_others:
            self._pending = {}
        self._applied_here.update(self._pending)

    def settle_mean(self, slots: Collection[TensorSlot], *, is_applied: bool, mixing: float = 0.0) -> None:
        """Update the residual after a mean over the replicas has arrived for these slots.

        Args:
            is_applied: the mean is of replicas that have made an update; else none had when they sent.
            mixing: the share of this replica's own values that stays beside the mean.
        """
        for slot in {*slots} & {*self._pending}:
            if is_applied:
                self._in_mean.add(slot)
            applied_here, in_mean = (
                slot in self._applied_here,
                slot in self._in_mean,
            )  # whether this replica has it, and all
            # The mean replaces a share of 1 - mixing of this replica's values, and with it that share of the
            # residual.
            left = 1.0 - mixing * applied_here - (1.0 - mixing) * in_mean
            self._applied_here.discard(slot)
            if left:
                self._pending[slot] = self._pending[slot] * left
            else:
                del self._pending[slot]

    def residuals(self) -> Sequence[tuple[str, TensorSlot, Tensor]]:
        """Return the residual, unscaled; equal on all replicas after they have exchanged a mean."""
        return [("sent", slot, residual) for slot, residual in self._pending.items()]

    def set_residuals(self, residuals: Mapping[tuple[str, str], Tensor]) -> None:
        """Replace the residual by the sum of all sides, unscaled."""
        sums = sum_residuals(residuals)
        self._applied_here, self._in_mean = set(), set()
        self._pending = {
            # `empty_like` keeps the strides of the parameter, so that sums with gradients need no copy.
            slot: torch.empty_like(p).copy_(sums[slot.name]).detach()
            for slot, p in self._tensors.items()
            if slot.name in sums
        }


class GradientUnit:
    """The unit of the gradients of the present step; quantisation errors follow it.

    Args:
        rescale: multiplies the errors; see `GradientReduction`.
        scale: factor of the gradients of the first step; equal on all ranks, as everything below.
        items: number of items of which they are a sum.
        divides: an update is of their mean; else of their sum, whatever their number.
    """

    def __init__(
        self, rescale: Callable[[float], None], scale: float, items: float, *, divides: bool
    ) -> None:
        self._rescale, self._divides = rescale, divides
        self.scale, self.items = scale, items

    def follow(self, scale: float, items: float) -> None:
        """Set the unit of the next step, and rescale the errors. Powers of two change no digit."""
        factor = scale / self.scale * (items / self.items if self._divides else 1.0)
        if factor != 1.0:
            self._rescale(factor)
        self.scale, self.items = scale, items

    def resume(self, scale: float, items: float | None) -> float:
        """Set the unit of errors that will be loaded, as they are (None: of as many items as now); return
        their factor.
        """
        self.scale, self.items = scale, self.items if items is None else items
        return 1.0
