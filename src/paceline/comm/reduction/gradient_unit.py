"""What gradients are multiples of: the scale of an fp16 loss, and the size of a batch, as a mean is a sum of
more or of fewer samples.

Invariant: what coding has lost of earlier steps counts in the update of a step as it would have in its own.
"""

from __future__ import annotations

from collections.abc import Callable


class GradientUnit:
    """Of the present step; what coding has lost follows.

    Args:
        rescale: multiplies what coding has lost; see `Reduction`.
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

    def go_on(self, scale: float, items: float | None) -> float:
        """What was lost, and comes next, is a multiple of these (None: of as many items as now), as it is."""
        self.scale, self.items = scale, self.items if items is None else items
        return 1.0
