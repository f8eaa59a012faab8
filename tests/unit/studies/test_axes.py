"""Axes, cells and targets, as they are typed."""

import pytest

from paceline.errors import RecipeError
from paceline.studies import MetricTarget, build_cells, parse_axis
from paceline.studies.sweep_summary import EvaluationPoint


def test_cells_are_all_combinations_in_order() -> None:
    cells = build_cells([parse_axis("batch=32,64"), parse_axis("replicas=1,2")])
    assert [cell.label for cell in cells] == [
        "batch=32 replicas=1",
        "batch=32 replicas=2",
        "batch=64 replicas=1",
        "batch=64 replicas=2",
    ]
    assert cells[1].overrides == ["batch.size=32", "strategy.replicas=2"]
    assert len({cell.folder for cell in cells}) == 4 and cells[0].folder == "batch=32_replicas=1"


def test_any_key_is_an_axis_and_values_may_be_lists() -> None:
    (first, second) = build_cells([parse_axis("options.hidden=[8, 8],[16]"), parse_axis("accumulation=4")])
    assert first.overrides == ["options.hidden=[8, 8]"] and first.accumulation == 4
    assert second.overrides == ["options.hidden=[16]"]
    assert parse_axis('strategy="sync=local:8",ddp').values == ('"sync=local:8"', "ddp")


@pytest.mark.parametrize("text", ["batch", "batch=", "=3", "batch=1,1"])
def test_what_is_no_axis_is_refused(text: str) -> None:
    with pytest.raises(RecipeError, match="expected WORD=VALUE"):
        parse_axis(text)


def test_an_axis_stands_once_under_any_name() -> None:
    with pytest.raises(RecipeError, match="two axes change the same key"):
        build_cells([parse_axis("batch=1"), parse_axis("batch.size=2")])
    with pytest.raises(RecipeError, match="accumulation: expected"):
        build_cells([parse_axis("accumulation=none")])[0].accumulation


def test_targets() -> None:
    assert MetricTarget.parse("accuracy>=0.95") == MetricTarget("accuracy", 0.95, upward=True)
    point = EvaluationPoint(1, 8, {"loss": 0.3, "accuracy": 0.9})
    assert MetricTarget.parse("loss <= 0.3").met(point) and not MetricTarget.parse("loss<=0.29").met(point)
    assert not MetricTarget.parse("accuracy>=0.91").met(point) and not MetricTarget.parse("other>=0").met(
        point
    )
    with pytest.raises(RecipeError, match="NAME<=VALUE"):
        MetricTarget.parse("accuracy")
