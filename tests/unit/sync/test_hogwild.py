"""What ranks tell each other without a lock: how many updates were made, and how many arrived."""

import heapq
import math
import random
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from paceline.sync.hogwild import SharedCounters


def boards(num_ranks: int, num_ones: int = 8) -> list[SharedCounters]:
    taken, stops, clocks = (torch.zeros(num_ranks, dtype=torch.int64) for _ in range(3))
    ones = torch.zeros(num_ones)
    return [SharedCounters(taken, stops, clocks, ones, rank) for rank in range(num_ranks)]


@pytest.mark.capability("I5")
def test_updates_that_come_one_after_another_are_all_there() -> None:
    first, second = boards(2)
    for shared_counters in (first, second):
        shared_counters.begin()
    for shared_counters in (first, second, first):
        shared_counters.count()
    assert first.updates == second.updates == 3
    assert first.lost_update_share() == second.lost_update_share() == 0.0


@pytest.mark.capability("I5")
def test_one_of_two_that_are_made_at_once_is_lost_and_counted() -> None:
    """Both read before either writes, in half of the values: one of two updates is lost there."""
    first, second = boards(2)
    for shared_counters in (first, second):
        shared_counters.begin()
    read = second.ones[:4].clone()
    first.count()
    second.count()
    second.ones[:4] = read + 1.0  # what a processor does that has read before the other wrote
    assert first.lost_update_share() == second.lost_update_share() == 0.25


def test_a_round_counts_its_own_updates_only() -> None:
    first, second = boards(2)
    first.begin()
    first.count()
    first.ones.zero_()
    assert first.lost_update_share() == 1.0
    for shared_counters in (first, second):
        shared_counters.begin()
    second.count()
    assert first.lost_update_share() == 0.0


def test_a_request_to_stop_is_seen_by_all() -> None:
    first, second = boards(2)
    assert not first.stopping
    second.request_stop(True)
    assert first.stopping and second.stopping


class Moving(torch.Tensor):
    """Clocks of which one goes on each time that somebody has looked."""

    @classmethod
    def __torch_function__(
        cls, function: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        found = super().__torch_function__(function, types, args, kwargs or {})
        with torch._C.DisableTorchFunctionSubclass():
            if args[0].dim():
                args[0].as_subclass(torch.Tensor)[1] += 1
        return found


@pytest.mark.capability("I2", "I4", clause="without a server, on one host")
def test_another_rank_that_is_too_far_behind_is_seen_while_the_slowest_moves() -> None:
    (shared_counters, *_) = boards(3)
    shared_counters.clocks = torch.tensor([6, 4, 4]).as_subclass(Moving)
    assert shared_counters.behind(6, 1) is not None
    assert shared_counters.clocks.tolist() == [6, 5, 4], "it did not move while somebody looked"


def play(num_ranks: int, bound: float, seed: int, steps: int = 20) -> list[int]:
    """Ranks that take random times, and look at the board; how far ahead others were at every update."""
    draw, all_boards, ahead = random.Random(seed), boards(num_ranks), list[int]()
    speeds = [draw.choice((1.0, 1.0, 3.0, 30.0)) for _ in range(num_ranks)]
    due = [(0.0, rank) for rank in range(num_ranks)]
    step, computes = [0] * num_ranks, [False] * num_ranks
    while due:
        now, rank = heapq.heappop(due)
        shared_counters = all_boards[rank]
        if computes[rank]:
            ahead.append(max(step) - 1 - step[rank])  # the newest that anybody has applied
            step[rank] += 1
            shared_counters.reach(step[rank])
            computes[rank] = False
        if step[rank] == steps:
            continue
        computes[rank] = shared_counters.behind(step[rank], bound) is None
        heapq.heappush(due, (now + draw.random() * (speeds[rank] if computes[rank] else 0.1), rank))
    assert step == [steps] * num_ranks
    return ahead


@pytest.mark.capability("I2", "I4", clause="without a server, on one host")
@settings(max_examples=60)
@given(num_ranks=st.integers(1, 6), bound=st.integers(0, 4), seed=st.integers(0, 2**32))
def test_nobody_is_ever_more_than_the_bound_ahead(num_ranks: int, bound: int, seed: int) -> None:
    assert max(play(num_ranks, bound, seed)) <= bound


def test_without_a_bound_some_are() -> None:
    """The twin."""
    assert max(max(play(4, math.inf, seed)) for seed in range(20)) > 4
