"""The rate that falls when evaluations no longer improve: a multiplier of the schedule's rate.

Invariant: the multiplier is a function of the values of the evaluations so far, in their order, and so is
what `state_dict` returns. All ranks see the same evaluations, so all have the same multiplier, and a resumed
run continues with that of its checkpoint. This module evaluates nothing.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any, Protocol

import torch

from paceline.recipe.schedule_recipe import ScheduleRecipe

PLATEAU_KEY = "schedule.plateau"
"""Name of the state in checkpoints."""


class ReduceOnPlateau:
    """The multiplier of all rates.

    Args:
        recipe: its metric, factor, patience, threshold, cooldown and lowest multiplier (`final`).
    Attributes:
        multiplier: of the rate of every parameter group; 1 before the first reduction.
        step: training steps before the last evaluation that was counted; 0: none was.
        best: the best value so far; None: there is none.
        on_fall: called whenever the multiplier has fallen.
    Source: `torch.optim.lr_scheduler.ReduceLROnPlateau`, with `min_lr` as a fraction of the base rate and
        without its `eps`; tests/unit/optim/test_reduce_on_plateau.py compares every rate.
    """

    def __init__(self, recipe: ScheduleRecipe) -> None:
        self._recipe = recipe
        self.multiplier, self.step = 1.0, 0
        self.best: float | None = None
        self.on_fall: list[Callable[[], None]] = []
        self._num_bad = self._cooldown = 0

    def observe(self, step: int, value: float) -> bool:
        """Count an evaluation; return whether the multiplier fell.

        Args:
            step: training steps before it.
            value: of the metric; one that is not a number is no improvement.
        """
        self.step = step
        if self._is_better(value):
            self.best, self._num_bad = value, 0
        else:
            self._num_bad += 1
        if self._cooldown:
            self._cooldown -= 1
            self._num_bad = 0
        if self._num_bad <= self._recipe.patience:
            return False
        self._cooldown, self._num_bad = self._recipe.cooldown, 0
        before = self.multiplier
        self.multiplier = max(before * self._recipe.factor, self._recipe.final)
        has_fallen = self.multiplier < before
        for call in self.on_fall if has_fallen else ():
            call()
        return has_fallen

    def _is_better(self, value: float) -> bool:
        sign = 1.0 if self._recipe.better == "higher" else -1.0
        if self.best is None:
            return sign * value > -math.inf
        is_relative = self._recipe.threshold_mode == "rel"
        # Multiplied and not added, as in PyTorch: with a negative best value a relative threshold is lenient.
        wanted = (
            self.best * (1.0 + sign * self._recipe.threshold)
            if is_relative
            else self.best + sign * self._recipe.threshold
        )
        return sign * value > sign * wanted

    def state_dict(self) -> dict[str, Any]:
        return {
            "multiplier": self.multiplier,
            "step": self.step,
            "best": self.best,
            "bad": self._num_bad,
            "cooldown": self._cooldown,
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.multiplier, self.step, self.best = float(state["multiplier"]), int(state["step"]), state["best"]
        self._num_bad, self._cooldown = int(state["bad"]), int(state["cooldown"])


class _Rates(Protocol):
    def apply(self, optimizer: torch.optim.Optimizer, update: int) -> float: ...


class PlateauRates:
    """The rates of a schedule, times the multiplier of a plateau.

    Args:
        inner: sets the rates of the schedule: its warm-up and its peak.
        plateau: its multiplier is read before every update.
    """

    def __init__(self, inner: _Rates, plateau: ReduceOnPlateau) -> None:
        self._inner, self._plateau = inner, plateau

    def apply(self, optimizer: torch.optim.Optimizer, update: int) -> float:
        """Set the rate of every group for an update, counted from 0; return the factor of the base rate."""
        factor = self._inner.apply(optimizer, update)
        for group in optimizer.param_groups:
            group["lr"] *= self._plateau.multiplier
        return factor * self._plateau.multiplier
