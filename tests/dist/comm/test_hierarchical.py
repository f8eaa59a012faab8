"""The hierarchical route: its bytes, its order, its deadlines, and what it refuses."""

import time
from types import SimpleNamespace

import pytest
import torch
from torch import Tensor

from paceline.comm import NativeCollective, Net, hierarchical_cost, native_cost
from paceline.comm.collectives import pad_to_rows
from paceline.comm.routes import HierarchicalCollective
from paceline.comm.routes.hierarchical import build_hierarchical
from paceline.comm.routes.tree_route import build_tree
from paceline.errors import CommunicationError, DeadlineError, StrategyError
from paceline.job.cluster import Cluster
from paceline.job.mesh import Mesh, NodeLevels, group_ranks_by_node
from paceline.testing import run_ranks
from tests.dist.comm.nodes import hierarchical_on

INSIDE, BETWEEN = "replica-inside-nodes", "replica-between-nodes"
SIZES = (1, 7, 12, 1000)


def values(n: int, rank: int) -> Tensor:
    return torch.arange(n) % 13 + 100.0 * rank


class ForgetsTheOtherNodes(HierarchicalCollective):
    """The mutation twin: a node's sum is taken for that of all."""

    def between(self, own: Tensor, key: str) -> Tensor:
        super().between(own.clone(), key)
        return own


class PadsInFront(HierarchicalCollective):
    """The mutation twin: a buffer that does not divide is filled up at the wrong end."""

    def scatter(self, x: Tensor, key: str):
        num_slices = self.levels.scatter.size
        slices = pad_to_rows(x, num_slices)
        shifted = slices.view(-1).roll(slices.numel() - x.numel()).view_as(slices)
        return self.net.reduce_scatter(shifted, self.levels.scatter)


def wrong_sizes(kind: type, world: int, num_nodes: int = 2) -> list[int]:
    """The sizes whose sum is wrong on some rank."""

    def run(cluster: Cluster) -> list[Tensor]:
        path = hierarchical_on(cluster, num_nodes, Net(20.0), kind)
        handles = [path.all_reduce(values(n, cluster.global_rank), str(n)) for n in SIZES]
        return [handle.wait() for handle in handles]

    ranks = run_ranks(run, world)
    right = [sum(values(n, rank) for rank in range(world)) for n in SIZES]
    return [n for k, n in enumerate(SIZES) if any(not torch.equal(found[k], right[k]) for found in ranks)]


@pytest.mark.capability("G8")
def test_broken_levels_give_wrong_sums() -> None:
    assert wrong_sizes(HierarchicalCollective, 4) == []
    assert wrong_sizes(ForgetsTheOtherNodes, 4) == list(SIZES)
    assert wrong_sizes(PadsInFront, 4) == [1, 7], "those that do not divide by two"


@pytest.mark.capability("G8", "Z4")
@pytest.mark.parametrize(
    "num_nodes, here",
    [(2, 2), (2, 3), (3, 2), *(pytest.param(n, 8 // n, marks=pytest.mark.soak) for n in (2, 4))],
)
def test_bytes_inside_and_between_nodes_are_the_closed_form(num_nodes: int, here: int) -> None:
    n = 600

    def rows(cluster: Cluster, native: bool) -> dict[tuple[str, str], float]:
        net = Net(20.0)
        path = hierarchical_on(cluster, num_nodes, net)
        chosen = NativeCollective(net, path.group) if native else path
        chosen.all_reduce(values(n, cluster.global_rank), "0").wait()
        return {row: entry.sent_bytes for row, entry in net.ledger.rows.items()}

    world = num_nodes * here
    inside, between = hierarchical_cost(4 * n, num_nodes, here)
    assert inside.sent_bytes == pytest.approx(2 * (here - 1) / here * 4 * n)
    assert between.sent_bytes == pytest.approx(2 * (num_nodes - 1) / num_nodes * 4 * n / here)
    for found in run_ranks(rows, world, False):
        assert set(found) == {("reduce_scatter", INSIDE), ("all_gather", INSIDE), ("all_reduce", BETWEEN)}
        assert found["all_reduce", BETWEEN] == pytest.approx(between.sent_bytes)
        whole = found["reduce_scatter", INSIDE] + found["all_gather", INSIDE]
        assert whole == pytest.approx(inside.sent_bytes)
    native = native_cost("all_reduce", 4 * n, world).sent_bytes
    assert run_ranks(rows, world, True)[0] == {("all_reduce", "replica"): pytest.approx(native)}
    assert between.sent_bytes < native / here, "a rank sends less than its share of the native bytes"


@pytest.mark.capability("G8")
def test_a_buffer_that_does_not_divide_is_filled_up_and_counted() -> None:
    def between(cluster: Cluster) -> float:
        net = Net(20.0)
        hierarchical_on(cluster, 2, net).all_reduce(values(7, 0), "0").wait()
        return net.ledger.rows["all_reduce", BETWEEN].sent_bytes

    assert run_ranks(between, 4) == [hierarchical_cost(4 * 8, 2, 2)[1].sent_bytes] * 4


@pytest.mark.capability("G8", "G10")
def test_all_levels_go_on_while_the_caller_does_something_else() -> None:
    """Nobody waits for the first buffers, and yet their last part is launched, in one order."""

    def run(cluster: Cluster) -> list[float]:
        net = Net(20.0)
        path = hierarchical_on(cluster, 2, net)
        handles = [path.all_reduce(values(n, cluster.global_rank), str(n)) for n in SIZES]
        expires = time.monotonic() + 80
        while len(SIZES) > calls(net, ("all_gather", INSIDE)) and time.monotonic() < expires:
            time.sleep(0.001)
        launched = calls(net, ("all_gather", INSIDE))
        unseen = net.ledger.rows["all_reduce", BETWEEN].exposed_seconds
        for handle in handles:
            handle.wait()
        return [launched, unseen]

    assert run_ranks(run, 4) == [[len(SIZES), 0.0]] * 4, "the waits of the thread are not the caller's"


def calls(net: Net, row: tuple[str, str]) -> int:
    return net.ledger.rows[row].calls if row in net.ledger.rows else 0


@pytest.mark.capability("G8")
def test_a_rank_that_does_not_come_is_a_deadline_and_what_waits_behind_ends_with_it() -> None:
    def run(cluster: Cluster) -> list[str]:
        net = Net(60.0)
        path = hierarchical_on(cluster, 2, net)
        net.deadline_seconds = 1.0  # they have met by now, which may take longer
        if cluster.global_rank == 3:
            time.sleep(3.0)
            return []
        handles = [path.all_reduce(values(n, 0), str(n)) for n in (8, 8, 8, 8)]
        said = []
        for handle in handles:
            with pytest.raises(CommunicationError) as caught:
                handle.wait()
            said.append(f"{type(caught.value).__name__} {caught.value}")
        return said

    *early, absent = run_ranks(run, 4, group_deadline=20.0)
    assert absent == []
    for said in early:
        assert said[0].startswith((DeadlineError.__name__, CommunicationError.__name__))
        assert INSIDE in said[0] or BETWEEN in said[0]
        assert said[1:] == said[:1] * 3, "the others did not wait once more"
    assert any(said[0].startswith(DeadlineError.__name__) for said in early)


@pytest.mark.capability("G8")
def test_uneven_nodes_are_refused_with_their_numbers() -> None:
    def run(cluster: Cluster) -> str:
        group = Mesh.build(cluster, {"replica": 3}).replica
        with pytest.raises(StrategyError) as caught:
            NodeLevels.build(group, group_ranks_by_node(group.ranks, [0, 0, 1]))
        return str(caught.value)

    for said in run_ranks(run, 3):
        assert "different numbers of ranks of the group 'replica': 2, 1" in said
        assert "equally many processes on every node" in said


@pytest.mark.capability("G8")
@pytest.mark.parametrize("route", [build_hierarchical, build_tree])
def test_another_device_is_refused_with_what_to_do(route) -> None:
    with pytest.raises(StrategyError, match="trains on cuda") as caught:
        route(None, SimpleNamespace(device=torch.device("cuda")))
    assert "remove it" in caught.value.next_step


def test_ranks_are_grouped_by_node_in_ascending_order() -> None:
    assert group_ranks_by_node((0, 1, 2, 3), [0, 0, 1, 1]) == [(0, 1), (2, 3)]
    assert group_ranks_by_node((0, 2, 4, 5), [1, 0, 0, 1, 1, 0]) == [(0, 4), (2, 5)]
    assert group_ranks_by_node((0, 1), [0, 0]) == [(0, 1)]
