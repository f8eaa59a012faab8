"""A steady step of ZeRO allocates nothing for the wire: buckets, and what comes of others, have places."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from paceline.cluster import Cluster
from paceline.comm import NativeCollective, Net
from paceline.comm.reduction import InAnyOrder, Reducer, Scatterer, Turns, Ways
from paceline.comm.routes import SharedMemoryCollective, meet_on_host
from paceline.comm.workspace import Workspace
from paceline.layout.placement import Placement, Shard
from paceline.mesh import Mesh, twin_group
from paceline.recipe import Recipe, Strategy
from paceline.slot import Slot
from paceline.testing.parity import session_of
from paceline.testing.ranks import run_ranks
from paceline.training import Session
from tests.peak import allocated, bytes_now

WORLD, N, WARM = 2, 2 * 70_001, 3


@pytest.mark.capability("L4")
def test_scatters_and_gathers_of_zero_on_one_host_allocate_nothing() -> None:
    def ranks(cluster: Cluster) -> dict[str, list[int]]:
        group, net = Mesh.build(cluster, {"shard": WORLD}).axes["shard"], Net(60.0)
        links = meet_on_host(group, net)
        assert links is not None
        memory, rows = SharedMemoryCollective(net, group, links), torch.randn(WORLD, N // WORLD)
        found = {"scatter": steadily(lambda: memory.reduce_scatter(rows, "rows").wait())}
        memory.close()
        session = session_of(cluster, sharded("auto"))
        assert session.grounds is not None
        found["auto"] = steadily(session.grounds.layout.gather)
        session.close()
        return found

    for found in run_ranks(ranks, WORLD):
        assert not (found["scatter"] or found["auto"]), found


@pytest.mark.capability("L4")
@pytest.mark.parametrize("zero", [1, 2])
def test_gathers_of_zero_over_several_hosts_allocate_nothing(zero: int) -> None:
    """By Gloo. Under ZeRO 2 they come through the memory through which gradients leave."""

    def ranks(cluster: Cluster) -> tuple[list[int], list[int], int]:
        session = session_of(cluster, sharded("native", zero))
        assert session.grounds is not None
        list(session.rounds())
        before = bytes_now()
        found = steadily(session.grounds.layout.gather)
        grown = bytes_now() - before
        group, x = session.mesh.axes["shard"], torch.zeros(N)
        other = steadily(lambda: session.net.all_gather(x, group, equal=True).wait())
        require_parts_of_all(session)
        session.close()
        return found, other, grown

    for found, other, grown in run_ranks(ranks, WORLD):
        assert other  # the count sees what a gather allocates
        assert not found and grown <= 1024


@pytest.mark.capability("L4")
def test_scatters_of_zero_2_over_several_hosts_allocate_nothing() -> None:
    """By Gloo: buckets, and what arrives of others."""

    def ranks(cluster: Cluster) -> tuple[list[int], float]:
        mesh, net = Mesh.build(cluster, {"shard": WORLD}), Net(60.0)
        shard, values = mesh.axes["shard"], [torch.zeros(2 + n, 512) for n in range(8)]
        tensors = {Slot.whole(str(n), x): x for n, x in enumerate(values)}
        held = Placement(tuple(tensors)).cut(Shard(WORLD, {})).at({"shard": shard.rank})
        apart = NativeCollective(net, replace(twin_group(shard, "scatter"), name=shard.name))
        ways = Ways(apart, NativeCollective(net, mesh.replica), shard, net)
        one = Scatterer(tensors, {x.computes: x.parts for x in held.values()}, ways, 2**12)
        grads = {slot: torch.full(slot.sizes, 1.0 + cluster.global_rank) for slot in tensors}
        sums: list[float] = []

        def step() -> None:
            one.begin()
            for _ in range(2):
                for slot in reversed([*tensors]):
                    one.ready(slot, grads[slot])
            one.close()
            sums[:] = [float(x.mean()) for x in one.finish().tensors.values() if x is not None]

        return steadily(step), max(sums) - min(sums) + sums[0]

    for found, total in run_ranks(ranks, WORLD):
        assert total == 2 * (1 + 2) and not found


def scattered_once(cluster: Cluster, in_turn: bool) -> tuple[list[int], float]:
    """What steps allocate that scatter buckets which stay, and how far a sum is from the right one."""
    mesh, net = Mesh.build(cluster, {"shard": WORLD}), Net(60.0)
    shard, values = mesh.axes["shard"], [torch.zeros(2 + n, 512) for n in range(8)]
    tensors = {Slot.whole(str(n), x): x for n, x in enumerate(values)}
    held = Placement(tuple(tensors)).cut(Shard(WORLD, {})).at({"shard": shard.rank})
    turns = Turns(Workspace()) if in_turn else None
    sums = InAnyOrder(NativeCollective(net, shard), NativeCollective(net, mesh.replica), turns)
    one = Reducer(tensors, {x.computes: x.parts for x in held.values()}, sums, 2**12)
    grads = {slot: torch.full(slot.sizes, 1.0 + cluster.global_rank) for slot in tensors}
    found: list[Tensor] = []

    def step() -> None:
        one.begin()
        for slot in reversed([*tensors]):
            one.ready(slot, grads[slot])
        one.close()
        found[:] = [x for x in one.finish().tensors.values() if x is not None]

    return steadily(step), max(float((x - 3.0).abs().max()) for x in found)


@pytest.mark.capability("L4")
def test_scatters_of_zero_1_over_several_hosts_allocate_nothing() -> None:
    """By Gloo: two at a time, through memory that stays; the sum lies in the bucket."""
    for found, off in run_ranks(scattered_once, WORLD, True):
        assert not found and off == 0.0
    for found, off in run_ranks(scattered_once, WORLD, False):
        assert found and off == 0.0  # the count sees what the path allocates


def require_parts_of_all(session: Session) -> None:
    """A gather puts the part of every rank in its place."""
    holding, group = session.placed.holding, session.mesh.axes["shard"]
    for part in holding.updates.values():
        part.data.fill_(group.rank)
    assert session.grounds is not None
    session.grounds.layout.gather()
    for slot, parts in holding.parts.items():
        for rank, part in enumerate(parts):
            assert part is None or bool((holding.computes[slot][part.inside(slot)] == rank).all())


def steadily(call: Callable[[], object]) -> list[int]:
    """What calls allocate that are not the first."""
    for _ in range(WARM):
        call()
    return allocated(call)


def sharded(route: str, zero: int = 1) -> Recipe:
    strategy = Strategy(replicas=1, shard=WORLD, zero=zero, route=route)
    return Recipe(
        task="digits",
        options={"model": "mlp", "hidden": [48, 48, 48, 48]},
        steps=1,
        strategy=strategy,
        runtime={"bucket_bytes": 2**12},
    )
