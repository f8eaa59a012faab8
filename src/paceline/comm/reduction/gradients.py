"""Gradients by slot, the protocols of their reduction, and its two simplest forms: combined, and in one
process.
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
    """The summed gradients of one step.

    Args:
        tensors: by the part that this rank updates, in its shape and strides; None if no rank has a gradient.
        flats: the storage that `tensors` are views of: scaling these covers everything.
        norms: Euclidean norms, 0-d, that together are this rank's share of the norm of the whole: every value
            of the whole gradient is in the norms of one rank of a replica.
        scale: factor of the loss, and so of the sums.
        coded: those of `norms` that are of encoded sums, each with its storage. There ranks may have sent
            zeros and quantisation errors of tensors that no rank used.
    """

    tensors: Mapping[TensorSlot, Tensor | None]
    flats: Sequence[Tensor]
    norms: Sequence[Tensor]
    scale: float = 1.0
    coded: Sequence[tuple[Tensor, Tensor]] = ()

    def agreed(self, used: Collection[str], scale: float) -> Gradients:
        """Return them with their scale, and without those that no rank used (their storage holds zeros
        then).
        """
        tensors = self.tensors
        unused = [slot for slot in tensors if slot.name not in used]
        if unused:
            self._clear([g for slot in unused if (g := tensors[slot]) is not None])
            tensors = {slot: g if slot.name in used else None for slot, g in tensors.items()}
        return Gradients(tensors, self.flats, self.norms, scale)

    def _clear(self, unused: list[Tensor]) -> None:
        """Zero gradients that only carry quantisation errors, and correct the norms."""
        # Without a codec the storage of unused slots holds zeros already.
        if self.coded and unused:
            torch._foreach_zero_(unused)
            for norm, flat in self.coded:
                norm.copy_(torch.linalg.vector_norm(flat))


class GradientSink(Protocol):
    """The receiver of gradients during backward: it takes each gradient as soon as it is complete on this
    rank.
    """

    @property
    def by_micro_batch(self) -> bool:
        """True if it takes the gradients of each micro-batch apart; if not, their sum over those of this
        rank.
        """

    def micro_batch(self, shards: range, is_last: bool) -> None:
        """Start a micro-batch, if `by_micro_batch`: gradients from here on are sums over these shards, the
        last or not.
        """

    def ready(self, slot: TensorSlot, grad: Tensor | None) -> None:
        """Take the gradient of a slot, which is complete here; may launch communication."""


class GradientReduction(GradientSink, Protocol):
    """A gradient sink that a sync rule finishes after backward."""

    def begin(self, num_micro_batches: int | None = None) -> None:
        """Open a step: no gradient is ready.

        Args:
            num_micro_batches: how many this rank will run; either all ranks know it or none. None: unknown.
        """

    def close(self) -> None:
        """Launch everything that is not in flight yet: all micro-batches of this rank have run.

        Communication after it comes in the same order on every rank, also on one without a micro-batch.
        """

    def finish(self) -> Gradients:
        """Wait for the sums."""

    def commit(self, used: Collection[str] | None = None) -> None:
        """Keep the state of the step, which has been applied and cannot be aborted any more.

        Args:
            used: names of the slots that were applied; None: all. Sums of others were dropped: their
                quantisation errors stay as they were.
        """

    def abort(self) -> None:
        """Drop a step that is not committed; everything is as it was before `begin`."""

    def residuals(self) -> Sequence[tuple[str, TensorSlot, Tensor]]:
        """Return the quantisation errors: (side, slot, values in its shape)."""

    def set_residuals(self, residuals: Mapping[tuple[str, str], Tensor]) -> None:
        """Continue from these errors, by (side, name of the slot); missing ones are zero."""

    def rescale(self, factor: float) -> None:
        """Multiply the errors in place: gradients are multiples of something else from here on."""


class CombinedReduction:
    """Several reductions as one: slots that are summed over different ranks.

    Args:
        by_slot: the reduction of each slot.
        all_of_them: in the order in which they finish, equal on every rank.
    """

    def __init__(
        self, by_slot: Mapping[TensorSlot, GradientReduction], all_of_them: Sequence[GradientReduction]
    ) -> None:
        self._by_slot, self._all = by_slot, all_of_them
        self.by_micro_batch = all_of_them[0].by_micro_batch

    def begin(self, num_micro_batches: int | None = None) -> None:
        for reduction in self._all:
            reduction.begin(num_micro_batches)

    def micro_batch(self, shards: range, is_last: bool) -> None:
        for reduction in self._all:
            reduction.micro_batch(shards, is_last)

    def ready(self, slot: TensorSlot, grad: Tensor | None) -> None:
        self._by_slot[slot].ready(slot, grad)

    def close(self) -> None:
        for reduction in self._all:
            reduction.close()

    def finish(self) -> Gradients:
        summed = [reduction.finish() for reduction in self._all]
        tensors = {slot: g for reduction in summed for slot, g in reduction.tensors.items()}
        flats, norms = (
            [x for reduction in summed for x in reduction.flats],
            [x for reduction in summed for x in reduction.norms],
        )
        return Gradients(
            tensors, flats, norms, coded=[pair for reduction in summed for pair in reduction.coded]
        )

    def commit(self, used: Collection[str] | None = None) -> None:
        for reduction in self._all:
            reduction.commit(used)

    def abort(self) -> None:
        for reduction in self._all:
            reduction.abort()

    def residuals(self) -> Sequence[tuple[str, TensorSlot, Tensor]]:
        return [residual for reduction in self._all for residual in reduction.residuals()]

    def set_residuals(self, residuals: Mapping[tuple[str, str], Tensor]) -> None:
        for reduction in self._all:
            reduction.set_residuals(residuals)

    def rescale(self, factor: float) -> None:
        for reduction in self._all:
            reduction.rescale(factor)


class LocalReducer:
    """The reduction of a group of one: the gradients are the sums, and nothing is copied.

    Args:
        counts: see `BucketReducer`.
    """

    by_micro_batch = False

    def __init__(self, tensors: Mapping[TensorSlot, Tensor], counts: bool = True) -> None:
        self._grads: dict[TensorSlot, Tensor | None] = dict.fromkeys(tensors)
        self._counts = counts

    def begin(self, num_micro_batches: int | None = None) -> None:
        """Drop the references of the last step."""
        self._grads = dict.fromkeys(self._grads)

    def micro_batch(self, shards: range, is_last: bool) -> None:
        """Do nothing; it is not called, as `by_micro_batch` is false."""

    def ready(self, slot: TensorSlot, grad: Tensor | None) -> None:
        """Keep a reference."""
        self._grads[slot] = grad

    def close(self) -> None:
        """Do nothing: there is no communication."""

    def finish(self) -> Gradients:
        """Return the gradients, with the norm of each."""
        flats = [grad for grad in self._grads.values() if grad is not None]
        return Gradients(self._grads, flats, torch._foreach_norm(flats) if flats and self._counts else [])

    def commit(self, used: Collection[str] | None = None) -> None:
        """Do nothing: no state is kept between steps."""

    def abort(self) -> None:
        """Drop the references."""
        self.begin()

    def residuals(self) -> Sequence[tuple[str, TensorSlot, Tensor]]:
        """Return none: nothing is encoded."""
        return ()

    def set_residuals(self, residuals: Mapping[tuple[str, str], Tensor]) -> None:
        """Do nothing: nothing is encoded."""

    def rescale(self, factor: float) -> None:
        """Do nothing: nothing is encoded."""
