"""Ranks that have taken over what coding had lost: it is added to the next gradient, once."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence

import torch
from torch import Tensor

from paceline.comm.reduction.gradients import Gradients, Reduction
from paceline.slot import Slot

_NO_LOSS = ("factor", "velocity")


def all_lost(found: Mapping[tuple[str, str], Tensor]) -> dict[str, Tensor]:
    """By the slot's name, the sum of what was lost on all sides; factors and velocities are no loss."""
    sums: dict[str, Tensor] = {}
    for (side, name), value in sorted(found.items(), key=lambda entry: entry[0]):
        if not side.endswith(_NO_LOSS):
            sums[name] = sums[name] + value if name in sums else value
    return sums


class OwedReducer:
    """Sums of a replica that trains alone, and with the first that are applied what it has taken over.

    Args:
        inner: makes the sums.
        tensors: what this rank updates, by slot.
        counted: those of them that it counts in a norm.
        others: other ranks have taken over some of it, too.
    """

    def __init__(
        self,
        inner: Reduction,
        tensors: Mapping[Slot, Tensor],
        counted: Collection[Slot],
        *,
        others: bool = True,
    ) -> None:
        self._inner, self._tensors, self._counted, self._others = inner, tensors, counted, others
        self._owed: dict[Slot, Tensor] = {}
        self._is_paid, self._scale = False, 1.0

    @property
    def by_micro_batch(self) -> bool:
        """See `GradientSink`."""
        return self._inner.by_micro_batch

    @property
    def names(self) -> Collection[str]:
        """Of the slots that have a gradient in this step, whether they are used or not."""
        return () if self._is_paid else [slot.name for slot in self._owed]

    def ran(self, scale: float) -> None:
        """This step's losses were multiplied with `scale` before backward."""
        self._scale = scale

    def begin(self, num_micro_batches: int | None = None) -> None:
        """See `Reduction`."""
        self._inner.begin(num_micro_batches)

    def micro_batch(self, shards: range, is_last: bool) -> None:
        """See `GradientSink`."""
        self._inner.micro_batch(shards, is_last)

    def ready(self, slot: Slot, grad: Tensor | None) -> None:
        """See `GradientSink`."""
        self._inner.ready(slot, grad)

    def close(self) -> None:
        """See `Reduction`."""
        self._inner.close()

    def finish(self) -> Gradients:
        """See `Reduction`."""
        found = self._inner.finish()
        if self._is_paid or not self._owed:
            return found
        tensors = dict(found.tensors)
        for slot, owed in self._owed.items():
            grad = tensors.get(slot)
            tensors[slot] = owed * self._scale if grad is None else grad + owed * self._scale
        there = {slot: grad for slot, grad in tensors.items() if grad is not None}
        counted = [grad for slot, grad in there.items() if slot in self._counted]
        return Gradients(tensors, [*there.values()], torch._foreach_norm(counted) if counted else [])

    def commit(self, used: Collection[str] | None = None) -> None:
        """What was owed has been applied."""
        self._inner.commit()
        self._is_paid = True
        if not self._others:
            self.forget()

    def abort(self) -> None:
        """See `Reduction`; it is owed still."""
        self._inner.abort()

    def forget(self) -> None:
        """All ranks have applied what they owed: it is state no more."""
        self._owed = {}

    def lost(self) -> Sequence[tuple[str, Slot, Tensor]]:
        """What is owed, unscaled; zeros once it is paid, as others may still owe theirs."""
        return [
            ("sent", slot, torch.zeros_like(owed) if self._is_paid else owed)
            for slot, owed in self._owed.items()
        ]

    def rescale(self, factor: float) -> None:
        """What is owed is no multiple of anything."""
        self._inner.rescale(factor)

    def set_lost(self, found: Mapping[tuple[str, str], Tensor]) -> None:
        """Owe the sum of all sides, unscaled."""
        sums = all_lost(found)
        self._is_paid = False
        self._owed = {
            slot: torch.empty_like(p).copy_(sums[slot.name]).detach()
            for slot, p in self._tensors.items()
            if slot.name in sums
        }
