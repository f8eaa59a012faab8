"""Stages are about equal, and a model that is too short for them is refused."""

import pytest

from paceline.errors import StrategyError
from paceline.layout.pipeline.stage import cut_evenly


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
