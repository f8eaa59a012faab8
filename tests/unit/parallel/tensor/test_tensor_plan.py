"""A plan says what is wrong with it: a pattern that fits nothing, a layer not cut, the nearest name."""

from __future__ import annotations

import pytest
from torch import nn

from paceline.errors import StrategyError, TaskError
from paceline.models import GPT, GPT_TENSOR_PLAN, GPTConfig
from paceline.parallel.tensor import resolve_tensor_plan


def gpt() -> GPT:
    return GPT(GPTConfig(heads=2, width=8, layers=2))


def words(plan: dict[str, str]) -> dict[str, str]:
    return {entry.name: entry.word for entry in resolve_tensor_plan(plan, gpt())}


def test_a_pattern_fits_whole_names_and_their_ends() -> None:
    found = words(dict(GPT_TENSOR_PLAN))
    inside = ("attention", "feed_forward.expand", "feed_forward.project")
    assert [*found] == ["embed", *(f"blocks.{i}.{name}" for i in range(2) for name in inside), "head"]
    assert [*words({"blocks.*": "sequence"})] == ["blocks.0", "blocks.1"]  # a star ends at a dot
    assert words({"feed_forward.expand": "column", "feed_forward.project": "row"}).keys() < found.keys()


def test_of_patterns_that_fit_the_same_the_last_one_counts() -> None:
    found = words({**GPT_TENSOR_PLAN, "blocks.0.attention": "whole"})
    assert "blocks.0.attention" not in found and found["blocks.1.attention"] == "heads"


@pytest.mark.parametrize(
    ("plan", "says"),
    [
        ({"blocks.*.attend": "heads"}, "matches no module of GPT; the nearest is 'blocks.*.attention'"),
        ({"feed_forward.expnd": "column"}, "the nearest is 'feed_forward.expand'"),
        ({"blocks.*.attention": "head"}, "must be one of .*; did you mean 'heads'"),
        ({"expand": "column"}, "'blocks.0.feed_forward.project' is not split but follows "
         "'blocks.0.feed_forward.expand'"),
        ({"feed_forward.project": "row"}, "there is no column before it"),
        ({"expand": "column", "feed_forward.project": "column"}, "there is no row after it"),
        ({"norm": "column"}, "says column for 'norm', which is a LayerNorm"),
    ],
)  # fmt: skip
def test_a_plan_that_does_not_fit_is_refused(plan: dict[str, str], says: str) -> None:
    with pytest.raises(TaskError, match=says):
        resolve_tensor_plan(plan, gpt())


def test_layers_of_a_sequential_are_taken_in_turn() -> None:
    model = nn.Sequential(nn.Linear(2, 4), nn.ReLU(), nn.Linear(4, 4), nn.Linear(4, 2))
    with pytest.raises(TaskError, match="'2' is not split but follows '0'"):
        resolve_tensor_plan({"0": "column", "3": "row"}, model)
    assert len(resolve_tensor_plan({"0": "column", "2": "row"}, model)) == 2


def test_no_plan_is_an_error_of_the_strategy() -> None:
    with pytest.raises(StrategyError, match="there is no plan for GPT"):
        resolve_tensor_plan({}, gpt())
