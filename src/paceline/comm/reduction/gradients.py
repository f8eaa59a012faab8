"""Gradients by slot: as a layout hands them on, and as they come out of a reduction.

Several reductions as one.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from paceline.state.slot import TensorSlot


@dataclass(frozen=True)
class Gradients:
    """Summed gradients of one step.

    Args:
        tensors: by the part that this rank updates, in its shape and strides; None where nobody has one.
        flats: the storage that `tensors` are views of: a scale over these covers everything.
        norms: Euclidean norms, 0-d, that together are this rank's share of the norm of the whole: every
            value of the whole gradient is in the norms of one rank of a replica.
        scale: what the sums were multiplied with before backward.
        coded: those of `norms` that are of sums which coding made, each with the storage that it is of. There
            ranks may have sent, beside zeros, what coding had lost of tensors that nobody used.
    """

    tensors: Mapping[TensorSlot, Tensor | None]
    flats: Sequence[Tensor]
    norms: Sequence[Tensor]
    scale: float = 1.0
    coded: Sequence[tuple[Tensor, Tensor]] = ()

    def agreed(self, used: Collection[str], scale: float) -> Gradients:
        """Without those that no rank used (their storage holds zeros then), and with their scale."""
        kept = self.tensors
        unused = [slot for slot in kept if slot.name not in used]
        if unused:
            self._clear([g for slot in unused if (g := kept[slot]) is not None])
            kept = {slot: g if slot.name in used else None for slot, g in kept.items()}
        return Gradients(kept, self.flats, self.norms, scale)

    def _clear(self, unused: list[Tensor]) -> None:
        """Take out what coding has filled in."""
        if self.coded and unused:
            torch._foreach_zero_(unused)
            for norm, flat in self.coded:
                norm.copy_(torch.linalg.vector_norm(flat))


class GradientSink(Protocol):
    """What a layout feeds during backward: it takes each gradient as soon as it is complete on this rank."""

    @property
    def by_micro_batch(self) -> bool:
        """Whether it takes each micro-batch's gradients apart; if not, their sum over those of this rank."""

    def micro_batch(self, shards: range, is_last: bool) -> None:
        """By micro-batch only: what is ready from here on is the sum over these shards, the last or not."""

    def ready(self, slot: TensorSlot, grad: Tensor | None) -> None:
        """The gradient of what this rank computes with is complete here; may launch communication."""


class GradientReduction(GradientSink, Protocol):
    """What a rule empties after backward."""

    def begin(self, num_micro_batches: int | None = None) -> None:
        """Open a step: nothing is ready.

        Args:
            num_micro_batches: how many this rank will run, the same kind of answer on every rank; None: it
                is not known beforehand.
        """

    def close(self) -> None:
        """All micro-batches of this rank have run: launch what is not on its way yet.

        Whatever is communicated after it comes in the same order on every rank, also on one without a
        micro-batch.
        """

    def finish(self) -> Gradients:
        """Wait for the sums."""

    def commit(self, used: Collection[str] | None = None) -> None:
        """The sums have been applied: the step cannot be aborted any more.

        Args:
            used: names of what was applied; None: all. Sums of others were dropped: what coding had lost of
                these is lost still.
        """

    def abort(self) -> None:
        """Drop a step that is not committed: afterwards all is as it was before `begin`."""

    def residuals(self) -> Sequence[tuple[str, TensorSlot, Tensor]]:
        """What coding has lost: (which side's, slot, values in its shape)."""

    def set_residuals(self, found: Mapping[tuple[str, str], Tensor]) -> None:
        """Go on from these, by (side, name of the slot); what is missing is zero."""

    def rescale(self, factor: float) -> None:
        """Gradients are multiples of something else from here on: so is what coding has lost, in place."""


class CombinedReduction:
    """Several reductions as one: slots that are summed over different ranks.

    Args:
        by_slot: which one takes which slot.
        all_of_them: in the order in which they finish, equal on every rank.
    """

    def __init__(
        self, by_slot: Mapping[TensorSlot, GradientReduction], all_of_them: Sequence[GradientReduction]
    ) -> None:
        self._by_slot, self._all = by_slot, all_of_them
        self.by_micro_batch = all_of_them[0].by_micro_batch

    def begin(self, num_micro_batches: int | None = None) -> None:
        """See `GradientReduction`."""
        for one in self._all:
            one.begin(num_micro_batches)

    def micro_batch(self, shards: range, is_last: bool) -> None:
        """See `GradientReduction`."""
        for one in self._all:
            one.micro_batch(shards, is_last)

    def ready(self, slot: TensorSlot, grad: Tensor | None) -> None:
        """See `GradientReduction`."""
        self._by_slot[slot].ready(slot, grad)

    def close(self) -> None:
        """See `GradientReduction`."""
        for one in self._all:
            one.close()

    def finish(self) -> Gradients:
        """See `GradientReduction`."""
        found = [one.finish() for one in self._all]
        tensors = {slot: g for one in found for slot, g in one.tensors.items()}
        flats, norms = [x for one in found for x in one.flats], [x for one in found for x in one.norms]
        return Gradients(tensors, flats, norms, coded=[pair for one in found for pair in one.coded])

    def commit(self, used: Collection[str] | None = None) -> None:
        """See `GradientReduction`."""
        for one in self._all:
            one.commit(used)

    def abort(self) -> None:
        """See `GradientReduction`."""
        for one in self._all:
            one.abort()

    def residuals(self) -> Sequence[tuple[str, TensorSlot, Tensor]]:
        """See `GradientReduction`."""
        return [found for one in self._all for found in one.residuals()]

    def set_residuals(self, found: Mapping[tuple[str, str], Tensor]) -> None:
        """See `GradientReduction`."""
        for one in self._all:
            one.set_residuals(found)

    def rescale(self, factor: float) -> None:
        """See `GradientReduction`."""
        for one in self._all:
            one.rescale(factor)


class LocalReducer:
    """A group of one: the gradients are the sums, and nothing is copied.

    Args:
        counts: see `BucketReducer`.
    """

    by_micro_batch = False

    def __init__(self, tensors: Mapping[TensorSlot, Tensor], counts: bool = True) -> None:
        self._grads: dict[TensorSlot, Tensor | None] = dict.fromkeys(tensors)
        self._counts = counts

    def begin(self, num_micro_batches: int | None = None) -> None:
        """Forget the last step."""
        self._grads = dict.fromkeys(self._grads)

    def micro_batch(self, shards: range, is_last: bool) -> None:
        """Not called, as `by_micro_batch` is false."""

    def ready(self, slot: TensorSlot, grad: Tensor | None) -> None:
        """Keep a reference."""
        self._grads[slot] = grad

    def close(self) -> None:
        """Nothing was launched."""

    def finish(self) -> Gradients:
        """Return what there is."""
        flats = [grad for grad in self._grads.values() if grad is not None]
        return Gradients(self._grads, flats, torch._foreach_norm(flats) if flats and self._counts else [])

    def commit(self, used: Collection[str] | None = None) -> None:
        """Nothing is kept between steps."""

    def abort(self) -> None:
        """Drop the references."""
        self.begin()

    def residuals(self) -> Sequence[tuple[str, TensorSlot, Tensor]]:
        """Nothing is coded."""
        return ()

    def set_residuals(self, found: Mapping[tuple[str, str], Tensor]) -> None:
        """Does nothing: there is no codec."""

    def rescale(self, factor: float) -> None:
        """Nothing is coded."""
