"""Sums in one order over real ranks: equal bits for every number of ranks, and the bytes that this costs."""

from typing import Any

import pytest
import torch
from torch import Tensor

from paceline.comm import BucketReducer, GradientReduction, Net, ShardTally, StepTally
from paceline.comm.reduction import (
    TreeNodeOwners,
    TreeReducer,
    TreeSumByMessages,
    TreeSumInMemory,
    covering_nodes,
)
from paceline.comm.routes import SharedMemoryCollective, connect_single_host_group
from paceline.comm.tally import shard_tally_bytes
from paceline.data import split_evenly
from paceline.job.cluster import Cluster
from paceline.job.mesh import Mesh
from paceline.parallel.placement import ModelPlacement, ShardTransform, TensorPlacement
from paceline.state.slot import TensorSlot
from paceline.testing import run_ranks

pytestmark = pytest.mark.capability("I10")

SHAPES = ((12, 3), (24,), (12, 2, 2), (36, 4))  # equal rows for 1, 2, 3, 4 and 6 owners
NUM_SHARDS = 8
MESHES = [(2, 1), (3, 1), (4, 1), (5, 1), (1, 2), (1, 3), (2, 2)]  # replica, shard


def grad(index: int, shard: int) -> Tensor:
    """Of very different size, so that another order would round to other bits."""
    draw = torch.Generator().manual_seed(1000 * index + shard)
    return torch.randn(SHAPES[index], generator=draw) * 10.0 ** (shard % 5 - 2)


def tensors() -> dict[TensorSlot, Tensor]:
    found = [torch.zeros(shape) for shape in SHAPES]
    return {TensorSlot.whole(f"p{i}", tensor): tensor for i, tensor in enumerate(found)}


def held_by(place: int, shards: int) -> list[TensorPlacement]:
    """What an owner of rows holds, by index."""
    return list(
        ModelPlacement(tuple(tensors())).cut(ShardTransform(shards, {})).at({"shard": place}).values()
    )


def one_step(reducer: GradientReduction, block: range) -> list[Tensor | None]:
    slots = list(tensors())
    reducer.begin()
    for shard in block:
        reducer.micro_batch(range(shard, shard + 1), shard == block[-1])
        for index in reversed(range(len(SHAPES))):
            reducer.ready(slots[index], grad(index, shard))
    reducer.close()
    by_name = {slot.name: part for slot, part in reducer.finish().tensors.items()}
    found = [None if (part := by_name[slot.name]) is None else part.clone() for slot in slots]
    reducer.commit()
    return found


def alone() -> list[Tensor | None]:
    return one_step(TreeReducer(tensors(), [range(NUM_SHARDS)]), range(NUM_SHARDS))


def spread(
    cluster: Cluster, replicas: int, shards: int, in_memory: bool
) -> tuple[list[Tensor], dict[tuple[str, str], float], int]:
    """This rank's rows, what the ledger says was sent, and this rank's place among the owners of rows."""
    mesh, net = Mesh.build(cluster, {"replica": replicas, "shard": shards}), Net(30.0)
    blocks = [split_evenly(NUM_SHARDS, mesh.data.size, rank) for rank in range(mesh.data.size)]
    dealt = TreeNodeOwners([covering_nodes(block) for block in blocks], mesh.data, mesh.replica)
    sums = TreeSumByMessages(dealt, net)
    if in_memory:
        links = connect_single_host_group(mesh.data, net)
        sums = TreeSumInMemory(dealt, SharedMemoryCollective(net, mesh.data, links))
    place = mesh.axes["shard"].rank
    parts = {held.computes: held.parts for held in held_by(place, shards)}
    reducer = BucketReducer(tensors(), parts, sums, 256)
    before = {row: entry.sent_bytes for row, entry in net.ledger.rows.items()}
    one_step(reducer, blocks[mesh.data.rank])
    sent = {
        row: entry.sent_bytes - before.get(row, 0.0)
        for row, entry in net.ledger.rows.items()
        if entry.sent_bytes > before.get(row, 0.0)
    }
    reducer.begin()
    for index in range(len(SHAPES) // 2):  # a step that is aborted leaves nothing behind
        reducer.micro_batch(range(blocks[mesh.data.rank].start, blocks[mesh.data.rank].start + 1), True)
        reducer.ready(list(parts)[index], torch.full(SHAPES[index], 1e9))
    reducer.abort()
    found = one_step(reducer, blocks[mesh.data.rank])
    return found, sent, place


@pytest.mark.capability("G14")
@pytest.mark.parametrize("replicas, shards", MESHES)
def test_sums_have_the_bits_of_one_rank_and_cost_what_the_closed_form_says(
    replicas: int, shards: int
) -> None:
    """By messages, and in memory."""
    right, num_ranks = alone(), replicas * shards
    num_bytes = sum(4 * torch.Size(shape).numel() for shape in SHAPES)
    nodes = max(len(covering_nodes(split_evenly(NUM_SHARDS, num_ranks, rank))) for rank in range(num_ranks))

    def both(cluster: Cluster) -> list[Any]:
        return [spread(cluster, replicas, shards, in_memory) for in_memory in (False, True)]

    for found, sent, place in [one for rank in run_ranks(both, num_ranks) for one in rank]:
        for index, (whole, held) in enumerate(zip(right, held_by(place, shards), strict=True)):
            assert torch.equal(found[index], whole[held.updates.index])
        if (replicas, shards) == (2, 1):
            assert sent == {("all_reduce", "data"): num_bytes} or sent == {("all_reduce", "world"): num_bytes}
        else:
            padding = 4 * num_ranks * len(SHAPES)  # a row is a multiple of the number of replicas
            expected = nodes * (num_ranks - 1) / num_ranks * num_bytes
            expected += (replicas - 1) / replicas * num_bytes / shards
            assert expected - 1e-6 <= sum(sent.values()) <= expected + (nodes + 1) * padding


def test_another_order_would_have_other_bits() -> None:
    """Twin: these gradients can tell one order of additions from another."""
    plain = [sum((grad(i, s) for s in range(1, NUM_SHARDS)), start=grad(i, 0)) for i in range(len(SHAPES))]
    assert not all(torch.equal(a, b) for a, b in zip(plain, alone(), strict=True))


def agreed(cluster: Cluster, by_shard: bool) -> tuple[float, float, list[float], float]:
    """Total, count, changes of buffers and bytes, of tallies whose sums depend on the order."""
    world, net = Mesh.build(cluster, {"replica": cluster.world_size}).world, Net(30.0)
    draw = torch.Generator()
    block = split_evenly(NUM_SHARDS, world.size, world.rank)
    sums = torch.randn(NUM_SHARDS, 2, generator=draw.manual_seed(7), dtype=torch.float64)
    changes = torch.randn(NUM_SHARDS, 5, generator=draw, dtype=torch.float64)
    sums, changes = sums[block.start : block.stop], changes[block.start : block.stop]
    total, count = sums.sum(0).tolist()
    head = StepTally(float(len(block)), total, count, {}, 0.0, [1.0], changes.sum(0))
    tally = ShardTally(head, NUM_SHARDS, block, sums, list(changes)) if by_shard else head
    found = tally.agree(net, world, torch.device("cpu")).wait()
    (sent,) = [entry.payload_bytes for entry in net.ledger.rows.values()] or [0.0]
    return found.total, found.count, found.buffers.tolist(), sent


@pytest.mark.capability("J11", "G14")
def test_losses_and_buffers_are_added_in_the_order_of_the_shards() -> None:
    *right, _ = run_ranks(agreed, 1, True)[0]
    for num_ranks in (2, 3, 5):
        for *found, sent in run_ranks(agreed, num_ranks, True):
            assert found == right
            assert sent == shard_tally_bytes(NUM_SHARDS, 0, 1, 5)
    assert any(found[:3] != tuple(right) for found in run_ranks(agreed, 3, False)), "twin: added by rank"
