"""Buckets on real ranks: right sums and no deadlock, in whatever order gradients become ready."""

import random

import pytest
import torch
from torch import Tensor, nn

from paceline.comm import BucketReducer, Net, PlainWire, build_reducer
from paceline.comm.buckets import plan_buckets
from paceline.mesh import Group, Mesh
from paceline.testing import run_ranks

NUM_PARAMETERS, NUM_STEPS = 12, 3


def parameters() -> list[nn.Parameter]:
    """Sizes from nothing to several buckets, two types, interleaved."""
    draw = random.Random(4)
    return [
        nn.Parameter(
            torch.zeros(draw.choice((0, 1, 5, 30)), 3, dtype=draw.choice((torch.float32, torch.float64)))
        )
        for _ in range(NUM_PARAMETERS)
    ]


def gradient(rank: int, step: int, index: int) -> Tensor | None:
    """What a rank has for a parameter; some ranks have none for some, and nobody has one for parameter 5."""
    if index == 5 or (rank + step + index) % 4 == 0:
        return None
    p = parameters()[index]
    draw = torch.Generator().manual_seed(1 + rank * 1000 + step * 100 + index)
    return torch.randint(-8, 9, p.shape, generator=draw).to(p.dtype)  # whole numbers: sums are exact


def expected(world: int, step: int, index: int) -> Tensor:
    grads = [gradient(rank, step, index) for rank in range(world)]
    return sum((g for g in grads if g is not None), start=torch.zeros_like(parameters()[index].detach()))


class SwappedLaunch(BucketReducer):
    """The mutation twin: launches a bucket when it is full, not when it is its turn."""

    def _launch_full(self) -> None:
        for bucket in self._buckets:
            if not bucket.missing and bucket.handle is None:
                bucket.handle = self._wire.all_reduce(bucket.flat, "")


class NotReduced(BucketReducer):
    """The mutation twin: the sums of the first bucket stay at home."""

    def _launch_full(self) -> None:
        wire = self._wire
        whole = wire.group
        while self._next < len(self._buckets) and not self._buckets[self._next].missing:
            bucket, alone = self._buckets[self._next], Group("replica", (whole.rank,), 0)
            bucket.handle = wire.net.all_reduce(bucket.flat, whole if self._next else alone)
            self._next += 1


def reduce_steps(cluster, kind, bucket_bytes: int) -> list[list[Tensor]]:
    group = Mesh.build(cluster, {"replica": cluster.world_size}).replica
    reducer = kind(parameters(), PlainWire(Net(20.0), group), bucket_bytes)
    results = []
    for step in range(NUM_STEPS):
        order = list(range(NUM_PARAMETERS))
        random.Random(group.rank * 10 + step).shuffle(order)  # every rank in its own order
        reducer.begin()
        for index in order:
            reducer.ready(index, gradient(group.rank, step, index))
        results.append([torch.zeros(0) if g is None else g.clone() for g in reducer.finish().tensors])
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
    assert wrong(run_ranks(reduce_steps, world, build_reducer, bucket_bytes)) == []


@pytest.mark.capability("G10")
def test_a_bucket_that_was_not_reduced_is_found() -> None:
    found = {index for _, _, index in wrong(run_ranks(reduce_steps, 2, NotReduced, 200))}
    assert found
    assert found <= set(plan_buckets(parameters(), 200)[0])


@pytest.mark.capability("G10")
def test_without_one_order_of_launch_the_sums_would_be_wrong() -> None:
    """Equal sizes, so that swapped buckets do not break the backend but silently add up what differs."""

    def run(cluster, kind) -> list[list[float]]:
        group = Mesh.build(cluster, {"replica": 2}).replica
        reducer = kind([nn.Parameter(torch.zeros(4)) for _ in range(2)], PlainWire(Net(20.0), group), 1)
        reducer.begin()
        for index in (0, 1) if group.rank == 0 else (1, 0):
            reducer.ready(index, torch.full((4,), 10.0**index))
        return [g.tolist() for g in reducer.finish().tensors]

    assert run_ranks(run, 2, BucketReducer) == [[[2.0] * 4, [20.0] * 4]] * 2
    assert run_ranks(run, 2, SwappedLaunch) == [[[11.0] * 4, [11.0] * 4]] * 2


@pytest.mark.capability("G10")
@pytest.mark.parametrize("bucket_bytes, num_buckets", [(1, 8), (64, 4), (128, 2), (1 << 20, 1)])
def test_the_size_of_a_bucket_sets_the_number_of_launches(bucket_bytes: int, num_buckets: int) -> None:
    def count(cluster) -> tuple[int, int, int]:
        group = Mesh.build(cluster, {"replica": 2}).replica
        net = Net(20.0)
        reducer = BucketReducer([nn.Parameter(torch.zeros(8)) for _ in range(8)], PlainWire(net, group), bucket_bytes)
        for _ in range(3):
            reducer.begin()
            for index in reversed(range(8)):
                reducer.ready(index, torch.ones(8))
            reducer.finish()
        entry = net.ledger.rows["all_reduce", "replica"]
        return reducer.num_buckets, entry.calls, entry.payload_bytes

    assert run_ranks(count, 2) == [(num_buckets, 3 * num_buckets, 3 * 8 * 8 * 4)] * 2
