"""Curves have the last value of each step, and no spike is lost when they are thinned out."""

from __future__ import annotations

import math

import pytest

import paceline.watch.curves as curves_module
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
    assert part.times[0] == 2540.0


@pytest.mark.capability("P17", clause="long runs are thinned out on the server")
def test_a_very_long_run_is_joined_in_bounded_memory_and_keeps_every_spike(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(curves_module, "_MAX_ROWS", 64)
    curves, spikes = RunCurves(), {5: 100.0, 130: -7.0, 999: 50.0}
    for k in range(1000):
        loss = "inf" if k == 700 else spikes.get(k, float(k % 3))
        curves.add([step_record(k, loss=loss, late=1.0) if k >= 500 else step_record(k, loss=loss)])
    assert curves.stride == 16 and curves.num_steps == 1000 and not curves.has_repeated_steps
    points = curves.points("loss")
    assert points.steps == list(range(0, 1000, 16)) and points.times[1] == 1016.0
    assert [max(points.high[k // 16], -points.low[k // 16]) for k in spikes] == [100.0, 7.0, 50.0]
    assert max(map(abs, points.high)) == 100.0 and points.last[-1] == 50.0
    late = curves.points("metrics.late")
    assert math.isnan(late.high[30]) and late.high[32] == late.low[32] == 1.0
    assert curves.points("loss", max_points=7).high[0] == 100.0
    # After a roll-back the row in which it lies is the only one that still knows what was undone.
    curves.add([run_record(step=600), step_record(600, loss=3.0)])
    assert curves.has_repeated_steps and curves.points("loss").steps[-1] <= 600
    assert (
        curves.points("loss").last[-1] == 3.0 and max(curves.points("loss", first=610).high, default=0) == 0
    )


def test_samples_lie_at_the_step_of_their_time() -> None:
    """Also where they were read before the steps; a table that has no numbers in it is left out."""
    curves = RunCurves()
    sample = {"event": "process", "rank": 1, "seconds": 2.0, "memory_bytes": {"rss": 5.0}}
    cpu = {"user": 1.0, "system": 2.0}
    curves.add(
        [{**sample, "time": 1004.5, "cpu_seconds": cpu}, {**sample, "time": 1007.0, "cpu_seconds": {}}]
    )
    curves.add(
        [
            {**sample, "time": 1008.0, "cpu_seconds": {"user": "x"}},
            {**sample, "time": 1009.0, "memory_bytes": {"rss": None}},
        ]
    )
    host = {"event": "system", "host": "a", "seconds": 2.0, "time": 1006.0}
    curves.add(
        [{**host, "cpu_seconds": {"user": 1.0, "idle": 3.0}, "memory_bytes": {"total": 10, "available": 4}}]
    )
    curves.add([run_record(), *(step_record(k) for k in range(10))])
    points = curves.points("rank.1.cpu_cores")
    assert points.steps[:2] == [4, 7] and points.last[:2] == [1.5, 0.0] and points.times[0] == 1004.5
    assert curves.points("rank.1.cpu_cores", first=5, end=8).steps == [7]
    assert curves.points("host.a.cpu_fraction").last == [0.25]
    assert curves.points("host.a.memory_fraction") == ([6], [0.6], [0.6], [0.6], [1006.0])
    assert curves.is_sampled("host.a.cpu_fraction") and not curves.is_sampled("loss")
