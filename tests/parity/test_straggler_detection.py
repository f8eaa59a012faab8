"""A replica that is slow is named in a job, with its cause; shares by speed say what they gained."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import pytest
from torch import nn

from paceline.errors import RecipeError
from paceline.job.cluster import Cluster
from paceline.recipe import Recipe
from paceline.testing import run_ranks
from paceline.testing.parity import build_test_session, make_task
from tests.parity.test_work_assignment import Slow, digits
from tests.parity.virtual_clock import own_clock

SECONDS, USUAL = 0.03, 0.01  # a sample that is read slowly, and a micro-batch that is computed as ever
BEGINS = {"data": 9, "compute": 25, "nothing": 37}


def watched(strategy: str, steps: int) -> Recipe:
    return digits(strategy, steps=steps, health={"straggler_factor": 4.0})


def told(cluster: Cluster) -> list[tuple[str, Mapping[str, Any]]]:
    """Rank 1 reads slowly for a while, then rank 2 computes slowly, and shares follow."""
    recipe = watched("replicas=3 balance=speed", 41)
    task = make_task(recipe)
    clock, pause = own_clock(), [0.0]
    data = Slow(task.data, clock)
    session = build_test_session(cluster, recipe, lambda: replace(task, data=data))

    def compute(module: nn.Module, inputs: Any) -> None:
        clock.spend(USUAL + pause[0])

    session.runner.sharded_model.model.register_forward_pre_hook(compute)
    for stats in session.rounds():
        begun = [name for name, step in BEGINS.items() if stats.step + 1 >= step]
        now = begun[-1] if begun else "nothing"
        data.seconds = SECONDS * (now == "data" and cluster.global_rank == 1)
        pause[0] = 4 * SECONDS * (now == "compute" and cluster.global_rank == 2)
    notes = session.events.take()
    session.close()
    return notes


@pytest.mark.capability("I8", "I9", clause="data and compute; its share shrinks")
def test_the_slow_rank_is_named_with_its_cause_and_the_gain_is_told() -> None:
    first, *others = run_ranks(told, 3)
    assert all([name for name, _ in one] == [name for name, _ in first] for one in others)
    named = [record for name, record in first if name == "straggler"]
    assert [(one["rank"], one["cause"]) for one in named] == [(1, "data"), (2, "compute")]
    begins = [BEGINS["data"], BEGINS["compute"]]
    assert all(one["step"] - begin <= 10 for one, begin in zip(named, begins, strict=True))
    gains = [record for name, record in first if name == "gain"]
    assert gains and all(record["before"] > 0 and record["after"] > 0 for record in gains)
    shares = [(record["step"], record["shares"]) for name, record in first if name == "shares"]
    assert any(9 < step <= 25 and dealt[1] < max(dealt) for step, dealt in shares), shares


def test_another_rule_does_not_know_it() -> None:
    with pytest.raises(RecipeError, match="straggler_factor"):
        watched("servers=1 sync=server-async", 4)
