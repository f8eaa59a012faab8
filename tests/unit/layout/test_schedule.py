"""Pipeline schedules are data: their order is that of the papers, and they never wait for each other."""

import pytest

from paceline.errors import StrategyError
from paceline.layout.pipeline import Action, gpipe, one_f_one_b, validate
from paceline.layout.pipeline.stage import cut_evenly

GRID = [(p, m) for p in (1, 2, 3, 4, 8) for m in (1, 2, 3, 7, 16)]


def text(order: object) -> str:
    return " ".join(f"{a.kind}{a.micro_batch}" for a in order)


@pytest.mark.capability("D3")
@pytest.mark.parametrize("p, m", GRID)
def test_gpipe_runs_all_forwards_and_then_all_backwards(p: int, m: int) -> None:
    schedule = gpipe(p, m)
    right = " ".join([f"F{k}" for k in range(m)] + [f"B{k}" for k in reversed(range(m))])
    assert [text(order) for order in schedule] == [right] * p
    assert validate(schedule, m) == m  # activations of all micro-batches are stored


@pytest.mark.capability("D6")
@pytest.mark.parametrize("p, m", GRID)
def test_1f1b_stores_no_more_than_there_are_stages(p: int, m: int) -> None:
    assert validate(one_f_one_b(p, m), m) == min(p, m)


@pytest.mark.capability("D6")
def test_1f1b_alternates_once_it_is_full() -> None:
    first, last = one_f_one_b(2, 4)
    assert text(first) == "F0 F1 B0 F2 B1 F3 B2 B3"
    assert text(last) == "F0 B0 F1 B1 F2 B2 F3 B3"


@pytest.mark.capability("D1")
@pytest.mark.parametrize(
    "broken",
    [
        [[Action("F", 0)], [Action("F", 0), Action("B", 0)]],
        [[Action("B", 0), Action("F", 0)], [Action("F", 0), Action("B", 0)]],
        [
            [Action("F", 0), Action("B", 0), Action("F", 1), Action("B", 1)],
            [Action("F", 0), Action("F", 1), Action("B", 0), Action("B", 1)],
        ],
    ],
    ids=["incomplete", "backward first", "deadlock"],
)
def test_a_schedule_that_cannot_run_is_refused_before_it_does(broken: object) -> None:
    with pytest.raises(StrategyError):
        validate(broken, len({a.micro_batch for a in broken[1]}))


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
    found = cut_evenly(weights, parts)
    assert max(sum(weights[i] for i in part) for part in found) == max(sum(weights[a:b]) for a, b in right)
    assert [part.start for part in found[1:]] == [part.stop for part in found[:-1]]
    assert all(any(weights[i] for i in part) for part in found)


def test_more_stages_than_modules_are_refused() -> None:
    with pytest.raises(StrategyError, match="chain of 2 modules"):
        cut_evenly([3, 0, 3], 3)
