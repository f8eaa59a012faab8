"""Shares of 10 and 100 samples, and sequences of any length: two ranks end where a plain loop ends."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import default_collate

from paceline import Loss, Task
from paceline.data.work import LockstepWork
from paceline.job.cluster import Cluster
from paceline.models import GPT, GPTConfig
from paceline.recipe import Recipe
from paceline.session import Components
from paceline.testing import run_ranks
from paceline.testing.parity import run_strategy
from paceline.testing.planted_faults import PLANTED_FAULTS

pytestmark = pytest.mark.capability("A6")
STEPS, SIZE, LR = 20, 110, 0.2
DEALT = partial(LockstepWork, shares=(1, 10))  # of eleven shards
VOCABULARY, CONTEXT, PAD = 17, 12, -100


def recipe() -> Recipe:
    return Recipe(
        task="own",
        steps=STEPS,
        batch={"size": SIZE, "shards": 11, "shuffle": False},
        optimizer={"name": "sgd", "lr": LR},
    )


def regression() -> Task:
    """The first ten samples of every batch are unlike the others."""
    torch.manual_seed(2)
    x = torch.randn(2 * SIZE, 6)
    x[torch.arange(2 * SIZE) % SIZE < 10] += 1.0
    model = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 1), nn.Flatten(0))

    def loss(model: nn.Module, batch: Tensor) -> Loss:
        return Loss((model(batch) - batch.square().sum(1)).square().sum(), len(batch))

    return Task(model, list(x), loss)


def padded() -> Task:
    """Sequences of 1 to 11 next tokens; what is behind them is no item, and the first ten are the longest."""
    torch.manual_seed(3)
    lengths = torch.where(torch.arange(2 * SIZE) % SIZE < 10, 11, 1 + torch.arange(2 * SIZE) % 4)
    text = torch.randint(VOCABULARY, (2 * SIZE, CONTEXT))
    behind = torch.arange(CONTEXT) > lengths[:, None]

    def loss(model: nn.Module, batch: Sequence[Tensor]) -> Loss:
        tokens_BT, next_BT = batch
        logits = model(tokens_BT).flatten(0, 1)
        total = F.cross_entropy(logits, next_BT.flatten(), ignore_index=PAD, reduction="sum")
        return Loss(total, (next_BT != PAD).sum())

    data = list(zip(text[:, :-1], text.masked_fill(behind, PAD)[:, 1:], strict=True))
    return Task(GPT(GPTConfig(VOCABULARY, CONTEXT, layers=1, heads=2, width=16)), data, loss)


TASKS = {"regression": regression, "padded language model": padded}


def plain(make: Callable[[], Task]) -> dict[str, Tensor]:
    """Full batches, and nothing of ours but the task."""
    task = make()
    optimizer = torch.optim.SGD(task.model.parameters(), lr=LR)
    for step in range(STEPS):
        batch: Any = default_collate([task.data[(SIZE * step + i) % len(task.data)] for i in range(SIZE)])
        loss = task.loss(task.model, batch)
        optimizer.zero_grad()
        (loss.total / loss.count).backward()
        optimizer.step()
    return {name: p.detach() for name, p in task.model.named_parameters()}


def ends(cluster: Cluster, pieces: Components) -> dict[str, dict[str, Tensor]]:
    return {name: run_strategy(cluster, recipe(), make, pieces).parameters for name, make in TASKS.items()}


@pytest.fixture(scope="module")
def right() -> dict[str, dict[str, Tensor]]:
    return {name: plain(make) for name, make in TASKS.items()}


def distances(found: dict[str, dict[str, Tensor]], right: dict[str, dict[str, Tensor]]) -> list[float]:
    return [max(float((found[name][n] - p).abs().max()) for n, p in right[name].items()) for name in TASKS]


def test_shares_of_ten_and_a_hundred_end_where_a_plain_loop_ends(right: Any) -> None:
    for found in run_ranks(ends, 2, Components(work=DEALT)):
        assert max(distances(found, right)) <= 1e-6


def test_a_mean_of_means_ends_elsewhere(right: Any) -> None:
    """The mutation twin."""
    rule = PLANTED_FAULTS["mean-of-means"].pieces(2).rule
    for found in run_ranks(ends, 2, Components(work=DEALT, rule=rule)):
        assert min(distances(found, right)) > 1e-3
