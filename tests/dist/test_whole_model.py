"""The whole model on a rank that holds a part of it: an ordinary model, which needs no other rank."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from paceline.comm import Net
from paceline.errors import CommunicationError
from paceline.job.cluster import Cluster
from paceline.job.mesh import Mesh
from paceline.parallel import state_transfer
from paceline.parallel.state_hash import state_sha256, whole_sha256
from paceline.parallel.state_transfer import gather_in_slices, gather_whole, take_snapshot
from paceline.recipe import Recipe, Strategy
from paceline.state.slot import TensorPiece, TensorSlot
from paceline.task import Loss, Task
from paceline.testing import run_ranks
from paceline.testing.parity import build_test_session

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
            session = build_test_session(cluster, recipe, build)
            list(session.rounds())
            model = session.complete()
            if session.is_first:  # a collective would wait for the other rank
                with torch.no_grad():
                    found.append(float(model(torch.ones(1, 6)).double().square().sum()))
            session.close()
        return found

    gathered, whole = run_ranks(run, 2)[0]
    assert gathered == pytest.approx(whole, rel=1e-5)


@pytest.mark.capability("A11")
def test_what_no_rank_holds_is_an_error_and_not_zeros() -> None:
    def gathered(cluster: Cluster) -> list[float]:
        group = Mesh.build(cluster, {"replica": 2}).world
        rows = TensorSlot("w", (4,), ((2 * group.rank, 2 * group.rank + 2),), frozenset({"shard"}))
        piece = TensorPiece(rows, torch.full((2,), float(group.rank)))
        whole = gather_whole([piece], group, Net(30.0))["w"].tolist()
        with pytest.raises(CommunicationError, match="2 of 4 values of 'w' are on no rank"):
            gather_whole([piece] if group.rank == 0 else [], group, Net(30.0))
        return whole

    assert run_ranks(gathered, 2) == [[0.0, 0.0, 1.0, 1.0]] * 2


@pytest.mark.capability("A11", "J10")
def test_a_hash_needs_one_slice_of_the_whole_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    most = 200  # bytes; a weight of the blocks has 144

    def run(cluster: Cluster) -> tuple[list[list[str]], bool, str, str]:
        monkeypatch.setattr(state_transfer, "_SLICE_BYTES", most)
        recipe = Recipe(
            task="own", steps=1, batch={"size": 4, "shards": 2}, strategy=Strategy.parse(STRATEGIES[0])
        )
        session = build_test_session(cluster, recipe, build)
        list(session.rounds())
        state, mesh, net = session.state, session.mesh, session.net
        first, *slices = gather_in_slices(state.pieces(), mesh.inside, net)
        alike = gather_whole(state.pieces(), mesh.inside, net)
        same = all(torch.equal(t, alike[name]) for one in (first, *slices) for name, t in one.items())
        of_all = state_sha256(take_snapshot(state, mesh, net).tensors())
        assert {name for one in (first, *slices) for name in one} == alike.keys()
        sizes = [sum(t.nbytes for t in one.values()) for one in slices]
        assert max(sizes) <= most and len(sizes) > 5
        session.close()
        return [sorted(one) for one in slices], same, whole_sha256(state, mesh, net), of_all

    ranks = run_ranks(run, 2)
    assert ranks[0] == ranks[1]
    assert ranks[0][1] and ranks[0][2] == ranks[0][3]
