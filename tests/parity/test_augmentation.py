"""What a data set draws for a sample is what one process draws, on any number of ranks and workers."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import Dataset

from paceline.job.cluster import Cluster
from paceline.recipe import Recipe
from paceline.task import Loss, Task
from paceline.testing import run_ranks
from paceline.testing.parity import CPU, build_test_session, run_oracle, whole_trajectory
from paceline.verification import compare_with_oracle
from tests.marks import soak_param


class Augmented(Dataset[Tensor]):
    """Noise and a flip, drawn whenever a sample is read."""

    def __init__(self, rows: Tensor) -> None:
        self.rows = rows

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: int) -> Tensor:
        x = self.rows[index] + 0.1 * torch.randn(5, dtype=torch.float64)
        return (x.flip(0) if random.random() < 0.5 else x) * (1 + 0.1 * np.random.randn())


def loss(model: nn.Module, x: Tensor) -> Loss:
    return Loss((model(x) - 1).square().sum(), len(x))


def build() -> Task:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(5, 4), nn.Tanh(), nn.Linear(4, 1)).double()
    return Task(model, Augmented(torch.randn(19, 5, dtype=torch.float64)), loss)


def outcome(cluster: Cluster, recipe: Recipe) -> tuple[float, bool]:
    """Return the distance of the weights from one process, and whether `verify` is green."""
    session = build_test_session(cluster, recipe, build)
    own = whole_trajectory([stats.loss for stats in session.rounds()], session)
    session.close()
    alone = run_oracle(recipe, 6, build, shards=1)
    return own.distance(alone), compare_with_oracle(recipe, build(), cluster, CPU, 3).ok


@pytest.mark.capability("I10")
@pytest.mark.parametrize("loader", [soak_param({}), {"workers": 1}])
def test_augmented_samples_are_those_of_one_process_on_any_number_of_ranks(loader: dict[str, Any]) -> None:
    """Micro-batches are one for each rank, and the answer is that of the whole batch at once."""
    recipe = Recipe(task="own", steps=6, batch={"size": 8}, precision={"compute": "fp32"}, loader=loader)
    for distance, verified in run_ranks(outcome, 3, recipe):
        assert distance < 1e-12 and verified
