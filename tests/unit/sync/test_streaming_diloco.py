"""When fragments of the parameters travel, and which tensors are in each."""

from __future__ import annotations

from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from paceline.sync.streaming_diloco import FragmentSchedule, plan_fragments


@given(sizes=st.lists(st.integers(1, 10_000), min_size=1, max_size=30), fragments=st.integers(1, 12))
def test_every_tensor_is_in_one_fragment_and_none_is_empty(sizes: list[int], fragments: int) -> None:
    parts = plan_fragments(sizes, fragments)
    assert [index for part in parts for index in part] == [*range(len(sizes))]
    assert len(parts) == min(fragments, len(sizes)) and all(len(part) for part in parts)
    largest = max(sum(sizes[index] for index in part) for part in parts)
    assert largest <= sum(sizes) / len(parts) + max(sizes)


def test_equal_tensors_are_dealt_evenly() -> None:
    assert [len(part) for part in plan_fragments([5] * 12, 4)] == [3, 3, 3, 3]
    assert plan_fragments([100, 1, 1, 1], 2) == [range(1), range(1, 4)]


@pytest.mark.capability("I6", clause="streamed fragments that overlap with compute")
@given(fragments=st.integers(1, 8), each=st.integers(1, 9), rest=st.integers(0, 7), data=st.data())
def test_each_leaves_once_in_h_steps_and_one_at_most_is_under_way(
    fragments: int, each: int, rest: int, data: st.DataObject
) -> None:
    steps = fragments * each + min(rest, fragments - 1)
    delay = data.draw(st.integers(0, steps // fragments))
    streaming = FragmentSchedule(steps, fragments, delay)
    left = [
        [step for step in range(1, 4 * steps + 1) if streaming.sends_after(n, step)] for n in range(fragments)
    ]
    for mine in left:
        assert len(mine) == 4 and all(b - a == steps for a, b in pairwise(mine))
    ways = sorted(step for mine in left for step in mine)
    assert all(b - a >= delay for a, b in pairwise(ways))  # it arrives before the next
