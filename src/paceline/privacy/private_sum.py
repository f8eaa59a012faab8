"""The noise of the sums of a run: what is released, from which draws, and the number that divides a sum.

A sum is divided by the number of units that take part on average, never by the number that did: that one
depends on who took part, and so does a quotient by it.

Invariant: all ranks hold the same sum and add the same noise to it, which is noise once.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from paceline.privacy.accountant import NoisyRelease
from paceline.privacy.noise import LARGEST_DEVIATIONS, PrivateDraws
from paceline.privacy.privacy_ledger import PrivacyLedger

FRACTION_BITS = 32
"""Of the grid of sums that no ring has put on one."""


class PrivateSum:
    """The noise of each sum of a run; equal on all ranks.

    Args:
        ledger: of the run.
        draws: of noise, cohorts and batches.
        clip_norm: largest norm of what a unit adds.
        release: the kind of the next release.
        expected: units of a sum on average.
    """

    def __init__(
        self,
        ledger: PrivacyLedger,
        draws: PrivateDraws,
        *,
        clip_norm: float,
        release: NoisyRelease,
        expected: float,
    ) -> None:
        self.ledger, self.draws, self.clip_norm = ledger, draws, clip_norm
        self.release, self.expected = release, expected

    @property
    def hides_units(self) -> bool:
        """Return whether epsilon counts on nobody knowing which units took part."""
        return self.release.sampling != "all"

    @property
    def deviation(self) -> float:
        """Return the standard deviation of the noise of each value of a sum."""
        return self.release.noise * self.clip_norm

    @property
    def largest_noise(self) -> float:
        """Return a bound of the magnitude of the noise of a value."""
        return LARGEST_DEVIATIONS * self.deviation

    def set_cohort(self, size: int, num_units: int) -> None:
        """Set how many units the next sum draws without replacement, of how many."""
        noise, self.expected = self.release.noise, float(size)
        self.release = NoisyRelease(noise, "all")
        if size < num_units:
            self.release = NoisyRelease(noise, "fixed", size=size, num_units=num_units)

    def refuse_next(self, num_left: int) -> str:
        """Return why the next sum would exceed the budget; empty if it does not.

        Args:
            num_left: sums until the end of the run.
        """
        return self.ledger.refuse(self.release, num_left)

    def open_release(self, step: int) -> Callable[[int, int, int], NDArray[np.int64]]:
        """Write down a release, and return the function that draws its noise.

        Returns:
            `draw(part, count, fraction_bits)`: noise of some values in steps of the grid, int64 [count];
            parts of one release have different numbers.
        Raises:
            RecipeError: it would exceed the budget.
        """
        number = self.ledger.charge(self.release, step)

        def draw(part: int, count: int, fraction_bits: int) -> NDArray[np.int64]:
            return self.draws.noise(count, self.deviation, fraction_bits, "noise", number, part)

        return draw

    @torch.no_grad()
    def add_noise(self, values: Sequence[Tensor], step: int, scale: float = 1.0) -> None:
        """Round a sum to the grid, and add the noise of one release to it.

        Args:
            values: the sum, floating point or complex; changed in place.
            step: of the run.
            scale: power of two by which the values were multiplied.
        Exactness: on the grid in float64; rounded once more where the tensors are narrower.
        """
        draw = self.open_release(step)
        for part, total in enumerate(values):
            reals = torch.view_as_real(total) if total.is_complex() else total
            wide = reals.detach().to("cpu", torch.float64).mul(2.0**FRACTION_BITS / scale).round_()
            noise = torch.from_numpy(draw(part, wide.numel(), FRACTION_BITS)).view(wide.shape)
            reals.copy_(wide.add_(noise).mul_(scale * 2.0**-FRACTION_BITS))
