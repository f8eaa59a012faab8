"""PipeDream with two buffers of weights, against a plain loop whose every gradient is one update old."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from paceline.errors import RecipeError
from paceline.job.cluster import Cluster
from paceline.recipe import Recipe, Strategy
from paceline.sync.weight_stashing import DoubleBufferedWeights
from paceline.testing import run_ranks
from paceline.testing.contracts import RuleContract
from paceline.testing.parity import Trajectory, build_test_session
from tests.parity.test_pipedream import ROUND, delayed, digits, distance, two_rounds


def recipe(num_stages: int, **changes: object) -> Recipe:
    return digits(f"replicas=1 pipeline={num_stages} sync=pipedream:2bw", **changes)


def one_old(stage: int) -> int:
    return 1


@pytest.mark.capability("D6")
@pytest.mark.parametrize("num_stages", [2, 3])
def test_every_stage_is_one_update_old(num_stages: int) -> None:
    """With a fill and a drain in each of two rounds; another age gives another trajectory (the twins)."""
    ends = run_ranks(two_rounds, num_stages, recipe(num_stages))
    right = delayed(num_stages, one_old)
    assert all(distance(end.parameters, right) <= 1e-5 for end in ends)
    wrong: tuple[Callable[[int], int], ...] = (lambda s: 0, lambda s: 2, lambda s: num_stages - 1 - s)
    for age in wrong:
        assert distance(delayed(num_stages, age), right) > 1e-3


@pytest.mark.capability("D6", "Z2")
def test_an_update_in_memory_that_is_in_use_is_another_trajectory() -> None:
    """The mutation twin: parameters stay where micro-batches in flight read them."""

    def broken(cluster: Cluster) -> Trajectory:
        DoubleBufferedWeights.make_room = lambda self: None
        return two_rounds(cluster, recipe(2))

    right = delayed(2, one_old)
    assert any(distance(end.parameters, right) > 1e-3 for end in run_ranks(broken, 2))


@pytest.mark.capability("D6")
def test_a_stage_of_four_keeps_two_versions_and_backward_uses_that_of_its_forward() -> None:
    """Also where there are fewer micro-batches than stages: forwards wait for the update that they need."""

    def run(cluster: Cluster, shards: int) -> tuple[list[Any], int, dict[str, float]]:
        of = recipe(4, options={"model": "mlp", "hidden": [24, 24, 24]}, batch={"size": 46, "shards": shards})
        session = build_test_session(cluster, of)
        weights, places = session.rule.flow.weights, set[int]()
        take = weights.add_version

        def look(step: int, updates: int) -> None:
            take(step, updates)
            places.update(
                next(iter(version.weights.values())).data_ptr()
                for version in weights.versions_by_step.values()
            )

        weights.add_version = look
        stats = next(session.rounds())
        return list(session.rule.versions), len(places), dict(stats.metrics)

    for shards in (4, 2):
        for stage, (versions, num_places, metrics) in enumerate(run_ranks(run, 4, shards)):
            assert [v.step for v in versions] == list(range(ROUND))
            assert all(v.forward == v.backward for v in versions)
            assert [v.applied - v.forward for v in versions] == [0] + [1] * (ROUND - 1)
            assert num_places == 2
            assert metrics[f"staleness of stage {stage}"] == pytest.approx((ROUND - 1) / ROUND)


def test_its_argument_is_checked() -> None:
    text = "replicas=1 pipeline=2 sync=pipedream:2bw"
    assert str(Strategy.parse(text)) == text
    with pytest.raises(RecipeError, match="2bw or nothing"):
        Strategy.parse("replicas=1 pipeline=2 sync=pipedream:3bw")


@pytest.mark.soak
@pytest.mark.capability("D6", "Z1")
class TestTwoBuffers(RuleContract):
    strategy, num_ranks = "replicas=1 pipeline=2 sync=pipedream:2bw", 2
