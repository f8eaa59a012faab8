"""A steady step of ZeRO allocates nothing for the wire: buckets, and what comes of others, have places."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from paceline.comm import NativeCollective, Net
from paceline.comm.reduction import BucketReducer, ScatterPaths, ScatterReducer, ScatterWindow, UnorderedSum
from paceline.comm.routes import SharedMemoryCollective, connect_single_host_group
from paceline.comm.workspace import Workspace
from paceline.job.cluster import Cluster
from paceline.job.mesh import Mesh, duplicate_group
from paceline.parallel.placement import ModelPlacement, ShardTransform
from paceline.recipe import Recipe, Strategy
from paceline.session import Session
from paceline.state.slot import TensorSlot
from paceline.testing.parity import build_test_session
from paceline.testing.rank_processes import run_ranks
from tests.peak import allocated, bytes_now

WORLD, N, WARM = 2, 2 * 70_001, 3


@pytest.mark.capability("L4")
def test_scatters_and_gathers_of_zero_on_one_host_allocate_nothing() -> None:
    def ranks(cluster: Cluster) -> dict[str, list[int]]:
        group, net = Mesh.build(cluster, {"shard": WORLD}).axes["shard"], Net(60.0)
        links = connect_single_host_group(group, net)
        assert links is not None
        memory, rows = SharedMemoryCollective(net, group, links), torch.randn(WORLD, N // WORLD)
        found = {"scatter": steadily(lambda: memory.reduce_scatter(rows, "rows").wait())}
        memory.close()
        session = build_test_session(cluster, sharded("auto"))
        assert session.session_base is not None
        found["auto"] = steadily(session.session_base.layout.gather)
        session.close()
        return found

    for found in run_ranks(ranks, WORLD):
        assert not (found["scatter"] or found["auto"]), found


@pytest.mark.capability("L4")
@pytest.mark.parametrize("zero", [1, 2])
def test_gathers_of_zero_over_several_hosts_allocate_nothing(zero: int) -> None:
    """By Gloo. Under ZeRO 2 they come through the memory through which gradients leave."""

    def ranks(cluster: Cluster) -> tuple[list[int], list[int], int]:
        session = build_test_session(cluster, sharded("native", zero))
        assert session.session_base is not None
        list(session.rounds())
        before = bytes_now()
        found = steadily(session.session_base.layout.gather)
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
        tensors = {TensorSlot.whole(str(n), x): x for n, x in enumerate(values)}
        held = ModelPlacement(tuple(tensors)).cut(ShardTransform(WORLD, {})).at({"shard": shard.rank})
        apart = NativeCollective(net, replace(duplicate_group(shard, "scatter"), name=shard.name))
        ways = ScatterPaths(apart, NativeCollective(net, mesh.replica), shard, net)
        one = ScatterReducer(tensors, {x.computes: x.parts for x in held.values()}, ways, 2**12)
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
    tensors = {TensorSlot.whole(str(n), x): x for n, x in enumerate(values)}
    held = ModelPlacement(tuple(tensors)).cut(ShardTransform(WORLD, {})).at({"shard": shard.rank})
    turns = ScatterWindow(Workspace()) if in_turn else None
    sums = UnorderedSum(NativeCollective(net, shard), NativeCollective(net, mesh.replica), turns)
    one = BucketReducer(tensors, {x.computes: x.parts for x in held.values()}, sums, 2**12)
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
    sharded_model, group = session.runner.sharded_model, session.mesh.axes["shard"]
    for part in sharded_model.updates.values():
        part.data.fill_(group.rank)
    assert session.session_base is not None
    session.session_base.layout.gather()
    for slot, parts in sharded_model.parts.items():
        for rank, part in enumerate(parts):
            assert part is None or bool((sharded_model.computes[slot][part.inside(slot)] == rank).all())


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
