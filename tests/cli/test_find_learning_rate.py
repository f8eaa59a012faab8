"""`paceline sweep --find-lr`: an ordinary run under any strategy, its curve, and a suggestion."""

from __future__ import annotations

import json
import math
from itertools import pairwise
from pathlib import Path

import pytest

import paceline
from paceline.errors import NumericError
from paceline.recipe import load_recipe
from paceline.report.run_reader import read_run
from paceline.studies.learning_rate_curve import LearningRateRange, find_learning_rate
from tests.commands import run

ROOT = Path(__file__).parents[2]
RATES = LearningRateRange(1e-5, 1e6, 40)
SETTINGS = ["options.hidden=[16]", "options.shifts=false", "runtime.threads=1", "precision.compute=fp32"]


def test_the_search_is_one_run_whose_curve_no_strategy_changes(tmp_path: Path) -> None:
    recipe = ROOT / "recipes" / "digits.toml"
    words = [word for setting in SETTINGS for word in ("--set", setting)]
    command = ["sweep", recipe, "--find-lr", "--lr-range", "1e-5,1e6", "--lr-steps", 40, "--out", "out"]
    done = run(tmp_path, *command, "--strategy", "replicas=2", "--json", *words)
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert found == json.loads((tmp_path / "out" / "results.json").read_text())
    assert (tmp_path / "out" / "table.txt").read_text() in done.stderr
    assert "<polyline" in (tmp_path / "out" / "plot.svg").read_text()
    assert 1e-5 < found["suggestion"] < found["lowest"] < 1e6
    assert "is nan" in found["end"] or "is inf" in found["end"] or "not finite" in found["end"]
    rates = [point["lr"] for point in found["points"]]
    assert [math.log(b / a) for a, b in pairwise(rates)] == pytest.approx(
        [math.log(1e11) / 39] * (len(rates) - 1)
    )

    one = load_recipe(
        recipe, [*SETTINGS, *RATES.overrides, f"run_dir='{tmp_path / 'one'}'"], strategy="replicas=1"
    )
    with pytest.raises(NumericError):  # a rate that large ends the run, and with it the curve
        paceline.train(one)
    curve = find_learning_rate(read_run(tmp_path / "one").steps, RATES)
    assert curve.suggestion == found["suggestion"]
    both = [(p.loss, q["loss"]) for p, q in zip(curve.points, found["points"], strict=False)]
    assert all(a == pytest.approx(b, rel=1e-4) for a, b in both[:20])


@pytest.mark.parametrize(
    ("words", "what"),
    [
        (["--find-lr", "--over", "seed=1,2"], "--over and --target have no effect"),
        (["--over", "seed=1,2", "--lr-steps", "50"], "have no effect without --find-lr"),
        ([], "at least one axis"),
        (["--find-lr", "--lr-range", "1"], "two rising rates"),
    ],
)
def test_options_without_an_effect_are_refused(tmp_path: Path, words: list[str], what: str) -> None:
    done = run(tmp_path, "sweep", ROOT / "recipes" / "digits.toml", *words)
    assert done.returncode == 2 and what in done.stderr
