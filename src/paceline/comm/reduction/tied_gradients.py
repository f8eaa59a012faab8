"""Gradients of tensors that several stages hold meet first, then each holder sums over its replicas."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence

import torch
from torch import Tensor

from paceline.comm.net import Net
from paceline.comm.reduction.gradients import GradientReduction, Gradients
from paceline.job.mesh import RankGroup
from paceline.state.slot import TensorSlot


class TiedGradientReduction:
    """Sums over the holders of some slots before another reduction takes them.

    Parts meet once a step, or, where sums have one order, inside each shard, as they do in the backward of a
    process that holds them all. Holders give equal sums to equal reductions, so their copies stay equal.

    Args:
        inner: of these slots alone; alike on every holder.
        tensors: of the slots.
        by_micro_batch: parts come micro-batch by micro-batch; where `inner` does not take them so, they are
            added up first.
        holders: the ranks that hold them, one of every stage that does.
    Wire: for each slot an all_reduce over the holders, or one for every shard of this rank.
    Exactness: that of `inner`; bitwise while two modules use a tensor: then there is one addition.
    """

    def __init__(
        self,
        inner: GradientReduction,
        tensors: Mapping[TensorSlot, Tensor],
        holders: RankGroup,
        net: Net,
        *,
        by_micro_batch: bool = False,
    ) -> None:
        self.inner, self._tensors, self._holders, self._net = inner, tensors, holders, net
        self.by_micro_batch = by_micro_batch or inner.by_micro_batch
        self._place = range(0)
        self._micro_batches: set[range] = set()
        self._held: dict[tuple[TensorSlot, range], Tensor] = {}

    def begin(self, num_micro_batches: int | None = None) -> None:
        """See `GradientReduction`."""
        self._place, self._micro_batches, self._held = range(0), set(), {}
        self.inner.begin(num_micro_batches)

    def micro_batch(self, shards: range, is_last: bool) -> None:
        """See `GradientReduction`."""
        if self.inner.by_micro_batch:
            self._place = shards
            self._micro_batches.add(shards)

    def ready(self, slot: TensorSlot, grad: Tensor | None) -> None:
        """Keep it, or add it to what there is."""
        before = self._held.get((slot, self._place))
        if grad is not None:
            self._held[slot, self._place] = grad if before is None else before.add_(grad)

    def close(self) -> None:
        """Let the parts meet, and hand on their sums."""
        # chunks of a stage announce a micro-batch each; all holders let them meet in one order
        places = sorted(self._micro_batches, key=lambda place: place.start)
        places = places if self.inner.by_micro_batch else [range(0)]
        for place in places:
            if self.inner.by_micro_batch:
                self.inner.micro_batch(place, place == places[-1])
            for slot in reversed([*self._tensors]):
                self.inner.ready(slot, self._met(slot, place))
        self.inner.close()

    def _met(self, slot: TensorSlot, place: range) -> Tensor:
        mine = self._held.get((slot, place))
        value = torch.zeros_like(self._tensors[slot]) if mine is None else mine.clone()
        total: Tensor = self._net.all_reduce(value.detach(), self._holders).wait()
        return total

    def finish(self) -> Gradients:
        """See `GradientReduction`."""
        return self.inner.finish()

    def commit(self, used: Collection[str] | None = None) -> None:
        """See `GradientReduction`."""
        self.inner.commit(used)

    def abort(self) -> None:
        """See `GradientReduction`."""
        self._held = {}
        self.inner.abort()

    def residuals(self) -> Sequence[tuple[str, TensorSlot, Tensor]]:
        """See `GradientReduction`."""
        return self.inner.residuals()

    def set_residuals(self, found: Mapping[tuple[str, str], Tensor]) -> None:
        """See `GradientReduction`."""
        self.inner.set_residuals(found)

    def rescale(self, factor: float) -> None:
        """See `GradientReduction`."""
        self.inner.rescale(factor)
