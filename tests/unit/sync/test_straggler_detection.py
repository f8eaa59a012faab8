"""Who is named as slow, from made-up times with seeded noise; and why."""

from __future__ import annotations

import random
from statistics import median

import pytest

from paceline.sync.straggler_detection import (
    WINDOW_STEPS,
    SlowRank,
    StragglerJudge,
    find_slow_link,
    find_slow_rank,
)

RANKS, FACTOR = 4, 1.5


def drawn(draw: random.Random, seconds: float) -> float:
    return seconds * draw.lognormvariate(0, 0.15)


def named(steps: int, slow_from: int, cause: str, seed: int) -> list[tuple[int, SlowRank]]:
    """After which step who is named, where rank 2 takes twice as long from a step on."""
    draw, judge, found = random.Random(seed), StragglerJudge(FACTOR), []
    window: list[list[tuple[float, float]]] = []
    for step in range(steps):
        times = [(drawn(draw, 0.02), drawn(draw, 0.08)) for _ in range(RANKS)]
        if step >= slow_from:
            data, compute = times[2]
            times[2] = (data + 0.1, compute) if cause == "data" else (data, compute + 0.1)
        window.append(times)
        if (step + 1) % WINDOW_STEPS == 0:
            of = [[median(row[r][k] for row in window) for r in range(RANKS)] for k in (0, 1)]
            window = []
            said = judge.observe_window(find_slow_rank(*of, FACTOR))
            found += [] if said is None else [(step + 1, said)]
    return found


@pytest.mark.capability("I8", clause="the judge of data and compute, with drawn times")
@pytest.mark.parametrize("cause", ["data", "compute"])
@pytest.mark.parametrize("begin", range(20, 20 + WINDOW_STEPS))
def test_a_rank_that_takes_twice_as_long_is_named_within_ten_steps(cause: str, begin: int) -> None:
    for seed in range(20):
        ((step, slow),) = named(60, begin, cause, seed)
        assert (slow.rank, slow.cause) == (2, cause) and step - begin <= 10
        assert slow.seconds > FACTOR * slow.usual


@pytest.mark.capability("I8", clause="the judge of data and compute, with drawn times")
def test_nobody_is_blamed_in_200_clean_steps() -> None:
    assert [named(200, 200, "data", seed) for seed in range(100)] == [[]] * 100


@pytest.mark.capability("I8", clause="no alarm for noise of a busy host")
def test_a_delay_below_one_percent_of_the_step_names_nobody() -> None:
    """Two alarms that came in 200 clean steps on a busy host, for 0.66 ms where 0.20 ms is usual."""
    data, compute = [0.0, 0.0, 0.0], [2.0e-4, 6.6e-4, 2.0e-4]
    assert find_slow_rank(data, compute, FACTOR, step_seconds=0.05) is None
    slow = find_slow_rank(data, compute, FACTOR, step_seconds=0.01)
    assert slow is not None and slow.rank == 1


def test_one_window_names_nobody_and_a_rank_is_named_once_until_it_has_recovered() -> None:
    judge, slow = StragglerJudge(FACTOR), SlowRank(1, "data", 2.0, 1.0)
    said = [judge.observe_window(found) for found in (slow, None, slow, slow, slow, slow, None, slow, slow)]
    assert said == [None, None, None, slow, None, None, None, None, slow]


def test_a_rank_that_is_slow_in_turn_with_another_is_not_named() -> None:
    judge = StragglerJudge(FACTOR)
    turns = [SlowRank(rank, "data", 2.0, 1.0) for rank in (0, 1, 0, 1)]
    assert [judge.observe_window(found) for found in turns] == [None] * 4


def test_a_slow_link_has_two_slow_neighbours() -> None:
    found = find_slow_link([0.01, 0.01, 0.2, 0.25, 0.01], FACTOR)
    assert found is not None and (found.rank, found.cause) == (2, "communication")
    assert find_slow_link([0.01, 0.01, 0.2, 0.01], FACTOR) is None  # one direction: nobody has two
    assert find_slow_link([0.01, 0.012, 0.009], FACTOR) is None


def test_communication_is_slow_where_even_the_last_to_come_waits_longer_than_before() -> None:
    judge = StragglerJudge(FACTOR)
    assert not any(judge.is_communication_slow([0.01, 0.5, 0.02]) for _ in range(8))  # others wait for rank 0
    assert judge.is_communication_slow([0.2, 0.5, 0.2]) and not judge.is_communication_slow(
        [0.011, 0.011, 0.011]
    )
    assert not StragglerJudge(FACTOR).is_communication_slow([9.0, 9.0])  # nothing is known yet
