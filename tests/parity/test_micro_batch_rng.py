"""Python's and NumPy's generators in a forward: layers left out at random are those of one process."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from paceline.errors import TaskError
from paceline.job.cluster import Cluster
from paceline.parallel import data_parallel
from paceline.recipe import Recipe, Strategy
from paceline.task import Loss, Task
from paceline.testing import run_ranks
from paceline.testing.parity import build_test_session
from paceline.verification import compare_with_oracle


def recipe(strategy: str, **changes: Any) -> Recipe:
    """Steps of 8, 8 and 3 samples."""
    settings: dict[str, Any] = {
        "task": "own",
        "epochs": 2,
        "batch": {"size": 8, "shards": 4},
        "strategy": Strategy.parse(strategy),
        "runtime": {"deadline_seconds": 40, "bucket_bytes": 64},
    }
    return Recipe(**(settings | changes))


class Skipped(nn.Module):
    """A layer that is sometimes left out (LayerDrop), by Python's generator or NumPy's."""

    def __init__(self, draw: Callable[[], float]) -> None:
        super().__init__()
        self.layer, self.draw = nn.Linear(4, 4), draw

    def forward(self, x: Tensor) -> Tensor:
        if self.training and self.draw() < 0.4:
            return x
        return x + torch.tanh(self.layer(x)) * (1.0 + 0.1 * self.draw())


def from_python() -> float:
    return random.random()


def from_numpy() -> float:
    return float(np.random.normal())  # a method as an attribute would be copied with its generator


def layer_drop() -> Task:
    torch.manual_seed(0)
    layers = [Skipped(draw) for draw in (from_python, from_numpy, from_python, from_numpy)]
    model = nn.Sequential(nn.Linear(5, 4), *layers, nn.Tanh(), nn.Linear(4, 1))

    def loss(model: nn.Module, x: Tensor) -> Loss:
        return Loss((model(x) - 1.0).square().sum(), len(x))

    def blocks(model: nn.Module) -> list[nn.Module]:
        return [module for module in model if isinstance(module, Skipped)]

    return Task(model, list(torch.randn(19, 5)), loss, blocks=blocks)


@pytest.mark.capability("A6", "L1")
def test_layers_left_out_by_python_or_numpy_are_those_of_one_process() -> None:
    """Also where they are computed again in backward, and where stages draw one after another."""
    ways = (
        ("replicas=2", "blocks"),
        ("replicas=1 shard=2 zero=3", "segments"),
        ("replicas=1 pipeline=2", "none"),
        ("replicas=1 pipeline=2 schedule=1f1b", "blocks"),
    )

    def compared(cluster: Cluster) -> dict[tuple[str, str], str]:
        found = {}
        for strategy, how in ways:
            plan = recipe(strategy, memory={"recompute": how})
            report = compare_with_oracle(plan, layer_drop(), cluster, torch.device("cpu"), 3)
            found[strategy, how] = str(report.failure or "")
        return found

    for found in run_ranks(compared, 2):
        assert found == dict.fromkeys(ways, "")


def test_verification_detects_generators_that_are_not_seeded(monkeypatch: pytest.MonkeyPatch) -> None:
    """The twin."""

    def seed_torch_only(key: int, *others: object) -> None:
        torch.default_generator.manual_seed(key)

    monkeypatch.setattr(data_parallel, "seed_micro_batch", seed_torch_only)
    report = compare_with_oracle(recipe("replicas=1"), layer_drop(), Cluster.single(), torch.device("cpu"), 3)
    assert not report.ok


def test_lanes_refuse_draws_that_they_would_share() -> None:
    session = build_test_session(Cluster.single(), recipe("replicas=1 lanes=2"), layer_drop)
    with pytest.raises(TaskError, match=r"global generator of (numpy\.)?random"):
        next(session.rounds())
    session.abort()
    session.close()
