"""Sums of what is multiplied with a number that changes, as gradients are by the scale of an fp16 loss.

Invariant: what coding has lost of earlier steps is a multiple of the same number as what it is added to.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence

from torch import Tensor

from paceline.comm.reduction.gradients import Gradients, Reduction
from paceline.slot import Slot

_NO_VALUES = "factor"


class Rescaled:
    """A reduction whose residuals follow the scale.

    Args:
        inner: makes the sums, and codes them.
        now: what gradients of the next step are multiplied with; equal on all ranks. Powers of two change no
            digit.
    """

    def __init__(self, inner: Reduction, now: Callable[[], float]) -> None:
        self._inner, self._now, self._scale = inner, now, now()

    def scale(self) -> float:
        """What residuals are multiples of at present."""
        return self._scale

    @property
    def by_micro_batch(self) -> bool:
        """See `GradientSink`."""
        return self._inner.by_micro_batch

    def begin(self, num_micro_batches: int | None = None) -> None:
        """See `Reduction`."""
        scale = self._now()
        if scale != self._scale:
            factor, self._scale = scale / self._scale, scale
            found = {
                (side, slot.name): value if side.endswith(_NO_VALUES) else value.mul_(factor)
                for side, slot, value in self._inner.lost()
            }
            if found:
                self._inner.set_lost(found)
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
        """See `Reduction`; multiples of `scale`."""
        return self._inner.lost()

    def set_lost(self, found: Mapping[tuple[str, str], Tensor]) -> None:
        """See `Reduction`; multiples of `scale`."""
        self._inner.set_lost(found)
