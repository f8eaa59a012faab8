"""The scaling curve of actors: rates and efficiency from the metrics of runs."""

from __future__ import annotations

from typing import Any

import pytest

from paceline.cli.bench_rl import ActorRates, read_rates


def records(rollout: float, step: float) -> list[dict[str, Any]]:
    """Three iterations of 100 rows and two updates; the first one, which opens everything, takes long."""
    found: list[dict[str, Any]] = []
    for iteration in range(3):
        seconds = {"policy and environments": 9.0 if not iteration else rollout, "exchange": 0.5}
        found += [
            {"event": "step", "step": 2 * iteration, "seconds": step if iteration else 7.0},
            {"event": "rollout", "step": 2 * iteration, "ages": {"0": 60, "1": 40}, "seconds": seconds},
            {"event": "step", "step": 2 * iteration + 1, "seconds": step},
        ]
    return found


@pytest.mark.capability("T5")
def test_rates_and_efficiency_are_those_of_all_iterations_but_the_first() -> None:
    one, two = read_rates(1, records(1.5, 0.5)), read_rates(2, records(0.5, 0.5))
    assert one == ActorRates(1, 100 / 2.0, 100 / 1.0, 100 / 3.0)
    assert two == ActorRates(2, 100 / 1.0, 100 / 1.0, 100 / 2.0)
    assert one.bottleneck == "rollout" and two.bottleneck == "learner"
    assert one.efficiency(one) == 1.0 and two.efficiency(one) == pytest.approx(0.75)
