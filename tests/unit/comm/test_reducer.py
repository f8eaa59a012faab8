"""Buckets: which parameters share one, in which order they are launched, and what a step must announce."""

import itertools
import random
from collections.abc import Sequence

import pytest
import torch
from torch import Tensor, nn

from paceline.comm import BucketReducer, LocalReducer, Net, PlainWire, build_reducer
from paceline.comm.buckets import plan_buckets
from paceline.errors import CommunicationError
from paceline.mesh import Group

ALONE = Group("replica", (0,), 0)


class RecordingNet(Net):
    """Notes what is launched and when; on a group of one a reduction is the identity."""

    def __init__(self) -> None:
        super().__init__()
        self.launched: list[Tensor] = []

    def all_reduce(self, x: Tensor, group: Group, reduction: str = "sum"):
        self.launched.append(x)
        return super().all_reduce(x, group, reduction)


def parameters(sizes: Sequence[int], dtypes: Sequence[torch.dtype] = (torch.float32,)) -> list[nn.Parameter]:
    return [
        nn.Parameter(torch.zeros(n, dtype=d)) for n, d in zip(sizes, itertools.cycle(dtypes), strict=False)
    ]


def num_bytes(bucket: Sequence[int], members: Sequence[nn.Parameter]) -> int:
    return sum(members[i].numel() * members[i].element_size() for i in bucket)


@pytest.mark.capability("G10")
@pytest.mark.parametrize("seed", range(20))
def test_every_parameter_is_in_one_bucket_last_first_and_types_are_apart(seed: int) -> None:
    draw = random.Random(seed)
    dtypes = [draw.choice((torch.float32, torch.bfloat16, torch.float64)) for _ in range(30)]
    members = parameters([draw.choice((0, 1, 7, 100, 3000)) for _ in range(30)], dtypes)
    limit = draw.choice((1, 64, 1000, 10_000, 10**9))
    buckets = plan_buckets(members, limit)
    assert [i for bucket in buckets for i in bucket] == list(reversed(range(30)))
    for bucket, following in itertools.pairwise([*buckets, [-1]]):
        assert len({members[i].dtype for i in bucket}) == 1
        assert num_bytes(bucket[:-1], members) < limit  # it was not full before its last member
        closed_by_type = following != [-1] and members[following[0]].dtype != members[bucket[0]].dtype
        assert num_bytes(bucket, members) >= limit or closed_by_type or following == [-1]


def test_the_size_of_a_bucket_decides_how_many_there_are() -> None:
    members = parameters([256] * 12)  # 1 KiB each
    assert [len(plan_buckets(members, kib * 1024)) for kib in (1, 2, 3, 4, 12, 100)] == [12, 6, 4, 3, 1, 1]
    assert plan_buckets(parameters([10_000]), 16) == [[0]]  # a parameter is never split
    assert plan_buckets([], 16) == []


def test_buckets_are_launched_in_one_order_whatever_the_order_of_the_gradients() -> None:
    members = parameters([4] * 6)
    for order in ([5, 4, 3, 2, 1, 0], [0, 1, 2, 3, 4, 5], [2, 5, 0, 4, 1, 3]):
        net = RecordingNet()
        reducer = BucketReducer(members, PlainWire(net, ALONE), 32)
        reducer.begin()
        for i in order:
            reducer.ready(i, torch.full((4,), float(i)))
        assert [x.tolist() for x in net.launched] == [
            [5.0] * 4 + [4.0] * 4,
            [3.0] * 4 + [2.0] * 4,
            [1.0] * 4 + [0.0] * 4,
        ]


@pytest.mark.capability("G10")
def test_a_full_bucket_is_launched_before_the_others_are_full() -> None:
    net = RecordingNet()
    reducer = BucketReducer(parameters([4] * 4), PlainWire(net, ALONE), 32)
    reducer.begin()
    counts = []
    for i in (3, 2, 1, 0):
        reducer.ready(i, torch.ones(4))
        counts.append(len(net.launched))
    assert counts == [0, 1, 1, 2]


def test_results_have_the_shapes_of_the_parameters_and_share_the_flat_storage() -> None:
    members = [
        nn.Parameter(torch.zeros(2, 3)),
        nn.Parameter(torch.zeros(())),
        nn.Parameter(torch.zeros(5, 0)),
    ]
    reducer = BucketReducer(members, PlainWire(Net(), ALONE), 1 << 20)
    reducer.begin()
    reducer.ready(0, torch.arange(6.0).view(3, 2).t())  # a gradient need not be contiguous
    reducer.ready(1, torch.tensor(7.0))
    reducer.ready(2, torch.zeros(5, 0))
    grads = reducer.finish()
    assert [g.shape for g in grads.tensors if g is not None] == [p.shape for p in members]
    assert torch.equal(grads.tensors[0], torch.arange(6.0).view(3, 2).t())
    assert [flat.numel() for flat in grads.flats] == [7]
    grads.flats[0].mul_(2.0)
    assert grads.tensors[1] == 14.0


@pytest.mark.parametrize("kind", [LocalReducer, lambda p: BucketReducer(p, PlainWire(Net(), ALONE), 16)])
def test_a_step_does_not_remember_the_one_before(kind) -> None:
    reducer = kind(parameters([2, 2]))
    for value in (3.0, 5.0):
        reducer.begin()
        reducer.ready(1, torch.full((2,), value))
        reducer.ready(0, None)
        first, second = reducer.finish().tensors
        assert second.tolist() == [value, value]
        assert first is None or first.tolist() == [0.0, 0.0]


def test_a_gradient_that_is_missing_counts_as_zero_also_if_the_last_step_had_one() -> None:
    reducer = BucketReducer(parameters([2, 2]), PlainWire(Net(), ALONE), 1 << 20)
    for grad in (torch.ones(2), None):
        reducer.begin()
        reducer.ready(0, torch.ones(2))
        reducer.ready(1, grad)
        grads = reducer.finish()
    assert grads.tensors[1].tolist() == [0.0, 0.0]
    kept = grads.agreed([True, False], 0.5)
    assert kept.scale == 0.5
    assert kept.tensors[1] is None
    assert kept.flats is grads.flats


def test_a_parameter_that_was_never_announced_is_an_error_that_names_it() -> None:
    reducer = BucketReducer(parameters([2] * 4), PlainWire(Net(), ALONE), 16)
    reducer.begin()
    for i in (3, 2, 1):
        reducer.ready(i, torch.ones(2))
    with pytest.raises(CommunicationError, match=r"parameters \[0\] were never called ready"):
        reducer.finish()


def test_one_rank_needs_no_buckets_and_copies_nothing() -> None:
    members = parameters([3])
    reducer = build_reducer(members, PlainWire(Net(), ALONE), 16)
    reducer.begin()
    grad = torch.ones(3)
    reducer.ready(0, grad)
    assert reducer.finish().tensors[0] is grad
    pair = Group("replica", (0, 1), 0)
    assert isinstance(build_reducer(members, PlainWire(Net(), pair), 16), BucketReducer)
