"""Sums of what is multiplied with a number that changes: by the scale of an fp16 loss, and by the size of a
batch, as a mean is a sum of more or of fewer samples.

Invariant: what coding has lost of earlier steps counts in the update of a step as it would have in its own.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence

from torch import Tensor

from paceline.comm.reduction.gradients import Gradients, Reduction
from paceline.slot import Slot


class Rescaled:
    """A reduction whose residuals follow.

    Args:
        inner: makes the sums, and codes them.
        scale: what gradients of the first step are multiplied with; equal on all ranks, as all that follows.
        items: how many items they are a sum of.
        divides: an update is of their mean; or else of their sum, whatever their number.
    Attributes:
        scale, items: of the present step; residuals are multiples of these.
    """

    def __init__(self, inner: Reduction, scale: float, items: float, *, divides: bool) -> None:
        self._inner, self._divides = inner, divides
        self.scale, self.items = scale, items

    def follow(self, scale: float, items: float) -> None:
        """Before a step begins: what its gradients are multiples of. Powers of two change no digit."""
        factor = scale / self.scale * (items / self.items if self._divides else 1.0)
        if factor != 1.0:
            self._inner.rescale(factor)
        self.scale, self.items = scale, items

    def go_on(self, scale: float, items: float | None) -> float:
        """Residuals that come next are multiples of these (None: of as many items as now), as they are."""
        self.scale, self.items = scale, self.items if items is None else items
        return 1.0

    @property
    def by_micro_batch(self) -> bool:
        """See `GradientSink`."""
        return self._inner.by_micro_batch

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
        return self._inner.finish()

    def commit(self, used: Collection[str] | None = None) -> None:
        """See `Reduction`."""
        self._inner.commit(used)

    def abort(self) -> None:
        """See `Reduction`."""
        self._inner.abort()

    def lost(self) -> Sequence[tuple[str, Slot, Tensor]]:
        """See `Reduction`; multiples of `scale`, of so many `items`."""
        return self._inner.lost()

    def set_lost(self, found: Mapping[tuple[str, str], Tensor]) -> None:
        """See `Reduction`; multiples of `scale`, of so many `items`."""
        self._inner.set_lost(found)

    def rescale(self, factor: float) -> None:
        """See `Reduction`."""
        self._inner.rescale(factor)
