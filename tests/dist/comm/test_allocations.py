"""A steady step allocates nothing for the wire: coding, sending and the buckets of ZeRO have places."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import replace
from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch import Tensor

from paceline.comm import CodedCollective, Collective, Handle, NativeCollective, Net
from paceline.comm.codecs import CodecKeys, top_k
from paceline.comm.codecs.strategy_codec import build_coded_collective
from paceline.comm.collectives import CodingCollective, coded_collective, power_sgd
from paceline.comm.comm_thread import CommRounds, run_rounds
from paceline.comm.reduction import BucketReducer, ScatterPaths, ScatterReducer, ScatterWindow, UnorderedSum
from paceline.comm.routes import SharedMemoryCollective, connect_single_host_group, message_route
from paceline.comm.routes.grid_route import GridRoute
from paceline.comm.routes.message_route import MessageCollective, MessageRoute
from paceline.comm.routes.recursive_doubling import RecursiveDoublingRoute
from paceline.comm.routes.ring_route import RingRoute
from paceline.comm.routes.tree_route import TreeRoute
from paceline.comm.workspace import Workspace
from paceline.job.cluster import Cluster
from paceline.job.mesh import Mesh, RankGroup, duplicate_group
from paceline.parallel.placement import ModelPlacement, ShardTransform
from paceline.recipe import Recipe, Strategy
from paceline.session import Session
from paceline.state.slot import TensorSlot
from paceline.testing.parity import build_test_session
from paceline.testing.rank_processes import run_ranks
from tests.peak import allocated, bytes_now

WORLD, N, WARM = 2, 2 * 70_001, 3
WORDS = (
    "bf16",
    "fp16",
    "int8",
    "int4",
    "int2",
    "int8:stochastic",
    "fixed:8",
    "sign",
    "topk:0.01",
    "topk:0.01+int4",
    "dgc:0.01:0.9",
    "randomk:0.01",
    "randomk:0.1+int4",
    "lowrank:2",
    "lossless",
    "int8+lossless",
)
BY_HAND = "topk:0.01", "topk:0.01+int4", "topk:0.4"  # as where there is no compiler
HOPS: dict[str, MessageRoute] = {
    "ring": RingRoute(),
    "tree": TreeRoute(),
    "recursive-doubling": RecursiveDoublingRoute(),
    "grid": GridRoute(),
}


class Inline:
    """In place of `Line`: hops run on the thread that counts."""

    def __init__(self, name: str, count_seconds: Callable[[str, float], None], activity: Any) -> None: ...

    def submit(self, op: str, hops: Callable[[], Any]) -> Handle:
        return Handle.ready(hops())

    def submit_rounds(self, op: str, rounds: Callable[[int], CommRounds]) -> Handle:
        return Handle.ready(run_rounds(rounds(0)))

    def close(self) -> None: ...


class Wasteful:
    """bf16, with memory of its own each time."""

    needs_error_feedback, ragged, block = True, False, 1

    def num_bytes(self, num_values: int) -> int:
        return 2 * num_values

    def encode(self, x: Tensor, keys: CodecKeys, workspace: Workspace) -> Tensor:
        return x.to(torch.bfloat16).view(torch.uint8)

    def decode(self, payload: Tensor, out: Tensor, keys: CodecKeys, workspace: Workspace) -> None:
        out.copy_(payload.view(torch.bfloat16))


def steady(path: CodingCollective, net: Net) -> list[int]:
    """Measure what later steps allocate: a sum of a buffer of odd length, and one of rows."""
    whole, rows = torch.randn(N - 1), torch.randn(WORLD, N // WORLD)

    def step() -> None:
        net.step += 1
        path.all_reduce(whole, "whole").wait()
        path.reduce_scatter(rows, "rows").wait()
        if path.feedback is not None:
            path.feedback.commit()

    for _ in range(WARM):
        step()
    return allocated(step)


def steady_coding(group: RankGroup, word: str) -> list[int]:
    net = Net(60.0)
    return steady(build_coded_collective(NativeCollective(net, group), Strategy(codec=word), 5), net)


def allocated_by_sum(path: Collective) -> list[int]:
    """Measure what later sums allocate."""
    x = torch.randn(N)
    for _ in range(WARM):
        path.all_reduce(x, "whole").wait()
    return allocated(lambda: path.all_reduce(x, "whole").wait())


def allocated_by_scatter(path: Collective) -> tuple[list[int], list[int]]:
    """Measure what later scatters allocate: of rows that may be changed, and of others."""
    rows, memory = torch.randn(path.group.size, N), torch.empty(path.group.size - 1, N)
    for _ in range(WARM):
        path.reduce_scatter(rows, "rows", lambda: memory).wait()
    given = allocated(lambda: path.reduce_scatter(rows, "rows", lambda: memory).wait())
    return given, allocated(lambda: path.reduce_scatter(rows, "rows").wait())


@pytest.mark.capability("L4")
def test_scatters_along_hops_allocate_nothing() -> None:
    """Rows are summed where they lie; on four ranks, where a grid has two columns."""

    def ranks(cluster: Cluster) -> dict[str, tuple[list[int], list[int]]]:
        group: RankGroup = duplicate_group(Mesh.build(cluster, {"replica": 4}).replica, "scattered")
        net = Net(60.0)
        with patch.object(message_route, "CommThread", Inline):
            by_word = {word: MessageCollective(net, group, hops) for word, hops in HOPS.items()}
            return {word: allocated_by_scatter(path) for word, path in by_word.items()}

    for found in run_ranks(ranks, 4):
        assert {*found} == {*HOPS}
        assert all(not given and others for given, others in found.values()), found


@pytest.mark.capability("L4")
def test_a_steady_step_allocates_nothing_for_coding_and_sending() -> None:
    def ranks(cluster: Cluster) -> dict[str, list[int]]:
        group: RankGroup = duplicate_group(Mesh.build(cluster, {"replica": WORLD}).replica, "coded")
        found = {}
        with ExitStack() as patches:
            for module in (coded_collective, power_sgd, message_route):
                patches.enter_context(patch.object(module, "CommThread", Inline))
            for word in WORDS:
                found[word] = steady_coding(group, word)
            with patch.object(top_k, "load_kernels", lambda: None):
                found |= {f"{word}, no kernels": steady_coding(group, word) for word in BY_HAND}
            net = Net(60.0)
            found["wasteful"] = steady(CodedCollective(NativeCollective(net, group), Wasteful()), net)
            by_word = {name: MessageCollective(net, group, hops) for name, hops in HOPS.items()}
            found |= {name: allocated_by_sum(path) for name, path in by_word.items()}
            found["native"] = allocated_by_sum(NativeCollective(net, group))
        return found

    for found in run_ranks(ranks, WORLD):
        assert len(found.pop("wasteful")) >= 3  # the count sees what a codec allocates
        assert {*found} >= {*HOPS, "native"} and not any(found.values()), found


@pytest.mark.capability("L4")
def test_scatters_and_gathers_of_zero_on_one_host_allocate_nothing() -> None:
    def ranks(cluster: Cluster) -> dict[str, list[int]]:
        group, net = Mesh.build(cluster, {"shard": WORLD}).axes["shard"], Net(60.0)
        links = connect_single_host_group(group, net)
        assert links is not None
        memory, rows = (SharedMemoryCollective(net, group, links), torch.randn(WORLD, N // WORLD))
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
