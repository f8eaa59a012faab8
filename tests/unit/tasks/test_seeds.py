"""What a build function draws follows from the seed of the run, whichever generator it draws from."""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from paceline.job.cluster import Cluster
from paceline.recipe import Recipe
from paceline.session.start_rank import build_task
from paceline.task import Loss, Task
from paceline.tasks import run_build
from paceline.testing import run_ranks

DRAWS: dict[str, Callable[[], float]] = {
    "random": random.random,
    "numpy": lambda: float(np.random.rand()),
    "torch": lambda: float(torch.rand(())),
}


def loss(model: nn.Module, batch: Tensor) -> Loss:
    return Loss(model(batch).sum(), len(batch))


def build(draw: str = "random") -> Task:
    """Weights and data that are drawn."""
    model = nn.Linear(2, 1)
    nn.init.constant_(model.weight, DRAWS[draw]())
    return Task(model, [torch.full((2,), DRAWS[draw]()) for _ in range(4)], loss)


def drawn(draw: str, seed: int) -> list[float]:
    task = run_build(build, "build", {"draw": draw}, seed, Path(), Path())
    return [float(task.model.weight[0, 0].detach()), *(float(x[0]) for x in task.data)]


@pytest.mark.capability("N2")
@pytest.mark.parametrize("draw", DRAWS)
def test_the_seed_decides_what_a_build_function_draws_and_the_callers_stream_stays(draw: str) -> None:
    random.seed(3), np.random.seed(3), torch.manual_seed(3)
    expected = DRAWS[draw]()
    random.seed(3), np.random.seed(3), torch.manual_seed(3)
    first = drawn(draw, seed=1)
    assert DRAWS[draw]() == expected
    assert drawn(draw, seed=1) == first != drawn(draw, seed=2)


@pytest.mark.capability("N2", "A5")
def test_every_rank_builds_the_same_data(tmp_path: Path) -> None:
    """Processes start with other streams; the first broadcast would hide other weights, not other data."""

    def values(cluster: Cluster) -> list[float]:
        random.seed(cluster.global_rank), np.random.seed(cluster.global_rank)
        found = []
        for draw in DRAWS:
            task = build_task(Recipe(task="build", options={"draw": draw}, steps=1), build, tmp_path)
            found += [float(task.model.weight[0, 0].detach()), *(float(x[0]) for x in task.data)]
        return found

    first, second = run_ranks(values, 2)
    assert first == second
