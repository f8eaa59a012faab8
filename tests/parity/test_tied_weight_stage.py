"""A stage with nothing but a tied weight: what it draws is what the stage draws that has it among others."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import count
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from paceline.job.cluster import Cluster
from paceline.models import KeyedDropout
from paceline.parallel import gradient_reduction
from paceline.parallel.state_hash import find_divergence
from paceline.recipe import Recipe, Strategy
from paceline.task import Loss, Task
from paceline.testing import run_ranks
from paceline.testing.parity import (
    CPU,
    Trajectory,
    build_test_session,
    make_task,
    run_oracle,
    whole_trajectory,
)
from paceline.verification import VerificationReport, compare_with_oracle

pytestmark = [pytest.mark.timeout(600), pytest.mark.capability("D1", "H8")]
SPLITS = {2: "pipeline=2 stages=8,2", 3: "pipeline=3 stages=4,4,2"}
CODECS = ("int8", "int4:stochastic", "topk:0.1", "lowrank:2")
STEPS = 6


class Tied(nn.Sequential):
    """Two weights, each of two layers; the last layer has nothing else, and in front of it is dropout.

    Of three stages the first holds one weight with the second, and one with the last.
    """

    def __init__(self) -> None:
        super().__init__(
            nn.Linear(64, 64, bias=False),
            nn.Tanh(),
            nn.Linear(64, 64, bias=False),
            nn.Tanh(),
            nn.Linear(64, 64),
            nn.Tanh(),
            nn.Linear(64, 64, bias=False),
            nn.Tanh(),
            KeyedDropout(0.2),
            nn.Linear(64, 64, bias=False),
        )
        self[6].weight, self[9].weight = self[0].weight, self[2].weight


def recipe(strategy: str, **changes: Any) -> Recipe:
    settings: dict[str, Any] = {
        "task": "digits",
        "steps": STEPS,
        "batch": {"size": 46, "shards": 4},
        "optimizer": {"name": "adamw", "lr": 2e-3, "clip_norm": 0.5},
        "strategy": Strategy.parse(strategy),
    }
    return Recipe(**(settings | changes))


def loss(model: nn.Module, batch: Sequence[Tensor]) -> Loss:
    images, targets = batch
    return Loss(F.cross_entropy(model(images)[:, :10], targets, reduction="sum"), len(images))


def task() -> Task:
    torch.manual_seed(3)
    return replace(
        make_task(recipe("replicas=1")), model=Tied(), initialize=None, stages=None, loss=loss, held_out=None
    )


def initialized() -> Task:
    """Initial weights are drawn by name, by whoever holds them."""
    torch.manual_seed(3)
    return replace(task(), initialize=make_task(recipe("replicas=1")).initialize)


def run(cluster: Cluster, strategies: Sequence[str], make: Callable[[], Task] = task) -> list[Trajectory]:
    """Where each ends; a stage's copy of the tied weight is equal to the other's."""
    found = []
    for strategy in strategies:
        session = build_test_session(cluster, recipe(strategy), make)
        if session.mesh.axes["pipeline"].rank == session.mesh.axes["pipeline"].size - 1:
            assert [slot.name for slot in session.runner.sharded_model.computes] == ["2.weight"]
        losses = [stats.loss for stats in session.rounds()]
        assert find_divergence(session.state, session.mesh, session.net) is None, strategy
        found.append(whole_trajectory(losses, session))
        session.close()
    return found


@pytest.mark.parametrize("make", [task, initialized])
@pytest.mark.parametrize("num_stages", SPLITS)
def test_it_goes_where_one_process_goes(num_stages: int, make: Callable[[], Task]) -> None:
    right = run_oracle(recipe("replicas=1"), STEPS, make)
    for [end] in run_ranks(run, num_stages, [f"replicas=1 {SPLITS[num_stages]}"], make):
        assert end.distance(right) <= 2e-6


@pytest.mark.parametrize("num_stages", SPLITS)
def test_each_step_is_that_of_the_oracle(num_stages: int) -> None:
    def verify(cluster: Cluster) -> VerificationReport:
        strategy = recipe(f"replicas=1 {SPLITS[num_stages]} schedule=1f1b")
        return compare_with_oracle(strategy, task(), cluster, CPU, STEPS)

    for report in run_ranks(verify, num_stages):
        assert report.ok, (report.failure, report.diagnosis)


@pytest.mark.parametrize("num_stages", SPLITS)
def test_its_copy_stays_equal_whatever_a_codec_draws(num_stages: int) -> None:
    """Of two replicas; and what a codec of eight bits leads to is about where whole replicas go."""
    coded = [f"replicas=2 codec={codec}" for codec in CODECS]
    right = run_ranks(ends, 2, coded[:1])[0][0]
    for rank in run_ranks(run, 2 * num_stages, [f"{one} {SPLITS[num_stages]}" for one in coded]):
        assert max(abs(a - b) for a, b in zip(rank[0].losses, right.losses, strict=True)) <= 5e-4


def ends(cluster: Cluster, strategies: Sequence[str]) -> list[Trajectory]:
    found = []
    for strategy in strategies:
        session = build_test_session(cluster, recipe(strategy), task)
        found.append(whole_trajectory([stats.loss for stats in session.rounds()], session))
        session.close()
    return found


def by_number() -> None:
    """Buffers are called by their number on their rank."""
    numbers = count()
    gradient_reduction._bucket_prefix = lambda alike: f"{number}/" if (number := next(numbers)) else ""


@pytest.mark.parametrize("codec", ["int4:stochastic", "lowrank:2"])
def test_buffers_that_are_called_by_a_number_let_copies_drift_apart(codec: str) -> None:
    """The twin: the first stage has it in its second buffer, and the last in its first."""

    def broken(cluster: Cluster) -> bool:
        by_number()
        session = build_test_session(cluster, recipe(f"replicas=2 {SPLITS[3]} codec={codec}"), task)
        list(session.rounds())
        return find_divergence(session.state, session.mesh, session.net) is None

    assert not any(run_ranks(broken, 6))
