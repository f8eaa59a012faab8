"""Micro-batches: disjoint, complete, balanced, and the same whatever the world size."""

from __future__ import annotations

import numpy as np
import pytest

from paceline.data.sample_order import KeyedOrder
from paceline.data.work import LockstepWork, MicroBatch, split_evenly
from paceline.errors import StrategyError
from paceline.state.keys import key


def all_micro_batches(order: KeyedOrder, shards: int, num_replicas: int, step: int) -> list[MicroBatch]:
    works = [LockstepWork(order, shards, 9, rank, num_replicas) for rank in range(num_replicas)]
    return [micro_batch for work in works for micro_batch in work.micro_batches(step)]


@pytest.mark.capability("A4", "M1")
def test_split_is_complete_disjoint_and_balanced() -> None:
    for num_items in (0, 1, 5, 8, 63, 64, 65, 1000):
        for parts in (1, 2, 3, 4, 7, 8, 64):
            shares = [split_evenly(num_items, parts, part) for part in range(parts)]
            assert [item for share in shares for item in share] == list(range(num_items))
            assert max(map(len, shares)) - min(map(len, shares)) <= 1


@pytest.mark.capability("A4")
@pytest.mark.parametrize("size", [8, 13, 30, 32])
@pytest.mark.parametrize("shards", [1, 3, 8])
def test_shards_of_a_batch_are_its_parts(size: int, shards: int) -> None:
    order = KeyedOrder(100, size, 1)
    for step in range(2 * order.steps_per_epoch):
        micro_batches = all_micro_batches(order, shards, 1, step)
        assert np.array_equal(
            np.concatenate([micro_batch.indices for micro_batch in micro_batches]), order.batch(step)
        )
        sizes = [len(micro_batch.indices) for micro_batch in micro_batches]
        assert min(sizes) >= 1
        if order.batch_size(step) >= shards:
            assert len(micro_batches) == shards
            assert max(sizes) - min(sizes) <= 1


@pytest.mark.capability("A4", "A5")
@pytest.mark.parametrize("num_replicas", [2, 3, 4, 5, 7, 8])
def test_micro_batches_do_not_depend_on_the_number_of_replicas(num_replicas: int) -> None:
    order = KeyedOrder(203, 32, 1)
    for step in range(order.steps_per_epoch + 3):
        alone = all_micro_batches(order, 8, 1, step)
        together = all_micro_batches(order, 8, num_replicas, step)
        assert [(u.step, u.shard, u.key, u.indices.tolist()) for u in together] == [
            (u.step, u.shard, u.key, u.indices.tolist()) for u in alone
        ]


@pytest.mark.capability("A5", "A12")
@pytest.mark.parametrize("num_replicas", [1, 2, 3, 4, 8])
@pytest.mark.parametrize("num_samples", [1, 7, 97, 100, 129])
def test_ragged_epochs_use_every_sample_exactly_once(num_samples: int, num_replicas: int) -> None:
    """Replicas see different numbers of samples, some none in the last step; the count is exact."""
    order = KeyedOrder(num_samples, 16, 1)
    for epoch in range(2):
        seen: list[list[int]] = [[] for _ in range(num_replicas)]
        steps_taken = set()
        for rank in range(num_replicas):
            work = LockstepWork(order, 8, 1, rank, num_replicas)
            steps = range(epoch * order.steps_per_epoch, (epoch + 1) * order.steps_per_epoch)
            seen[rank] = [
                i
                for step in steps
                for micro_batch in work.micro_batches(step)
                for i in micro_batch.indices.tolist()
            ]
            steps_taken.add(len(steps))
        assert sorted(i for part in seen for i in part) == list(range(num_samples))
        assert len(steps_taken) == 1  # nobody runs out of steps first, so nobody waits for ever


def test_seven_samples_on_eight_replicas_leave_one_without_a_micro_batch() -> None:
    order = KeyedOrder(7, 16, 1)
    works = [LockstepWork(order, 8, 1, rank, 8) for rank in range(8)]
    counts = [len(work.micro_batches(0)) for work in works]
    assert sorted(counts) == [0, 1, 1, 1, 1, 1, 1, 1]
    assert counts == [work.num_micro_batches(0) for work in works]


def test_micro_batch_keys_name_seed_step_and_shard() -> None:
    micro_batches = LockstepWork(KeyedOrder(64, 32, 1), 4, 9).micro_batches(1)
    assert [micro_batch.key for micro_batch in micro_batches] == [
        key(9, "unit", 1, shard) for shard in range(4)
    ]


def test_indices_are_read_only() -> None:
    (micro_batch, *_) = LockstepWork(KeyedOrder(64, 32, 1), 4, 9).micro_batches(0)
    with pytest.raises(ValueError, match="read-only"):
        micro_batch.indices[0] = 1


def test_more_replicas_than_shards_is_refused_with_what_would_work() -> None:
    with pytest.raises(StrategyError, match="9 replicas cannot share 8") as caught:
        LockstepWork(KeyedOrder(64, 32, 1), 8, 1, 0, 9)
    assert "batch.shards to 9" in caught.value.next_step
