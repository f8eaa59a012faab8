"""A loss that jumps: named by tensor, rank and step, and left out where the recipe says so."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest

from paceline.job.cluster import Cluster
from paceline.sync.health import LossSpikeDetector
from paceline.testing import run_ranks
from tests.parity.bad_value_job import BAD_STEP, STRATEGIES, build, distance, recipe, run_without, train

pytestmark = pytest.mark.capability("K8")


def spiking(answer: str, strategy: str = "replicas=all") -> Any:
    return recipe(strategy, spike_factor=50.0, spike_window=4, spike=answer)


@pytest.mark.parametrize(("num_ranks", "strategy"), STRATEGIES)
def test_a_spike_is_named_by_tensor_rank_and_step(num_ranks: int, strategy: str) -> None:
    for found in run_ranks(train, num_ranks, spiking("stop", strategy), partial(build, 3000.0)):
        assert f"the loss of step {BAD_STEP} is" in found.said
        assert "the median of the last 4 is" in found.said
        assert f"on rank {num_ranks - 1} the loss is" in found.said
        assert "the largest gradient is that of '" in found.said
        assert len(found.seen) == BAD_STEP


def test_a_spike_is_left_out_and_nothing_else_is() -> None:
    found = train(Cluster.single(), spiking("skip"), partial(build, 3000.0))
    assert [step for step, applied in found.seen if not applied] == [BAD_STEP]
    assert distance(found.end, run_without([BAD_STEP])) <= 1e-6


def test_what_a_spike_is() -> None:
    watch = LossSpikeDetector(factor=3.0, window=4)
    assert not watch.is_spike(1e9)  # too little is known
    for loss in (1.0, 2.0, 1.0, 1.0):
        watch.accept(loss)
    assert watch.is_spike(3.1) and not watch.is_spike(2.9)
    assert not LossSpikeDetector(factor=None, window=4, losses=[1.0] * 4).is_spike(1e9)
    below = LossSpikeDetector(factor=3.0, window=2, losses=[-1.0, -1.0])
    assert below.is_spike(1.1) and not below.is_spike(-0.5)
