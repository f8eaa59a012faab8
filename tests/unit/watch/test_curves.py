"""Curves have the last value of each step, and no spike is lost when they are thinned out."""

from __future__ import annotations

import math

from paceline.watch.curves import RunCurves
from tests.unit.watch.records import run_record, step_record


def test_steps_that_were_taken_again_count_once() -> None:
    curves = RunCurves()
    evaluation = {"event": "evaluation", "step": 6, "loss": 0.5, "metrics": {"accuracy": 0.25}}
    curves.add([run_record(), *(step_record(k, loss=10.0 + k) for k in range(8)), evaluation])
    curves.add([run_record(step=6), step_record(6, loss=1.0), step_record(7, loss="inf", new=3.0)])
    points = curves.points("loss")
    assert points.steps == list(range(8)) and points.last == [10.0, 11, 12, 13, 14, 15, 1.0, math.inf]
    assert curves.points("evaluation.accuracy").last == [0.25]
    new = curves.points("metrics.new").last
    assert len(new) == 8 and math.isnan(new[6]) and new[7] == 3.0
    curves.add([run_record(step=5)])
    assert curves.points("evaluation.loss").steps == [] and curves.num_steps == 5
    assert curves.points("unheard of").steps == []


def test_a_thinned_curve_keeps_every_spike() -> None:
    curves = RunCurves()
    losses = [100.0 if k == 777 else -5.0 if k == 1500 else float(k % 3) for k in range(2000)]
    losses[900] = math.nan
    curves.add(step_record(2 * k, loss=loss if loss == loss else "nan") for k, loss in enumerate(losses))
    points = curves.points("loss", max_points=50)
    assert len(points.steps) == 50 and points.steps[1] == 80
    assert max(points.high) == 100.0 and min(points.low) == -5.0
    part = curves.points("loss", first=1540, end=1570, max_points=50)
    assert part.steps == list(range(1540, 1570, 2)) and part.low == part.high == part.last
    assert part.last[7] == 100.0
    assert curves.times([0, 8, 10**6])[:2] == [1000.0, 1008.0]
