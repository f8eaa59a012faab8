"""Stages that are cut by measured time: the same on all ranks, and the answer of one process."""

from __future__ import annotations

import time

import pytest
import torch
from torch import Tensor, nn

from paceline import Loss, Task
from paceline.job.cluster import Cluster
from paceline.recipe import Recipe
from paceline.testing import run_ranks
from paceline.testing.parity import Trajectory, build_test_session, trajectory_of

HEAVY, LINKS = 1, 6


class Slow(nn.Linear):
    """A layer that takes four times as long as all others, for no reason that its size could tell."""

    def forward(self, x: Tensor) -> Tensor:
        time.sleep(0.02)
        return super().forward(x)


def lopsided() -> Task:
    torch.manual_seed(0)
    layers = [Slow(8, 8) if k == HEAVY else nn.Linear(8, 8) for k in range(LINKS)]
    return Task(
        nn.Sequential(*layers),
        list(torch.rand(16, 8)),
        lambda model, x: Loss(model(x).square().sum(), len(x)),
    )


def recipe(strategy: str) -> Recipe:
    return Recipe.model_validate(
        {
            "task": "sum",
            "steps": 2,
            "batch": {"size": 8, "shards": 2},
            "strategy": strategy,
            "reproducible": True,
            "precision": {"compute": "fp32"},
            "runtime": {"threads": 1},
        }
    )


def train(cluster: Cluster, strategy: str) -> tuple[str, int, Trajectory, list[str]]:
    """The cut, how many modules this rank has, where it ended, and what the folder would be told."""
    torch.set_num_threads(1)
    session = build_test_session(cluster, recipe(strategy), lopsided)
    losses = [stats.loss for stats in session.rounds()]
    held = len({slot.name.partition(".")[0] for slot in session.runner.sharded_model.computes})
    told = [name for name, _ in session.events.take()]
    result = session.recipe.strategy.stages, held, trajectory_of(losses, session), told
    session.close()
    return result


@pytest.mark.capability("D8")
def test_the_slow_layer_has_a_stage_of_few_and_the_bits_are_those_of_one_process() -> None:
    _, _, alone, _ = train(Cluster.single(), "replicas=1")
    first, second = run_ranks(train, 2, "replicas=1 pipeline=2 stages=time")
    assert first[0] == second[0]
    assert first[0] in ("2,4", "1,5")  # the slow one with as few others as noise allows
    assert f"{first[1]},{second[1]}" == first[0]
    assert "stages" in first[3]
    for _, _, found, _ in (first, second):
        assert found.losses == alone.losses
        assert all(torch.equal(found.parameters[name], alone.parameters[name]) for name in found.parameters)
    even = run_ranks(train, 2, "replicas=1 pipeline=2")
    assert [one[1] for one in even] == [3, 3]  # the twin: by parameters
