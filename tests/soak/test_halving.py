"""Halving on the digits: half of the samples, and the best trial of a search without it."""

from __future__ import annotations

from pathlib import Path

import pytest

import paceline
from paceline.recipe import Recipe
from paceline.search import summarize_study

pytest.importorskip("optuna", reason="needs paceline[tune]")
SPACE = {"optimizer.lr": {"log": [1e-4, 1e-1]}, "batch.size": {"choice": [32, 64, 128]}}


@pytest.mark.soak
@pytest.mark.capability("S5")
@pytest.mark.parametrize("seed", range(1, 6))
def test_halving_reads_half_of_the_samples_and_finds_the_best_within_1_percent(
    seed: int, tmp_path: Path
) -> None:
    best, saved = [], []
    for stop in ({"rule": "none"}, {"rule": "halving", "first": "epochs:4", "keep": 0.5}):
        recipe = Recipe(task="digits", epochs=16, options={"hidden": [32]}, seed=seed)
        study = {"objective": "validation accuracy", "search": "random", "proposals": 8, "seed": seed}
        settings = {"study": study, "stop": stop, "space": SPACE}
        found = paceline.tune(recipe, settings, trials=8, workers=2, out=tmp_path / str(stop["rule"]))
        assert found.best is not None and found.best.value is not None
        best.append(found.best.value)
        saved.append(summarize_study(found).saved or 0.0)
    assert saved[1] >= 0.5 and best[1] >= 0.99 * best[0], (best, saved)
