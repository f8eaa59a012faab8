"""Shares that ranks plan by themselves over random delays: each sample once, and the gradient is whole."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterator
from itertools import product
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from paceline.comm import Gradients, StepTally
from paceline.data import KeyedOrder, LockstepWork
from paceline.errors import CommunicationError
from paceline.recipe import Strategy, support
from paceline.sync import UpdateStep
from paceline.sync.update import PendingUpdate, UpdateResult
from paceline.sync.work_assignment import (
    SPEED_WINDOW_STEPS,
    SharedMemorySpeeds,
    SpeedAssignment,
    num_window_rows,
    plan_shares,
    slowest_rank_seconds,
)
from tests.unit.sync.dealing_games import (
    END,
    SAMPLES,
    SHARDS,
    SIZE,
    VALUE,
    Node,
    OnHosts,
    on_one_host,
    unheard,
)


def require_whole(nodes: list[Node]) -> None:
    """All have the same shares in every step, every sample once, and the gradient of the whole batch."""
    order = nodes[0].whole.order
    for step in range(END):
        assert len({node.shown[step] for node in nodes}) == 1
        batch = order.batch(step, range(order.batch_size(step))).tolist()
        assert Counter(i for node in nodes for i in node.samples[step]) == Counter(batch)
        parts = [(node.weights[step], node.samples[step]) for node in nodes]
        found = sum(w * sum(VALUE[i] for i in own) / len(own) for w, own in parts if own)
        right = len(nodes) * sum(VALUE[i] for i in batch) / len(batch)
        assert found == pytest.approx(right, rel=1e-12)


def require_accounted(nodes: list[Node]) -> None:
    due = sum(nodes[0].whole.num_samples(step) for step in range(END))
    sums: dict[str, float] = defaultdict(float)
    for node in nodes:
        for name, value in node.shares.round_sums().items():
            sums[name] += value
    assert sums == {"taken": due, "dropped": 0}
    for node in nodes:
        node.shares.end_round(END, sums)
    with pytest.raises(CommunicationError, match="ran 1 sample, not"):
        nodes[0].shares.end_round(END, {"taken": 1.0, "dropped": 0.0})


@pytest.mark.capability("I2", clause="a rank that is slow has less to do, on one host")
@settings(max_examples=60, deadline=None)
@given(size=st.integers(2, 6), bound=st.integers(0, 9), seed=st.integers(0, 2**32))
def test_ranks_of_a_host_plan_alike_and_the_gradient_stays_whole(size: int, bound: int, seed: int) -> None:
    nodes = on_one_host(size, bound, seed)
    require_whole(nodes)
    require_accounted(nodes)


@pytest.mark.capability("I2", clause="a rank that is slow has less to do, between hosts")
@settings(max_examples=60, deadline=None)
@given(size=st.integers(2, 7), bound=st.integers(0, 9), seed=st.integers(0, 2**32))
def test_ranks_that_gossip_plan_alike_and_the_gradient_stays_whole(size: int, bound: int, seed: int) -> None:
    nodes = OnHosts(size, bound, seed).play()
    require_whole(nodes)
    require_accounted(nodes)


def ways(lag: int | None) -> Iterator[list[Node]]:
    for seed in range(20):
        yield on_one_host(4, 2, seed, lag)
        yield OnHosts(4, 2, seed, lag).play()


def test_shares_do_change_in_these_games() -> None:
    assert all(len({*nodes[0].shown}) > 1 for nodes in ways(None))


def test_a_step_earlier_not_all_would_know() -> None:
    """The twin of the lag, one less than it has to be."""
    with pytest.raises(CommunicationError, match="the times of window"):
        [on_one_host(4, 2, seed, lag=1) for seed in range(20)]
    with pytest.raises(CommunicationError, match="the times of window"):
        [OnHosts(4, 2, seed, lag=3).play() for seed in range(20)]


def test_without_weights_it_would_not_be_the_gradient_of_the_whole_batch() -> None:
    """The twin of the weight."""
    nodes = on_one_host(4, 2, 1)
    require_whole(nodes)
    for node in nodes:
        node.weights = [1.0] * END
    assert len({*nodes[0].shown}) > 1
    with pytest.raises(AssertionError):
        require_whole(nodes)


def test_ranks_of_one_speed_keep_even_shares_and_weights_of_one() -> None:
    words = torch.zeros(num_window_rows(0, SPEED_WINDOW_STEPS), 3, dtype=torch.int64)
    nodes = [Node(rank, [[1.0] * 4] * 3, SharedMemorySpeeds(words, rank), lag=0) for rank in range(3)]
    for step in range(END):
        for node in nodes:
            node.begin()
        for node in nodes:
            node.end()
        full = nodes[0].whole.num_samples(step) == SIZE
        assert all(node.shown[step] == (4, 4, 4) for node in nodes)
        assert not full or all(node.weights[step] == 1.0 for node in nodes)


def test_a_state_of_before_begins_measuring_anew() -> None:
    """A word that was written over since is not asked for."""
    words = torch.zeros(num_window_rows(0, SPEED_WINDOW_STEPS), 2, dtype=torch.int64)
    nodes = [Node(rank, [[1.0] * 4, [4.0] * 4], SharedMemorySpeeds(words, rank), lag=0) for rank in range(2)]
    for first, end in ((0, 30), (6, END)):
        for node in nodes:
            node.step = first
        for _ in range(first, end):
            for node in nodes:
                node.begin()
            for node in nodes:
                node.end()
    assert nodes[0].shown == nodes[1].shown and nodes[0].shown[-1] == (10, 2)


def stepped(make: Any, weighs: bool = True) -> tuple[list[float], float]:
    """Where three steps lead with three quarters of a batch, and the rate afterwards."""
    p = torch.nn.Parameter(torch.ones(1))
    optimizer = make([p])
    words = torch.zeros(2, 2, dtype=torch.int64)
    shares = SpeedAssignment([9, 3], 0, SharedMemorySpeeds(words, 0), lag=0, note=unheard)
    work = shares.assign(LockstepWork(KeyedOrder(SAMPLES, SIZE, seed=1), SHARDS, 1, 0, 2).dealt([9, 3]), 0)
    assert isinstance(work, LockstepWork) and shares.weight == 1.5
    found = []

    def step(record: PendingUpdate) -> None:
        p.grad = torch.full((1,), 0.5) * record.multiplier
        optimizer.step()

    def end(record: PendingUpdate) -> None:
        record.update = UpdateResult(1.0, 0.1, applied=True)

    state: Any = SimpleNamespace(optimizer=optimizer)
    update_step = UpdateStep(state, {}, {"step": step, "gather": end})
    update_step = shares.weighted(update_step) if weighs else update_step
    for _ in range(3):
        update_step.apply(Gradients({}, [], 1.0), StepTally(1, 0.0, 1.0, {}, 0.0, [], []))
        found.append(float(p.detach()))
    return found, optimizer.param_groups[0]["lr"]


def sgd(**more: Any) -> Any:
    return lambda params: torch.optim.SGD(params, lr=0.1, **more)


def test_sgd_takes_a_gradient_that_is_longer() -> None:
    found, rate = stepped(sgd(momentum=0.9))
    right = [1.0 - 0.1 * 0.75, 1.0 - 0.1 * 0.75 * (1 + 1.9), 1.0 - 0.1 * 0.75 * (1 + 1.9 + 2.71)]
    assert found == pytest.approx(right) and rate == 0.1


def test_adam_takes_a_step_that_is_longer() -> None:
    """Its own gradient would be divided by its own size."""

    def adam(params: Any) -> torch.optim.Optimizer:
        return torch.optim.AdamW(params, lr=0.1, weight_decay=0.0)

    assert stepped(adam)[0] == pytest.approx([1 - 0.15, 1 - 0.3, 1 - 0.45], abs=1e-5)
    assert stepped(adam, weighs=False)[0] == pytest.approx([0.9, 0.8, 0.7], abs=1e-5)
    assert stepped(adam)[1] == 0.1


@pytest.mark.parametrize("sync", ["hogwild", "hogwild:inf", "local:4", "every-step@8,gossip:2"])
def test_it_is_refused_where_nothing_bounds_how_far_ranks_are_apart(sync: str) -> None:
    found = support(Strategy.parse(f"sync={sync} balance=speed"), processes=2, shards=8)
    assert not found.ok and "balance=speed assigns the shards of" in found.reason
    assert found.nearest.balance == "even"
    assert support(Strategy.parse("sync=gossip:0 balance=speed"), processes=2, shards=8).ok


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
