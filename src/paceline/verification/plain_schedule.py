"""The learning rate as the papers define it, written apart from `paceline.optim.schedule`.

A test holds the two against each other, bit by bit, over every kind of schedule.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import cos, exp, pi, sqrt

from paceline.recipe import ScheduleRecipe


@dataclass(frozen=True)
class PlainSchedule:
    """The rate of every update, as a factor of the base rate.

    Args:
        recipe: the shape.
        steps: updates of the whole run.
        batch_size: samples of one update.
    Source: Goyal et al. 2017, arXiv:1706.02677, section 2 (linear scaling, warm-up from the base rate);
        Krizhevsky 2014, arXiv:1404.5997 (square root); Loshchilov & Hutter 2017, arXiv:1608.03983, eq. 5.
    """

    recipe: ScheduleRecipe
    steps: int
    batch_size: int

    def factor(self, update: int) -> float:
        """What the base rate is multiplied with at `update` = 0, 1, ..."""
        warmup = self.recipe.warmup_steps
        if update >= warmup:
            return self._peak() * self._after_warmup(update - warmup)
        first = self.recipe.warmup_from if self.recipe.base_batch is None else min(1.0, self._peak())
        return first + (self._peak() - first) * update / warmup

    def _peak(self) -> float:
        if self.recipe.base_batch is None:
            return 1.0
        k = self.batch_size / self.recipe.base_batch
        return {"linear": k, "sqrt": sqrt(k)}[self.recipe.batch_scaling]

    def _after_warmup(self, t: int) -> float:
        recipe = self.recipe
        if recipe.decay == "constant":
            return 1.0
        if recipe.decay == "exponential":
            return exp(-recipe.rate * t)
        start, length = 0, max(1, self.steps - recipe.warmup_steps)
        if recipe.cycle_steps is not None:
            start, length = _cycle(t, recipe.cycle_steps, recipe.cycle_factor)
        part = min(1.0, (t - start) / length)
        if recipe.decay == "linear":
            return 1.0 + (recipe.final - 1.0) * part
        return recipe.final + 0.5 * (1.0 - recipe.final) * (1.0 + cos(pi * part))


def _cycle(t: int, first_length: int, factor: int) -> tuple[int, int]:
    """Where the cycle that t lies in starts, and how long it is: T_i = T_0 * T_mult ** i."""
    start, number = 0, 0
    if factor == 1:
        return t - t % first_length, first_length
    while t >= start + first_length * factor**number:
        start += first_length * factor**number
        number += 1
    return start, first_length * factor**number
