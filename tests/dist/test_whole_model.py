"""The whole model on a rank that holds a part of it: an ordinary model, which needs no other rank."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from paceline.cluster import Cluster
from paceline.recipe import Recipe, Strategy
from paceline.task import Loss, Task
from paceline.testing import run_ranks
from paceline.testing.parity import session_of

STRATEGIES = ("replicas=1 shard=2 zero=3", "replicas=2")


class Blocks(nn.Module):
    """Has blocks, which are gathered one by one for their use."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Linear(6, 6) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = torch.tanh(block(x))
        return x


def build() -> Task:
    torch.manual_seed(0)
    return Task(Blocks(), torch.randn(8, 6), lambda model, x: Loss(model(x).square().sum(), len(x)))


@pytest.mark.capability("A11")
def test_a_rank_runs_it_alone() -> None:
    def run(cluster: Cluster) -> list[float]:
        torch.set_num_threads(1)
        found = []
        for strategy in STRATEGIES:
            batch = {"size": 4, "shards": 2}
            recipe = Recipe(task="own", steps=2, batch=batch, strategy=Strategy.parse(strategy))
            session = session_of(cluster, recipe, build)
            list(session.rounds())
            model = session.complete()
            if session.is_first:  # a collective would wait for the other rank
                with torch.no_grad():
                    found.append(float(model(torch.ones(1, 6)).double().square().sum()))
            session.close()
        return found

    gathered, whole = run_ranks(run, 2, deadline=120.0)[0]
    assert gathered == pytest.approx(whole, rel=1e-5)
