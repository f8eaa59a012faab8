"""What a loss draws from other generators, batches that end early, and a norm that sees one sample."""

from __future__ import annotations

import random

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from paceline.errors import TaskError
from paceline.job.cluster import Cluster
from paceline.parallel.state_hash import state_sha256
from paceline.recipe import Recipe, Strategy
from paceline.task import Loss, Task
from paceline.testing import run_ranks
from paceline.testing.parity import build_test_session


def build(*between: nn.Module, draws: bool = False) -> Task:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(5, 4), *between, nn.Tanh(), nn.Linear(4, 1))

    def loss(model: nn.Module, x: Tensor) -> Loss:
        noise = random.random() + float(np.random.random()) if draws else 1.0
        return Loss((model(x) - noise).square().sum(), len(x))

    return Task(model, list(torch.randn(19, 5)), loss)


def recipe(strategy: str, *, reproducible: bool = True, shards: int = 4) -> Recipe:
    """Steps of 8, 8 and 3 samples."""
    return Recipe(
        task="own",
        epochs=2,
        batch={"size": 8, "shards": shards},
        reproducible=reproducible,
        strategy=Strategy.parse(strategy),
        runtime={"deadline_seconds": 40, "bucket_bytes": 64},
    )


def hashes(cluster: Cluster, strategies: tuple[str, ...], draws: bool) -> dict[str, str]:
    found = {}
    for strategy in strategies:
        session = build_test_session(cluster, recipe(strategy), lambda: build(draws=draws))
        list(session.rounds())
        found[strategy] = state_sha256(session.snapshot().tensors())
        session.close()
    return found


@pytest.mark.capability("I10")
@pytest.mark.parametrize("draws", [False, True])
def test_short_tails_and_foreign_draws_keep_the_bits(draws: bool) -> None:
    """In the last step of an epoch a rank of four has no samples; the loss may draw from any generator."""
    (alone,) = run_ranks(hashes, 1, ("replicas=1",), draws)
    ways = ("replicas=4 route=native", "replicas=4", "replicas=2 shard=2 zero=1 route=native")
    for found in run_ranks(hashes, 4, ways, draws):
        assert set(found.values()) == set(alone.values())


def test_a_norm_over_one_sample_is_one_sentence() -> None:
    def said(cluster: Cluster) -> str:
        one_each = recipe("replicas=2", reproducible=False, shards=8)
        session = build_test_session(cluster, one_each, lambda: build(nn.BatchNorm1d(4)))
        with pytest.raises(TaskError, match="has too few values for a norm over the batch"):
            list(session.rounds())
        session.abort()
        session.close()
        return "said"

    assert run_ranks(said, 2) == ["said"] * 2
