"""The multiplier of a plateau against PyTorch's scheduler, and its state."""

from __future__ import annotations

import json
import math
import random

import pytest
import torch

from paceline.optim import PlateauRates, ReduceOnPlateau, build_schedule
from paceline.recipe import ScheduleRecipe
from paceline.state.stateful import state_from_json, state_to_json

VALUES = [1.0, 0.9, 0.95, 0.9, 0.899, 0.7, 0.8, 0.8, 0.8, math.nan, 0.8, 0.8, 0.69, -0.5, -0.49, -0.49, -0.49]


@pytest.mark.parametrize("better", ["lower", "higher"])
@pytest.mark.parametrize("mode", ["rel", "abs"])
@pytest.mark.parametrize("options", [{"patience": 1}, {"patience": 0, "cooldown": 2}, {"patience": 2}])
def test_every_rate_is_that_of_torch(better: str, mode: str, options: dict[str, int]) -> None:
    rng = random.Random(7)
    optimizer, peer_optimizer = (torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=0.5) for _ in "12")
    recipe = ScheduleRecipe(
        decay="plateau", better=better, threshold=0.01, threshold_mode=mode, factor=0.5, final=0.02, **options
    )
    peer = torch.optim.lr_scheduler.ReduceLROnPlateau(
        peer_optimizer,
        {"lower": "min", "higher": "max"}[better],
        factor=0.5,
        threshold=0.01,
        threshold_mode=mode,
        min_lr=0.5 * 0.02,
        eps=0.0,
        **options,
    )
    plateau = ReduceOnPlateau(recipe)
    rates = PlateauRates(build_schedule(recipe, 100, 32), plateau)
    values = [*VALUES, *(rng.choice([rng.uniform(-1, 1), 0.1]) for _ in range(40))]
    seen = set()
    for step, value in enumerate(values):
        before = plateau.multiplier
        assert plateau.observe(step, value) == (plateau.multiplier < before)
        peer.step(value)
        factor = rates.apply(optimizer, step)
        assert optimizer.param_groups[0]["lr"] == peer_optimizer.param_groups[0]["lr"] == 0.5 * factor
        seen.add(factor)
        # Through JSON and back in the middle of everything, as in a resume.
        saved = json.loads(json.dumps(state_to_json("plateau", plateau.state_dict())))
        again = ReduceOnPlateau(recipe)
        again.load_state_dict(state_from_json(saved))
        assert vars(again) == vars(plateau)
        plateau, rates = again, PlateauRates(build_schedule(recipe, 100, 32), again)
    assert 0.02 in seen and len(seen) > 4


def test_the_warm_up_is_multiplied_too() -> None:
    recipe = ScheduleRecipe(decay="plateau", warmup_steps=4, patience=0, factor=0.5)
    plateau = ReduceOnPlateau(recipe)
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=1.0)
    rates = PlateauRates(build_schedule(recipe, 100, 32), plateau)
    assert rates.apply(optimizer, 2) == 0.5
    plateau.observe(2, 1.0)
    plateau.observe(3, 1.0)
    assert [rates.apply(optimizer, t) for t in (3, 9)] == [0.375, 0.5]
    assert optimizer.param_groups[0]["lr"] == 0.5
