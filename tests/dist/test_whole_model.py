"""The whole model on a rank that holds a part of it: an ordinary model, which needs no other rank."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from paceline.cluster import Cluster
from paceline.comm import Net
from paceline.errors import CommunicationError
from paceline.layout.whole import gather_whole
from paceline.mesh import Mesh
from paceline.recipe import Recipe, Strategy
from paceline.slot import Piece, Slot
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


@pytest.mark.capability("A11")
def test_what_no_rank_holds_is_an_error_and_not_zeros() -> None:
    def gathered(cluster: Cluster) -> list[float]:
        group = Mesh.build(cluster, {"replica": 2}).world
        rows = Slot("w", (4,), ((2 * group.rank, 2 * group.rank + 2),), frozenset({"shard"}))
        piece = Piece(rows, torch.full((2,), float(group.rank)))
        whole = gather_whole([piece], group, Net(30.0))["w"].tolist()
        with pytest.raises(CommunicationError, match="of 'w', 2 of 4 values are on no rank"):
            gather_whole([piece] if group.rank == 0 else [], group, Net(30.0))
        return whole

    assert run_ranks(gathered, 2) == [[0.0, 0.0, 1.0, 1.0]] * 2
