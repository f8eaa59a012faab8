"""A stage with nothing but a tied weight: what it draws is what the stage draws that has it among others."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from itertools import count
from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from paceline.job.cluster import Cluster
from paceline.models import KeyedDropout
from paceline.parallel import gradient_reduction
from paceline.parallel.state_hash import find_divergence
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
from tests.marks import soak_param
from tests.parity.training_runs import each_case, train_whole
from tests.recipes import recipe_of

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


recipe = partial(
    recipe_of,
    task="digits",
    steps=STEPS,
    batch={"size": 46, "shards": 4},
    optimizer={"name": "adamw", "lr": 2e-3, "clip_norm": 0.5},
)


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


def run(cluster: Cluster, strategy: str, make: Callable[[], Task] = task) -> Trajectory:
    """Where it ends; a stage's copy of the tied weight is equal to the other's."""
    session = build_test_session(cluster, recipe(strategy), make)
    if session.mesh.axes["pipeline"].rank == session.mesh.axes["pipeline"].size - 1:
        assert [slot.name for slot in session.runner.sharded_model.computes] == ["2.weight"]
    losses = [stats.loss for stats in session.rounds()]
    assert find_divergence(session.state, session.mesh, session.net) is None, strategy
    end = whole_trajectory(losses, session)
    session.close()
    return end


@pytest.mark.parametrize("num_stages", [soak_param(2), 3])
def test_it_goes_where_one_process_goes(num_stages: int) -> None:
    tasks = (task, initialized)
    right = [run_oracle(recipe("replicas=1"), STEPS, make) for make in tasks]
    cases = [(f"replicas=1 {SPLITS[num_stages]}", make) for make in tasks]
    for ends in run_ranks(each_case, num_stages, run, cases):
        assert all(end.distance(other) <= 2e-6 for end, other in zip(ends, right, strict=True))


@pytest.mark.parametrize("num_stages", [soak_param(2), 3])
def test_each_step_is_that_of_the_oracle(num_stages: int) -> None:
    def verify(cluster: Cluster) -> VerificationReport:
        strategy = recipe(f"replicas=1 {SPLITS[num_stages]} schedule=1f1b")
        return compare_with_oracle(strategy, task(), cluster, CPU, STEPS)

    for report in run_ranks(verify, num_stages):
        assert report.ok, (report.failure, report.diagnosis)


@pytest.mark.parametrize("num_stages", [soak_param(2), 3])
def test_its_copy_stays_equal_whatever_a_codec_draws(num_stages: int) -> None:
    """Of two replicas; and what a codec of eight bits leads to is about where whole replicas go."""
    coded = [f"replicas=2 codec={codec}" for codec in CODECS]
    right = run_ranks(train_whole, 2, recipe(coded[0]), task)[0]
    cases = [(f"{one} {SPLITS[num_stages]}",) for one in coded]
    for rank in run_ranks(each_case, 2 * num_stages, run, cases):
        assert max(abs(a - b) for a, b in zip(rank[0].losses, right.losses, strict=True)) <= 5e-4


def test_buffers_that_are_called_by_a_number_let_copies_drift_apart() -> None:
    """The twin: the first stage has it in its second buffer, and the last in its first."""

    def is_equal(cluster: Cluster, codec: str) -> bool:
        numbers = count()

        def by_number(alike: Any) -> str:
            return f"{number}/" if (number := next(numbers)) else ""

        with patch.object(gradient_reduction, "_bucket_prefix", by_number):
            session = build_test_session(cluster, recipe(f"replicas=2 {SPLITS[3]} codec={codec}"), task)
            list(session.rounds())
        equal = find_divergence(session.state, session.mesh, session.net) is None
        session.close()
        return equal

    for rank in run_ranks(each_case, 6, is_equal, [("int4:stochastic",), ("lowrank:2",)]):
        assert not any(rank)
