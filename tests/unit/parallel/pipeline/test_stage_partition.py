"""Stages are about equal, and a model that is too short for them is refused."""

import random
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from itertools import combinations, pairwise

import pytest

from paceline.errors import StrategyError
from paceline.parallel.pipeline.stage_partition import partition_at, partition_evenly
from paceline.plan.stage_budget import best_fitting_cut


@pytest.mark.capability("D1")
@pytest.mark.parametrize(
    "weights, parts, right",
    [
        ([1, 1, 1, 1], 2, [(0, 2), (2, 4)]),
        ([5, 1, 1, 1], 2, [(0, 1), (1, 4)]),
        ([0, 3, 0, 3, 0], 2, [(0, 2), (2, 5)]),
        ([1, 2, 3, 4, 5], 3, [(0, 3), (3, 4), (4, 5)]),
    ],
)
def test_stages_are_about_equal(weights: list[int], parts: int, right: list[tuple[int, int]]) -> None:
    found = partition_evenly(weights, parts)
    assert max(sum(weights[i] for i in part) for part in found) == max(sum(weights[a:b]) for a, b in right)
    assert [part.start for part in found[1:]] == [part.stop for part in found[:-1]]
    assert all(any(weights[i] for i in part) for part in found)


def test_more_stages_than_modules_are_refused() -> None:
    with pytest.raises(StrategyError, match="chain has only 2 modules"):
        partition_evenly([3, 0, 3], 3)


def slowest(weights: Sequence[int], places: Iterable[range]) -> int:
    return max(sum(weights[i] for i in place) for place in places)


def all_cuts(links: int, parts: int) -> list[list[range]]:
    inner = combinations(range(1, links), parts - 1)
    return [[range(a, b) for a, b in pairwise((0, *ends, links))] for ends in inner]


@pytest.mark.capability("C6")
def test_a_cut_by_time_is_as_good_as_the_best_of_all_cuts() -> None:
    draw = random.Random(0)
    for _ in range(60):
        links = draw.randint(2, 12)
        times = [draw.randint(0, 50) for _ in range(links)]
        sizes = [draw.choice((0, 1, 9)) for _ in range(links)]
        parts = draw.randint(1, 4)
        every = all_cuts(links, parts)
        allowed = [cut for cut in every if all(any(sizes[i] for i in place) for place in cut)]
        if not allowed:
            with pytest.raises(StrategyError):
                partition_evenly(times, parts, sizes)
            continue
        found = partition_evenly(times, parts, sizes)
        assert all(any(sizes[i] for i in place) for place in found)
        assert slowest(times, found) == min(slowest(times, cut) for cut in allowed)


def compare_with_all_cuts(times: list[int], stages: int, fits: Callable, chunks: int = 1) -> str:
    """Check the cut under a cap, and say whether it is none, or another than times alone would give."""
    sizes, parts = [1] * len(times), stages * chunks
    allowed = [cut for cut in all_cuts(len(times), parts) if all(fits(cut))]
    found = best_fitting_cut(times, sizes, stages, fits, chunks)
    if not allowed:
        assert found == []
        return "none"
    assert all(fits(found))
    assert slowest(times, found) == min(slowest(times, cut) for cut in allowed)
    return "the same" if all(fits(partition_evenly(times, parts, sizes))) else "another"


@pytest.mark.capability("C6")
@pytest.mark.parametrize("longest", [12, 15])  # of a longer chain, parts conclude from parts in them
def test_under_a_cap_a_cut_is_as_good_as_the_best_of_all_that_keep_it(longest: int) -> None:
    draw, found = random.Random(longest), Counter[str]()
    for _ in range(40):
        links = draw.randint(longest - 3, longest)
        times = [draw.randint(0, 50) for _ in range(links)]
        kept = [draw.randint(1, 50) for _ in range(links)]
        parts = draw.randint(2, 4)
        cap = draw.randint(sum(kept) * 2 // 3, sum(kept) * 4 // 3)

        def fits(cut: Sequence[range], kept: list[int] = kept, cap: int = cap) -> list[bool]:
            """As under 1F1B: stage k keeps as many micro-batches as there are stages from it on."""
            flying = range(len(cut), 0, -1)
            return [n * sum(kept[i] for i in place) <= cap for n, place in zip(flying, cut, strict=True)]

        found[compare_with_all_cuts(times, parts, fits)] += 1
    assert found["another"] > 3


@pytest.mark.capability("C6")
def test_under_a_cap_stages_of_two_chunks_are_as_good_as_the_best_of_all_that_keep_it() -> None:
    """What a stage keeps is the sum of its chunks: each may be as large alone."""
    draw, found = random.Random(7), Counter[str]()
    for _ in range(25):
        links, stages = draw.randint(6, 10), draw.randint(2, 3)
        times = [draw.randint(0, 50) for _ in range(links)]
        kept = [draw.randint(1, 50) for _ in range(links)]
        cap = draw.randint(sum(kept) // stages, sum(kept) * 3 // 2 // stages)

        def fits(cut: Sequence[range], kept=kept, cap=cap, stages=stages) -> list[bool]:
            sums = [sum(kept[i] for i in place) for place in cut]
            return [sum(sums[stage::stages]) <= cap for stage in range(stages)]

        found[compare_with_all_cuts(times, stages, fits, 2)] += 1
    assert found["another"] > 3 and found["none"] > 3


def test_a_heavy_link_moves_the_cut_that_parameters_would_not() -> None:
    sizes, times = [1] * 8, [4, 1, 1, 1, 1, 1, 1, 1]
    assert slowest(times, partition_evenly(sizes, 2)) == 7  # four and four
    assert slowest(times, partition_evenly(times, 2, sizes)) == 6  # a fifth less


@pytest.mark.parametrize(
    ("lengths", "said"),
    [([1], "names 1 of 3"), ([1, 1, 1], "has 3 modules"), ([1, 1, 3], "leaves a stage without")],
)
def test_named_lengths_must_fit(lengths: list[int], said: str) -> None:
    assert partition_at([2, 1, 2], [1, 0, 1, 1, 1], 3) == [range(2), range(2, 3), range(3, 5)]
    with pytest.raises(StrategyError, match=said):
        partition_at(lengths, [1, 0, 1, 1, 1], 3)
