"""Shares by speed: the slowest ends as early as it can, and every shard is run once."""

from itertools import product

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from paceline.data import KeyedOrder, LockstepWork
from paceline.sync.work_assignment import plan_shares, slowest_rank_seconds

SECONDS = st.lists(st.floats(1e-3, 10.0), min_size=1, max_size=4)


@pytest.mark.capability("A13")
@given(seconds=SECONDS, more=st.integers(0, 5))
@settings(max_examples=200)
def test_no_other_shares_end_earlier(seconds: list[float], more: int) -> None:
    shards = len(seconds) + more
    shares = plan_shares(seconds, shards)
    assert sum(shares) == shards and min(shares) >= 1
    others = (o for o in product(range(1, shards + 1), repeat=len(seconds)) if sum(o) == shards)
    assert slowest_rank_seconds(shares, seconds) <= min(
        slowest_rank_seconds(other, seconds) for other in others
    ) * (1 + 1e-12)


@pytest.mark.capability("A13")
def test_three_times_slower_is_a_third_of_the_shards() -> None:
    assert plan_shares([1.0, 3.0], 8) == (6, 2)
    assert plan_shares([1.0, 1.0, 1.0], 8) == (3, 3, 2)


@pytest.mark.capability("A13")
@pytest.mark.parametrize("step", [0, 4])
def test_whatever_the_shares_each_micro_batch_is_run_once_and_is_the_same(step: int) -> None:
    """Step 4 is a tail batch of 20 of 48 samples."""
    order = KeyedOrder(4 * 48 + 20, 48, seed=3, shuffle=True, drop_last=False)
    alone = {u.shard: (u.indices.tolist(), u.key) for u in LockstepWork(order, 6, 1).micro_batches(step)}
    for shares in ((3, 3), (5, 1), (1, 5)):
        works = [LockstepWork(order, 6, 1, rank, 2).dealt(shares) for rank in range(2)]
        dealt = [u for work in works for u in work.micro_batches(step)]
        assert [len(w.micro_batches(step)) for w in works] == [w.num_micro_batches(step) for w in works]
        assert {u.shard: (u.indices.tolist(), u.key) for u in dealt} == alone
        assert len(dealt) == len(alone)
