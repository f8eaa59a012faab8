"""The reduction of tensors that several pipeline stages hold: gradients are summed over the holders first."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence

import torch
from torch import Tensor

from paceline.comm.net import Net
from paceline.comm.reduction.gradients import GradientReduction, Gradients
from paceline.job.mesh import RankGroup
from paceline.state.slot import TensorSlot


class TiedGradientReduction:
    """A reduction that sums over the holders of some slots before another reduction takes them.

    Holders sum once a step, or, where sums have one order, inside each shard, as the backward of a process
    that holds all stages would. Holders give equal sums to equal reductions, so their copies stay equal.

    Args:
        inner: reduction of these slots alone; the same on every holder.
        tensors: tensors of the slots.
        by_micro_batch: gradients come micro-batch by micro-batch; if `inner` does not take them so, they are
            added first.
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
        self._shards = range(0)
        self._micro_batches: set[range] = set()
        self._held: dict[tuple[TensorSlot, range], Tensor] = {}

    def begin(self, num_micro_batches: int | None = None) -> None:
        self._shards, self._micro_batches, self._held = range(0), set(), {}
        self.inner.begin(num_micro_batches)

    def micro_batch(self, shards: range, is_last: bool) -> None:
        if self.inner.by_micro_batch:
            self._shards = shards
            self._micro_batches.add(shards)

    def ready(self, slot: TensorSlot, grad: Tensor | None) -> None:
        """Keep a gradient, or add it to the one that is kept."""
        before = self._held.get((slot, self._shards))
        if grad is not None:
            self._held[slot, self._shards] = grad if before is None else before.add_(grad)

    def close(self) -> None:
        """Sum over the holders, and pass the sums on."""
        # Chunks of a stage announce a micro-batch each; all holders have to sum them in one order.
        shard_ranges = sorted(self._micro_batches, key=lambda shards: shards.start)
        shard_ranges = shard_ranges if self.inner.by_micro_batch else [range(0)]
        for shards in shard_ranges:
            if self.inner.by_micro_batch:
                self.inner.micro_batch(shards, shards == shard_ranges[-1])
            # The order of backward, in which the inner reduction fills its buckets.
            for slot in reversed([*self._tensors]):
                self.inner.ready(slot, self._sum_over_holders(slot, shards))
        self.inner.close()

    def _sum_over_holders(self, slot: TensorSlot, shards: range) -> Tensor:
        local = self._held.get((slot, shards))
        # A holder without a gradient takes part with zeros: the others wait for it.
        value = torch.zeros_like(self._tensors[slot]) if local is None else local.clone()
        total: Tensor = self._net.all_reduce(value.detach(), self._holders).wait()
        return total

    def finish(self) -> Gradients:
        return self.inner.finish()

    def commit(self, used: Collection[str] | None = None) -> None:
        self.inner.commit(used)

    def abort(self) -> None:
        self._held = {}
        self.inner.abort()

    def residuals(self) -> Sequence[tuple[str, TensorSlot, Tensor]]:
        return self.inner.residuals()

    def set_residuals(self, residuals: Mapping[tuple[str, str], Tensor]) -> None:
        self.inner.set_residuals(residuals)

    def rescale(self, factor: float) -> None:
        self.inner.rescale(factor)
