"""Buckets on real ranks: right sums and no deadlock, in whatever order gradients become ready."""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping
from unittest.mock import patch

import pytest
import torch
from torch import Tensor, nn

from paceline import Loss, Task
from paceline.comm import BucketReducer, Collective, NativeCollective, Net
from paceline.comm.reduction import ScatterWindow, UnorderedSum
from paceline.comm.reduction.bucket_buffers import plan_buckets
from paceline.errors import CommunicationError
from paceline.job.cluster import Cluster
from paceline.job.mesh import Mesh
from paceline.parallel import gradient_reduction
from paceline.recipe import Recipe, Strategy
from paceline.session import build_session
from paceline.state.slot import TensorSlot
from paceline.testing import run_ranks
from paceline.testing.parity import CPU
from paceline.testing.planted_faults import skip_first_bucket

NUM_PARAMETERS, NUM_STEPS = 12, 3


def by_slot(tensors: list[Tensor]) -> dict[TensorSlot, Tensor]:
    return {TensorSlot.whole(str(i), tensor): tensor for i, tensor in enumerate(tensors)}


def parameters() -> dict[TensorSlot, Tensor]:
    """Sizes from nothing to several buckets, two types, interleaved."""
    draw = random.Random(4)
    return by_slot(
        [
            torch.zeros(draw.choice((0, 1, 5, 30)), 3, dtype=draw.choice((torch.float32, torch.float64)))
            for _ in range(NUM_PARAMETERS)
        ]
    )


def reducer_of(
    tensors: Mapping[TensorSlot, Tensor],
    mesh: Mesh,
    net: Net,
    bucket_bytes: int,
    kind: Callable[..., BucketReducer] = BucketReducer,
    changed: Callable[[Collective], Collective] = lambda collective: collective,
) -> BucketReducer:
    """Replicas only: every rank gets all of every tensor."""
    alone, replica = (NativeCollective(net, group) for group in (mesh.axes["shard"], mesh.replica))
    sums = UnorderedSum(alone, changed(replica))
    return kind(tensors, {slot: (slot,) for slot in tensors}, sums, bucket_bytes)


def gradient(rank: int, step: int, index: int) -> Tensor | None:
    """What a rank has for a parameter; some ranks have none for some, and nobody has one for parameter 5."""
    if index == 5 or (rank + step + index) % 4 == 0:
        return None
    p = list(parameters().values())[index]
    draw = torch.Generator().manual_seed(1 + rank * 1000 + step * 100 + index)
    return torch.randint(-8, 9, p.shape, generator=draw).to(p.dtype)  # whole numbers: sums are exact


def expected(world: int, step: int, index: int) -> Tensor:
    grads = [gradient(rank, step, index) for rank in range(world)]
    return sum(
        (g for g in grads if g is not None), start=torch.zeros_like(list(parameters().values())[index])
    )


class SwappedLaunch(BucketReducer):
    """The mutation twin: launches a bucket when it is full, not when it is its turn."""

    def _launch_full(self) -> None:
        for bucket in self._buckets:
            if not bucket.missing and bucket.handle is None:
                bucket.handle = self._sums.launch([buffer.rows for buffer in bucket.buffers], bucket.keys)


def reduce_steps(cluster, bucket_bytes: int, changed=lambda collective: collective) -> list[list[Tensor]]:
    mesh = Mesh.build(cluster, {"replica": cluster.world_size})
    tensors = parameters()
    slots, rank = list(tensors), mesh.replica.rank
    reducer = reducer_of(tensors, mesh, Net(20.0), bucket_bytes, changed=changed)
    results = []
    for step in range(NUM_STEPS):
        order = list(range(NUM_PARAMETERS))
        random.Random(rank * 10 + step).shuffle(order)  # every rank in its own order
        reducer.begin()
        for index in order:
            reducer.ready(slots[index], gradient(rank, step, index))
        reducer.close()
        found = reducer.finish().tensors
        results.append([torch.zeros(0) if (g := found[slot]) is None else g.clone() for slot in slots])
    return results


def wrong(results: list[list[list[Tensor]]]) -> list[tuple[int, int, int]]:
    """(rank, step, parameter) of every sum that is not what it should be."""
    return [
        (rank, step, index)
        for rank, steps in enumerate(results)
        for step, grads in enumerate(steps)
        for index, found in enumerate(grads)
        if not torch.equal(found, expected(len(results), step, index))
    ]


@pytest.mark.capability("G10")
@pytest.mark.parametrize("world, bucket_bytes", [(2, 1), (3, 200), (4, 200), (2, 1 << 20)])
def test_sums_are_right_whatever_order_the_ranks_are_ready_in(world: int, bucket_bytes: int) -> None:
    assert wrong(run_ranks(reduce_steps, world, bucket_bytes)) == []


@pytest.mark.capability("G10")
def test_a_bucket_that_was_not_reduced_is_found() -> None:
    found = {index for _, _, index in wrong(run_ranks(reduce_steps, 2, 200, skip_first_bucket))}
    assert found
    assert found <= {int(slot.name) for slot in plan_buckets(parameters(), 200)[0]}


@pytest.mark.capability("G10")
def test_without_one_order_of_launch_the_sums_would_be_wrong() -> None:
    """Equal sizes, so that swapped buckets do not break the backend but silently add up what differs."""

    def run(cluster, kind) -> list[list[float]]:
        mesh, tensors = Mesh.build(cluster, {"replica": 2}), by_slot([torch.zeros(4) for _ in range(2)])
        slots = list(tensors)
        reducer = reducer_of(tensors, mesh, Net(20.0), 1, kind)
        reducer.begin()
        for index in (0, 1) if mesh.replica.rank == 0 else (1, 0):
            reducer.ready(slots[index], torch.full((4,), 10.0**index))
        reducer.close()
        found = reducer.finish().tensors
        return [found[slot].tolist() for slot in slots]

    assert run_ranks(run, 2, BucketReducer) == [[[2.0] * 4, [20.0] * 4]] * 2
    assert run_ranks(run, 2, SwappedLaunch) == [[[11.0] * 4, [11.0] * 4]] * 2


@pytest.mark.capability("G10")
@pytest.mark.parametrize("bucket_bytes, num_buckets", [(1, 8), (64, 4), (128, 2), (1 << 20, 1)])
def test_the_size_of_a_bucket_sets_the_number_of_launches(bucket_bytes: int, num_buckets: int) -> None:
    def count(cluster) -> tuple[int, int, int]:
        mesh, net = Mesh.build(cluster, {"replica": 2}), Net(20.0)
        tensors = by_slot([torch.zeros(8) for _ in range(8)])
        reducer = reducer_of(tensors, mesh, net, bucket_bytes)
        for _ in range(3):
            reducer.begin()
            for slot in reversed(tensors):
                reducer.ready(slot, torch.ones(8))
            reducer.close()
            reducer.finish()
        entry = net.ledger.rows["all_reduce", "replica"]
        return reducer.num_buckets, entry.calls, entry.payload_bytes

    assert run_ranks(count, 2) == [(num_buckets, 3 * num_buckets, 3 * 8 * 8 * 4)] * 2


STEPS, WIDTH = 4, 16


class Branched(nn.Module):
    """The last layer is used by one rank only."""

    def __init__(self, uses: bool) -> None:
        super().__init__()
        self.first, self.norm = nn.Linear(WIDTH, WIDTH), nn.BatchNorm1d(WIDTH)
        self.body = nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(4)))
        self.head, self._uses = nn.Linear(WIDTH, WIDTH), uses

    def forward(self, x: Tensor) -> Tensor:
        found = self.body(self.norm(self.first(x)))
        return self.head(found) if self._uses else found


def steps(cluster: Cluster, waits: bool) -> int:
    """How many were taken."""
    torch.manual_seed(1)
    model, data = Branched(cluster.global_rank == 0), list(torch.randn(16, WIDTH))
    task = Task(model, data, lambda net, x: Loss(net(x).square().sum(), len(x)))
    recipe = Recipe.model_validate(
        {
            "task": "given",
            "steps": STEPS,
            "strategy": Strategy(replicas=1, shard=2, zero=1, route="native"),
            "batch": {"size": 8, "shards": 2, "sync_batchnorm": True},
            "optimizer": {"name": "sgd", "lr": 1e-3},
            "runtime": {
                "device": "cpu",
                "bucket_bytes": 4 * WIDTH * WIDTH,
                "deadline_seconds": 10.0 if waits else 60.0,
            },
        }
    )
    always = (
        (lambda context: ScatterWindow(context.workspace)) if waits else gradient_reduction._scatter_order
    )
    with patch.object(gradient_reduction, "_scatter_order", always):
        session = build_session(recipe, task, cluster, CPU, warn=lambda _: None)
    try:
        list(session.rounds())
    except CommunicationError:
        session.abort()
    return session.state.step


@pytest.mark.capability("A11", "L4")
def test_one_rank_has_no_gradient_for_a_bucket() -> None:
    assert run_ranks(steps, 2, False) == [STEPS] * 2


@pytest.mark.capability("A11", "L4")
def test_waiting_for_it_would_be_seen() -> None:
    """The twin."""
    assert max(run_ranks(steps, 2, True)) < STEPS
