"""Learning-rate schedules: pure functions of the update index.

Invariant: `factor(t)` depends on its arguments only, so a resumed run, any rank and the oracle get the
same rate at the same update, and seeking costs nothing. An update is one optimizer step: micro-batches
and shards do not count.

The factor multiplies the base rate of every parameter group:

    factor(t) = warm-up from `start` to `peak`               for t < warmup_steps
    factor(t) = peak * decay(t - warmup_steps)               after it

where `peak` is 1, or what batch scaling makes of it. A decay that ends with the run (cosine, linear,
one_cycle) holds its final value past the end; one without an end (constant, exponential, restarts) continues.
Under "plateau" the factor is constant here, and evaluations multiply it (`reduce_on_plateau`).
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch

from paceline.recipe.schedule_recipe import ScheduleRecipe

DecayFunction = Callable[[int], float]
_LARGEST_EXPONENT = 709.0  # of e in float64


@dataclass(frozen=True)
class LearningRateSchedule:
    """The rate of every update, as a factor of the base rate.

    Args:
        warmup_steps: number of updates of the linear warm-up.
        start: factor of update 0 if there is a warm-up.
        peak: factor at the end of the warm-up; 1 without batch scaling.
        decay: `decay(t)` for t = 0, 1, ... updates after the warm-up; `decay(0)` is 1, except that one_cycle
            begins with a rise of its own.
    """

    warmup_steps: int
    start: float
    peak: float
    decay: DecayFunction

    def factor(self, update: int) -> float:
        """Return the factor of the base rate at `update` = 0, 1, ...; exact in float64."""
        if update < self.warmup_steps:
            return self.start + (self.peak - self.start) * update / self.warmup_steps
        return self.peak * self.decay(update - self.warmup_steps)

    def apply(self, optimizer: torch.optim.Optimizer, update: int) -> float:
        """Set the rate of every group to its base rate times `factor(update)`; return the factor.

        The base rate of a group is its `initial_lr`, which is its `lr` when this is first called, and
        which the optimizer's state keeps.
        """
        factor = self.factor(update)
        for group in optimizer.param_groups:
            group["lr"] = group.setdefault("initial_lr", group["lr"]) * factor
        return factor


def build_schedule(recipe: ScheduleRecipe, steps: int, batch_size: int) -> LearningRateSchedule:
    """Build the schedule of a run of `steps` updates with a global batch of `batch_size` samples.

    Call it again when the batch size changes (an elastic resize): the scaling rule is then re-applied.

    With batch scaling the warm-up starts at the base rate (the recipe refuses `warmup_from` then).
    """
    peak = batch_scale(recipe, batch_size)
    return LearningRateSchedule(
        warmup_steps=recipe.warmup_steps,
        start=recipe.warmup_from if recipe.batch_scaling == "none" else min(1.0, peak),
        peak=peak,
        decay=_build_decay(recipe, max(steps - recipe.warmup_steps, 1)),
    )


def batch_scale(recipe: ScheduleRecipe, batch_size: int) -> float:
    """Return the factor by which the rate grows with the batch: k, sqrt(k) or 1, for k = size / base size.

    The base rate belongs to `base_batch` samples. With a fixed batch per worker, k is the number of workers.

    Source: Goyal et al. 2017, Accurate, Large Minibatch SGD, arXiv:1706.02677 (linear, with warm-up
        from the base rate); Krizhevsky 2014, arXiv:1404.5997, and Malladi et al. 2022,
        arXiv:2205.10287 (square root, for Adam).
    """
    if recipe.base_batch is None:  # the recipe sets both or neither
        return 1.0
    ratio = batch_size / recipe.base_batch
    return math.sqrt(ratio) if recipe.batch_scaling == "sqrt" else ratio


def cosine(update: int, steps: int, final: float) -> float:
    """Anneal from 1 at update 0 to `final` at `steps`, and hold it.

    Source: Loshchilov & Hutter 2017, SGDR, arXiv:1608.03983, equation 5.
    """
    progress = min(update / steps, 1.0)
    return final + (1.0 - final) * 0.5 * (1.0 + math.cos(math.pi * progress))


def linear(update: int, steps: int, final: float) -> float:
    """Fall linearly from 1 at update 0 to `final` at `steps`, and hold it."""
    return 1.0 + (final - 1.0) * min(update / steps, 1.0)


def exponential(update: int, rate: float) -> float:
    """Decay as e^(-rate * update), without an end; `rate = -ln(d)` multiplies by d at every update.

    With a negative rate it rises, up to the largest number, as a search for a learning rate has it.
    """
    return math.exp(min(-rate * update, _LARGEST_EXPONENT))


def warm_restarts(update: int, cycle_steps: int, cycle_factor: int, final: float) -> float:
    """Anneal by cosine within cycles of cycle_steps * cycle_factor^i updates, for ever.

    Source: Loshchilov & Hutter 2017, SGDR, arXiv:1608.03983, section 3 (T_0, T_mult).
    """
    # With a factor of 1 the remainder below is enough, and this loop would be long.
    while update >= cycle_steps and cycle_factor > 1:
        update, cycle_steps = update - cycle_steps, cycle_steps * cycle_factor
    return cosine(update % cycle_steps, cycle_steps, final)


def one_cycle(update: int, steps: int, recipe: ScheduleRecipe) -> float:
    """Rise from 1 / div_factor to 1 in the first part of the run, and fall below the first rate in the rest.

    The last update, `steps - 1`, has the lowest rate, 1 / (div_factor * final_div_factor), and so have those
    past the end. Momentum is not cycled.

    Source: Smith & Topin 2017, Super-Convergence, arXiv:1708.07120; `OneCycleLR` of PyTorch with
        cycle_momentum=False, which tests/unit/optim/test_lr_schedule.py compares.
    """
    first = 1.0 / recipe.div_factor
    last, top = steps - 1, max(recipe.pct_start * steps - 1, 0.0)
    if update < top:
        return _anneal(first, 1.0, update / top, recipe.anneal_strategy)
    if last <= top:
        return 1.0
    progress = (min(update, last) - top) / (last - top)
    return _anneal(1.0, first / recipe.final_div_factor, progress, recipe.anneal_strategy)


def _anneal(start: float, end: float, progress: float, strategy: str) -> float:
    if strategy == "linear":
        return start + (end - start) * progress
    return end + (start - end) / 2.0 * (1.0 + math.cos(math.pi * progress))


def _build_decay(recipe: ScheduleRecipe, steps: int) -> DecayFunction:
    if recipe.cycle_steps is not None:
        cycle_steps = recipe.cycle_steps
        return lambda t: warm_restarts(t, cycle_steps, recipe.cycle_factor, recipe.final)
    decays: dict[str, DecayFunction] = {
        "constant": lambda t: 1.0,
        "cosine": lambda t: cosine(t, steps, recipe.final),
        "linear": lambda t: linear(t, steps, recipe.final),
        "exponential": lambda t: exponential(t, recipe.rate),
        "one_cycle": lambda t: one_cycle(t, steps, recipe),
        "plateau": lambda t: 1.0,
    }
    return decays[recipe.decay]
