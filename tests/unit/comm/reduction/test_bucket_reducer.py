"""Buckets: which parameters share one, in which order they are launched, and what a step must announce."""

import itertools
import random
from collections.abc import Mapping, Sequence
from types import SimpleNamespace

import pytest
import torch
from torch import Tensor, nn

from paceline.comm import BucketReducer, GradientReduction, LocalReducer, NativeCollective, Net
from paceline.comm.reduction import UnorderedSum
from paceline.comm.reduction.bucket_buffers import plan_buckets
from paceline.errors import CommunicationError
from paceline.job.mesh import RankGroup
from paceline.parallel.gradient_reduction import build_gradient_reduction
from paceline.parallel.sharded_model import unsharded_model
from paceline.session import Components
from paceline.state.slot import TensorSlot

ALONE = RankGroup("replica", (0,), 0)


class RecordingNet(Net):
    """Notes what is launched and when; on a group of one a reduction is the identity."""

    def __init__(self) -> None:
        super().__init__()
        self.launched: list[Tensor] = []

    def all_reduce(self, x: Tensor, group: RankGroup, reduction: str = "sum"):
        self.launched.append(x)
        return super().all_reduce(x, group, reduction)


def parameters(
    sizes: Sequence[int], dtypes: Sequence[torch.dtype] = (torch.float32,)
) -> dict[TensorSlot, Tensor]:
    return by_slot([torch.zeros(n, dtype=d) for n, d in zip(sizes, itertools.cycle(dtypes), strict=False)])


def by_slot(tensors: Sequence[Tensor]) -> dict[TensorSlot, Tensor]:
    return {TensorSlot.whole(str(i), tensor): tensor for i, tensor in enumerate(tensors)}


def alone(members: Mapping[TensorSlot, Tensor], net: Net, bucket_bytes: int) -> BucketReducer:
    """Buckets of a group of one."""
    sums = UnorderedSum(NativeCollective(net, ALONE), NativeCollective(net, ALONE))
    return BucketReducer(members, {slot: (slot,) for slot in members}, sums, bucket_bytes)


def num_bytes(bucket: Sequence[TensorSlot], members: Mapping[TensorSlot, Tensor]) -> int:
    return sum(members[slot].numel() * members[slot].element_size() for slot in bucket)


@pytest.mark.capability("G10")
@pytest.mark.parametrize("seed", range(20))
def test_every_parameter_is_in_one_bucket_last_first_and_types_are_apart(seed: int) -> None:
    draw = random.Random(seed)
    dtypes = [draw.choice((torch.float32, torch.bfloat16, torch.float64)) for _ in range(30)]
    members = parameters([draw.choice((0, 1, 7, 100, 3000)) for _ in range(30)], dtypes)
    limit = draw.choice((1, 64, 1000, 10_000, 10**9))
    buckets = plan_buckets(members, limit)
    assert [slot for bucket in buckets for slot in bucket] == list(reversed(members))
    for bucket, following in itertools.pairwise([*buckets, []]):
        assert len({members[slot].dtype for slot in bucket}) == 1
        assert num_bytes(bucket[:-1], members) < limit  # it was not full before its last member
        closed_by_type = following != [] and members[following[0]].dtype != members[bucket[0]].dtype
        assert num_bytes(bucket, members) >= limit or closed_by_type or following == []


def test_the_size_of_a_bucket_decides_how_many_there_are() -> None:
    members = parameters([256] * 12)  # 1 KiB each
    assert [len(plan_buckets(members, kib * 1024)) for kib in (1, 2, 3, 4, 12, 100)] == [12, 6, 4, 3, 1, 1]
    large = parameters([10_000])
    assert plan_buckets(large, 16) == [list(large)]  # a parameter is never split
    assert plan_buckets({}, 16) == []


def test_buckets_are_launched_in_one_order_whatever_the_order_of_the_gradients() -> None:
    members = parameters([4] * 6)
    slots = list(members)
    for order in ([5, 4, 3, 2, 1, 0], [0, 1, 2, 3, 4, 5], [2, 5, 0, 4, 1, 3]):
        net = RecordingNet()
        reducer = alone(members, net, 32)
        reducer.begin()
        for i in order:
            reducer.ready(slots[i], torch.full((4,), float(i)))
        assert [x.tolist() for x in net.launched] == [
            [5.0] * 4 + [4.0] * 4,
            [3.0] * 4 + [2.0] * 4,
            [1.0] * 4 + [0.0] * 4,
        ]


@pytest.mark.capability("G10")
def test_a_full_bucket_is_launched_before_the_others_are_full() -> None:
    net, members = RecordingNet(), parameters([4] * 4)
    reducer = alone(members, net, 32)
    reducer.begin()
    counts = []
    for slot in reversed(members):
        reducer.ready(slot, torch.ones(4))
        counts.append(len(net.launched))
    assert counts == [0, 1, 1, 2]


def test_results_have_the_shapes_of_the_parameters_and_share_the_flat_storage() -> None:
    members = by_slot([torch.zeros(2, 3), torch.zeros(()), torch.zeros(5, 0)])
    matrix, number, nothing = members
    reducer = alone(members, Net(), 1 << 20)
    reducer.begin()
    reducer.ready(matrix, torch.arange(6.0).view(3, 2).t())  # a gradient need not be contiguous
    reducer.ready(number, torch.tensor(7.0))
    reducer.ready(nothing, torch.zeros(5, 0))
    reducer.close()
    grads = reducer.finish()
    assert {slot: g.shape for slot, g in grads.tensors.items()} == {s: p.shape for s, p in members.items()}
    assert torch.equal(grads.tensors[matrix], torch.arange(6.0).view(3, 2).t())
    assert [flat.numel() for flat in grads.flats] == [7]
    grads.flats[0].mul_(2.0)
    assert grads.tensors[number] == 14.0


@pytest.mark.parametrize("kind", [LocalReducer, lambda members: alone(members, Net(), 16)])
def test_a_step_does_not_remember_the_one_before(kind) -> None:
    members = parameters([2, 2])
    one, other = members
    reducer: GradientReduction = kind(members)
    for value in (3.0, 5.0):
        reducer.begin()
        reducer.ready(other, torch.full((2,), value))
        reducer.ready(one, None)
        reducer.close()
        found = reducer.finish().tensors
        first, second = found[one], found[other]
        assert second.tolist() == [value, value]
        assert first is None or first.tolist() == [0.0, 0.0]


def test_a_gradient_that_is_missing_counts_as_zero_also_if_the_last_step_had_one() -> None:
    members = parameters([2, 2])
    one, other = members
    reducer = alone(members, Net(), 1 << 20)
    for grad in (torch.ones(2), None):
        reducer.begin()
        reducer.ready(one, torch.ones(2))
        reducer.ready(other, grad)
        reducer.close()
        grads = reducer.finish()
    assert grads.tensors[other].tolist() == [0.0, 0.0]
    kept = grads.agreed({one.name}, 0.5)
    assert kept.scale == 0.5
    assert kept.tensors[one] is not None
    assert kept.tensors[other] is None
    assert kept.flats is grads.flats


def test_a_parameter_that_was_never_announced_is_an_error_that_names_it() -> None:
    members = parameters([2] * 4)
    reducer = alone(members, Net(), 16)
    reducer.begin()
    for slot in list(members)[:0:-1]:
        reducer.ready(slot, torch.ones(2))
    with pytest.raises(CommunicationError, match=r"the gradients of \['0'\] were never announced"):
        reducer.close()


def test_one_rank_needs_no_buckets_and_copies_nothing() -> None:
    reducer, slot = built_for(ALONE)
    reducer.begin()
    grad = torch.ones(3)
    reducer.ready(slot, grad)
    reducer.close()
    assert reducer.finish().tensors[slot] is grad
    assert isinstance(built_for(RankGroup("replica", (0, 1), 0))[0], BucketReducer)


def built_for(replica: RankGroup) -> tuple[GradientReduction, TensorSlot]:
    """What a session reduces with, and the one slot of its model."""
    net, model = Net(), nn.Module()
    model.weight = nn.Parameter(torch.zeros(3))
    mesh = SimpleNamespace(
        data=replica, replica=replica, axes={"shard": ALONE}, group_over=lambda axes: replica
    )
    context = SimpleNamespace(
        mesh=mesh,
        net=net,
        recipe=SimpleNamespace(is_ordered=False),
        components=Components(),
        bucket_bytes=16,
        collective=lambda group: NativeCollective(net, group),
    )
    sharded_model = unsharded_model(model)
    return build_gradient_reduction(context, sharded_model), sharded_model.slots[0]
