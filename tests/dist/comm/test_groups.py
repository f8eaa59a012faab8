"""Groups of a mesh on real ranks: who sums with whom, and one start for all replicas."""

import pytest
import torch
from torch import nn

from paceline.comm import Net
from paceline.errors import StrategyError
from paceline.job.mesh import Mesh
from paceline.session.model_setup import broadcast_model
from paceline.testing import run_ranks

DEGREES = {"replica": 2, "tensor": 2}  # replicas are ranks (0, 2) and (1, 3); tensor peers (0, 1) and (2, 3)


@pytest.mark.capability("G1", "G3")
def test_each_group_works_on_its_own_and_ranks_count_inside_the_group() -> None:
    def talk(cluster) -> dict[str, object]:
        net, mesh = Net(20.0), Mesh.build(cluster, DEGREES)
        own = torch.tensor([float(10**mesh.world.rank)])
        found: dict[str, object] = {}
        for axis in ("replica", "tensor", "shard"):
            group = mesh.axes[axis]
            found[axis] = [
                net.all_reduce(own.clone(), group).wait().item(),
                net.broadcast(own.clone(), group, source=group.size - 1).wait().item(),
                [x.item() for x in net.all_gather(own, group).wait()],
                [x.item() for x in net.gather(own, group, destination=group.size - 1).wait()],
                [x.item() for x in net.all_to_all([own + i for i in range(group.size)], group).wait()],
            ]
            net.barrier(group)
        found["ledger"] = {row: entry.calls for row, entry in net.ledger.rows.items()}
        return found

    for rank, found in enumerate(run_ranks(talk, 4)):
        for axis, members in (
            ("replica", [rank % 2, rank % 2 + 2]),
            ("tensor", [rank // 2 * 2, rank // 2 * 2 + 1]),
            ("shard", [rank]),
        ):
            values, place = [10.0**m for m in members], members.index(rank)
            last = place == len(members) - 1
            exchanged = [v + place for v in values]
            assert found[axis] == [sum(values), values[-1], values, values if last else [], exchanged], (
                rank,
                axis,
            )
        assert {group for _, group in found["ledger"]} == {"replica", "tensor"}  # one rank alone has no wire
        assert found["ledger"]["all_reduce", "tensor"] == 1


class Mixed(nn.Module):
    """Two types of weights, a tied one, statistics, a counter and a mask outside of the state."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm = nn.Linear(5, 5, bias=False), nn.BatchNorm1d(5)
        self.tied = nn.Linear(5, 5, bias=False)
        self.tied.weight = self.first.weight
        self.double, self.half = nn.Linear(3, 2).double(), nn.Linear(2, 2).bfloat16()
        self.frozen = nn.Linear(4, 1).requires_grad_(False)
        self.register_buffer("mask", torch.rand(3) > 0.5, persistent=False)

    def everything(self) -> dict[str, torch.Tensor]:
        return {name: t.detach().clone() for name, t in (*self.named_parameters(), *self.named_buffers())}


@pytest.mark.capability("G3")
def test_replicas_that_were_initialised_differently_start_equal() -> None:
    def start(cluster) -> tuple[dict[str, torch.Tensor], dict[str, torch.Tensor], float]:
        torch.manual_seed(cluster.global_rank)
        model = Mixed()
        model.norm(torch.randn(8, 5) + cluster.global_rank)
        before = model.everything()
        net = Net(20.0)
        broadcast_model(model, net, Mesh.build(cluster, {"replica": 3}).world)
        return before, model.everything(), net.ledger.rows["broadcast", "world"].payload_bytes

    results = run_ranks(start, 3)
    (first, _, _), *others = results
    assert all(not torch.equal(first["first.weight"], before["first.weight"]) for before, _, _ in others)
    assert all(
        not torch.equal(first["norm.running_mean"], before["norm.running_mean"]) for before, _, _ in others
    )
    for _, after, payload in results:
        assert after.keys() == first.keys()
        assert [name for name in first if not torch.equal(after[name], first[name])] == []
        assert payload == sum(t.numel() * t.element_size() for t in first.values())


def test_degrees_that_do_not_fit_fail_on_every_rank_before_a_group_is_made() -> None:
    def build(cluster) -> str:
        with pytest.raises(StrategyError) as caught:
            Mesh.build(cluster, {"replica": 2, "tensor": 2})
        return str(caught.value)

    assert all("holds 4 ranks, but the job has 3 processes" in text for text in run_ranks(build, 3))
