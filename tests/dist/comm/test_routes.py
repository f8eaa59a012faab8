"""Every route, operation and type at 1 to 8 ranks, against float64, with the bytes of its closed form."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from paceline.comm import Net
from paceline.comm.collectives import AllToAllCollective
from paceline.comm.routes import MessageCollective, NativeCollective
from paceline.comm.routes.grid_route import GridRoute
from paceline.comm.routes.recursive_doubling import RecursiveDoublingRoute
from paceline.comm.routes.ring_route import RingRoute
from paceline.comm.routes.tree_route import TreeRoute
from paceline.errors import CommunicationError
from paceline.job.cluster import Cluster
from paceline.job.mesh import Mesh, RankGroup, duplicate_group
from paceline.job.process_group import OwnedProcessGroup
from paceline.testing.rank_processes import run_ranks

Make = Callable[[Net, RankGroup], NativeCollective | MessageCollective]
ROUTES: dict[str, Make] = {
    "native": NativeCollective,
    "ring": lambda net, group: MessageCollective(net, group, RingRoute()),
    "tree": lambda net, group: MessageCollective(net, group, TreeRoute()),
    "recursive-doubling": lambda net, group: MessageCollective(net, group, RecursiveDoublingRoute()),
    "grid": lambda net, group: MessageCollective(net, group, GridRoute()),
}
TYPES = (torch.float32, torch.float64, torch.bfloat16, torch.float16, torch.int32, torch.int64)
LENGTHS = (1000, 17, 3, 1, 0)
CASES = [(dtype, n) for n in LENGTHS for dtype in TYPES]


def values(n: int, dtype: torch.dtype, rank: int) -> Tensor:
    """Small integers, so that every type adds them exactly, in any order."""
    g = torch.Generator().manual_seed(31 * n + rank)
    return torch.randint(-9, 10, (n,), generator=g).to(dtype)


def wrong_of(path: AllToAllCollective, dtype: torch.dtype, n: int) -> Iterator[str]:
    """The operations whose result is not that of float64."""
    size, rank = path.group.size, path.group.rank
    all_of = torch.stack([values(n, torch.float64, r) for r in range(size)])
    x = values(n, dtype, rank)
    if not torch.equal(path.all_reduce(x, "a").wait().double(), all_of.sum(0)):
        yield "all_reduce"
    x = values(n, dtype, rank)
    if not torch.equal(path.all_gather(x, "g").wait().double(), all_of):
        yield "all_gather"
    rows = torch.stack([values(n, dtype, 50 * rank + r) for r in range(size)])
    total = torch.stack([values(n, torch.float64, 50 * r + rank) for r in range(size)]).sum(0)
    if not torch.equal(path.reduce_scatter(rows, "s").wait().double(), total):
        yield "reduce_scatter"
    arrived = torch.stack([values(n, torch.float64, 50 * r + rank) for r in range(size)])
    if not torch.equal(path.all_to_all(rows, "x", torch.empty_like(rows)).wait().double(), arrived):
        yield "all_to_all"
    source = (n + 1) % size
    x = values(n, dtype, rank)
    if not torch.equal(path.broadcast(x, "b", source).wait().double(), all_of[source]):
        yield "broadcast"


@pytest.mark.capability("G1", "G2", "G5", "G6", "G7", "E4", "Z4")
def test_every_route_is_right_and_sends_what_its_form_says() -> None:
    """One group of processes, of which the first 1, 2, ... take part; each number has some cases."""
    assert_all_right(5, lambda size: [CASES[(7 * size + k) % len(CASES)] for k in range(2)] + [CASES[0]])


@pytest.mark.soak
def test_every_case_on_every_number_of_ranks() -> None:
    assert_all_right(8, lambda size: CASES)


def assert_all_right(world_size: int, cases_of: Callable[[int], list[tuple[torch.dtype, int]]]) -> None:
    def run(cluster: Cluster) -> tuple[list[str], dict[str, tuple[float, float]]]:
        world, wrong, forms = Mesh.build(cluster, {"replica": cluster.world_size}).world, [], {}
        for size in range(1, cluster.world_size + 1):
            handle = dist.new_group([*range(size)]) if size > 1 else None  # all ranks make it
            if world.rank >= size:
                continue
            own = RankGroup(
                f"first-{size}", tuple(range(size)), world.rank, handle and OwnedProcessGroup(handle)
            )
            for name, make in ROUTES.items():
                net = Net(100.0)
                path = make(net, own)
                for dtype, n in cases_of(size):
                    wrong += [f"{name} {op} {size} {dtype} {n}" for op in wrong_of(path, dtype, n)]
                if isinstance(path, MessageCollective):
                    net.ledger.require_expected_bytes()
                    forms[f"{name} {size}"] = net.ledger.total().sent_bytes
                    path.close()
        return wrong, forms

    for wrong, forms in run_ranks(run, world_size, deadline=3000.0):
        assert wrong == []
        assert all(sent > 0 for name, sent in forms.items() if not name.endswith(" 1"))


@pytest.mark.capability("G1")
def test_any_shape_and_stride_is_summed_in_place() -> None:
    """Scalars, empty ones, and what is not contiguous; a tensor comes back as it was, but for its values."""

    def run(cluster: Cluster) -> list[str]:
        group = Mesh.build(cluster, {"replica": cluster.world_size}).replica
        wrong = []
        for name, make in ROUTES.items():
            path = make(Net(100.0), duplicate_group(group, name))
            if not isinstance(path, MessageCollective):
                continue
            base = torch.arange(24.0).view(4, 6) + group.rank
            for x in (torch.tensor(1.0 + group.rank), torch.empty(2, 0), base.clone().T, base[:, ::2]):
                right = 3 * (x.clone() - group.rank) + 3
                if path.all_reduce(x, "x").wait() is not x or not torch.equal(x, right):
                    wrong.append(f"{name} {tuple(x.shape)}")
            path.close()
        return wrong

    assert run_ranks(run, 3) == [[]] * 3


@pytest.mark.capability("G6", "G7")
@pytest.mark.parametrize("size", range(2, 9))
def test_rounds_are_those_of_the_papers(size: int) -> None:
    log = (size - 1).bit_length()
    assert RingRoute().cost("all_reduce", size, 0, 100).rounds == 2 * (size - 1)
    assert TreeRoute().cost("all_reduce", size, 0, 100).rounds == 2 * log
    whole = size & (size - 1) == 0
    assert RecursiveDoublingRoute().cost("all_reduce", size, 0, 100).rounds == (log if whole else log - 1 + 2)
    ring = [RingRoute().cost("all_reduce", size, rank, 840).num_values for rank in range(size)]
    assert sum(ring) / size == pytest.approx(2 * (size - 1) / size * 840)
    columns = next(x for x in (2, 1) if size % x == 0)
    rows = size // columns
    grid = [GridRoute().cost("all_reduce", size, rank, 840).num_values for rank in range(size)]
    form = 2 * (columns - 1) / columns * 840 + 2 * (rows - 1) / rows * 840 / columns
    assert sum(grid) / size == pytest.approx(form)


class Chatty(RingRoute):
    """A ring that sends one message too many."""

    def all_reduce(self, mail: Any, x: Tensor) -> Tensor:
        mail.exchange((mail.rank + 1) % mail.size, x[:1], (mail.rank - 1) % mail.size, x[:1].clone())
        return super().all_reduce(mail, x)


@pytest.mark.capability("Z4")
def test_a_route_that_sends_more_than_its_form_is_found() -> None:
    def run(cluster: Cluster) -> str:
        group, net = Mesh.build(cluster, {"replica": 2}).replica, Net(100.0)
        path = MessageCollective(net, duplicate_group(group, "chatty"), Chatty())
        assert float(path.all_reduce(torch.ones(10), "x").wait().sum()) == 20.0
        path.close()
        try:
            net.ledger.require_expected_bytes()
        except CommunicationError as error:
            return str(error)
        return ""

    for text in run_ranks(run, 2):
        assert "44 bytes" in text and "40" in text
