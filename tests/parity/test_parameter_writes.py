"""A forward that writes to a parameter is refused where it would not be alone: `max_norm` of nn.Embedding."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from paceline.errors import TaskError
from paceline.job.cluster import Cluster
from paceline.recipe import Recipe, Strategy
from paceline.task import Loss, Task
from paceline.testing import run_ranks
from paceline.testing.parity import build_test_session, run_strategy
from paceline.testing.rank_processes import RanksFailed

SAYS = "the forward changes the parameter '0.weight', as max_norm"
STAGES = ("replicas=1 pipeline=2", "replicas=1 pipeline=2 schedule=1f1b")
TWO_RANKS = (
    "replicas=2",
    "replicas=2 route=native",
    "replicas=1 shard=2 zero=1",
    "replicas=1 shard=2 zero=2",
    "replicas=1 shard=2 zero=3",
    "replicas=1 shard=2 zero=3 route=native",
    "replicas=2 sync=local:2",
    "replicas=2 lanes=2",
)
ONE_PROCESS = ("replicas=1", "replicas=1 lanes=2", "replicas=1 pipeline=2 lanes=2")


def build(max_norm: float | None = 0.5) -> Task:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Embedding(12, 6, max_norm=max_norm), nn.Linear(6, 4), nn.Tanh(), nn.Linear(4, 1))
    return Task(model, [torch.tensor(i % 12) for i in range(24)], loss, stages=list)


def loss(model: nn.Module, x: Tensor) -> Loss:
    return Loss((model(x) - 1).square().sum(), len(x))


def recipe(strategy: str, shards: int = 4) -> Recipe:
    return Recipe(
        task="own",
        steps=3,
        batch={"size": 8, "shards": shards},
        optimizer={"name": "sgd", "lr": 0.1},
        strategy=Strategy.parse(strategy),
    )


def said(cluster: Cluster, strategies: tuple[str, ...], max_norm: float | None) -> dict[str, str]:
    found = {}
    for strategy in strategies:
        session = build_test_session(cluster, recipe(strategy), lambda: build(max_norm))
        try:
            found[strategy] = f"{len(list(session.rounds()))} rounds"
        except TaskError as error:
            found[strategy] = str(error)
            session.abort()
        session.close()
    return found


@pytest.mark.parametrize(("strategies", "ranks"), [(TWO_RANKS, 2), (ONE_PROCESS, 1)])
def test_a_forward_that_bounds_its_weights_is_refused_in_the_first_step(
    strategies: tuple[str, ...], ranks: int
) -> None:
    for found in run_ranks(said, ranks, strategies, 0.5):
        assert all(SAYS in found[strategy] for strategy in strategies), found


@pytest.mark.parametrize("strategy", [STAGES[0], pytest.param(STAGES[1], marks=pytest.mark.soak)])
def test_a_stage_refuses_it_too(strategy: str) -> None:
    """The other stage waits for it, so the job ends."""
    with pytest.raises(RanksFailed) as failed:
        run_ranks(said_or_raised, 2, strategy)
    assert SAYS in str(failed.value)


def said_or_raised(cluster: Cluster, strategy: str) -> None:
    list(build_test_session(cluster, recipe(strategy), build).rounds())


def test_without_a_bound_they_train() -> None:
    """The twin: nothing is refused where nothing is written."""
    found = run_ranks(said, 2, (*TWO_RANKS, *STAGES), None)[0]
    assert all(text.endswith("rounds") for text in found.values()), found


@pytest.mark.capability("A2")
def test_alone_with_the_whole_batch_it_is_that_of_a_plain_loop() -> None:
    (found,) = run_ranks(lambda cluster: run_strategy(cluster, recipe("replicas=1", 1), build).parameters, 1)
    task = build()
    optimizer = torch.optim.SGD(task.model.parameters(), lr=0.1)
    session = build_test_session(Cluster.single(), recipe("replicas=1", 1), build)
    for step in range(3):
        (micro_batch,) = session.work.micro_batches(step)
        x = torch.stack([task.data[int(i)] for i in micro_batch.indices])
        optimizer.zero_grad()
        result = loss(task.model, x)
        (result.total / result.count).backward()
        optimizer.step()
    session.close()
    for name, p in task.model.named_parameters():
        torch.testing.assert_close(found[name], p.detach(), rtol=1e-6, atol=1e-7)
