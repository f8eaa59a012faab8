"""The curve of a search for a learning rate: where the loss falls fastest, or an error that says why not."""

from __future__ import annotations

import math
import random
from collections.abc import Callable
from xml.etree import ElementTree

import pytest

from paceline.errors import DataError, RecipeError
from paceline.optim.lr_schedule import build_schedule
from paceline.recipe import ScheduleRecipe
from paceline.studies.learning_rate_curve import (
    LearningRateRange,
    find_learning_rate,
    render_curve_plot,
    render_curve_table,
)

RATES = LearningRateRange(1e-6, 1.0, 100)


def records(fall_at: float, noise: float = 0.0, rates: LearningRateRange = RATES) -> list[dict[str, float]]:
    """Losses that fall from 3 to 1 around a rate, and rise from a hundred times that rate on."""
    draw, found = random.Random(0), []
    for i in range(rates.steps):
        lr = rates.low * (rates.high / rates.low) ** (i / (rates.steps - 1))
        loss = 3 - 2 / (1 + (fall_at / lr) ** 2) + (lr / (fall_at * 100)) ** 2
        found.append({"step": i, "lr": lr, "loss": loss + noise * draw.gauss(0, 1)})
    return found


@pytest.mark.parametrize("fall_at", [1e-5, 1e-4, 1e-3])
@pytest.mark.parametrize("noise", [0.0, 0.05])
def test_the_suggestion_is_where_the_loss_falls_fastest(fall_at: float, noise: float) -> None:
    curve = find_learning_rate(records(fall_at, noise), RATES)
    assert fall_at / 2.5 < curve.suggestion < fall_at * 2.5 < curve.lowest < fall_at * 100
    assert find_learning_rate(records(fall_at, noise), RATES) == curve
    lines = render_curve_table(curve)
    assert lines[-2].startswith(f"suggestion: optimizer.lr = {curve.suggestion:.2g}") and 20 < len(lines) < 30
    drawing = ElementTree.fromstring(render_curve_plot(curve))
    assert sum(element.tag.endswith("polyline") for element in drawing.iter()) == 2


def test_the_curve_ends_where_the_loss_is_not_finite() -> None:
    steps: list[dict[str, object]] = [*records(1e-4)]
    steps[90] = {**steps[90], "loss": "nan"}
    curve = find_learning_rate(steps, RATES, "the loss is nan")
    assert len(curve.points) == 90 and "the run ended early: the loss is nan" in render_curve_table(curve)
    assert curve.suggestion == find_learning_rate(records(1e-4), RATES).suggestion


@pytest.mark.parametrize("loss", [lambda i: 3.0, lambda i: 3.0 + i, lambda i: 3 + math.sin(i * i)])
def test_without_a_descent_there_is_no_suggestion(loss: Callable[[int], float]) -> None:
    steps = [{**step, "loss": loss(i)} for i, step in enumerate(records(1e-4))]
    with pytest.raises(DataError, match="did not fall clearly"):
        find_learning_rate(steps, RATES)
    with pytest.raises(DataError, match="only 5 steps"):
        find_learning_rate(records(1e-4)[:5], RATES)


def test_a_rate_of_the_tasks_own_optimizer_is_refused() -> None:
    steps = records(1e-2, rates=LearningRateRange(1e-3, 1e3, 100))
    with pytest.raises(RecipeError, match="brings its own optimizer") as caught:
        find_learning_rate(steps, RATES)
    assert "--lr-range 0.001,1000" in caught.value.next_step


@pytest.mark.parametrize("text", ["1e-3", "1,1e-3", "0,1", "a,b", "1e-3,inf", "1,2,3", "nan,1"])
def test_what_is_no_range_is_refused(text: str) -> None:
    with pytest.raises(RecipeError, match="rising rates"):
        LearningRateRange.parse(text, 100)
    with pytest.raises(RecipeError, match="at least 10 steps"):
        LearningRateRange.parse("1e-3,1", 9)


def test_a_negative_rate_rises_geometrically_and_never_overflows() -> None:
    schedule = build_schedule(ScheduleRecipe(decay="exponential", rate=-math.log(1e6) / 99), 100, 32)
    assert schedule.factor(0) == 1 and schedule.factor(99) == pytest.approx(1e6)
    steep = build_schedule(ScheduleRecipe(decay="exponential", rate=-100.0), 100, 32)
    assert math.isfinite(steep.factor(99)) and steep.factor(99) == steep.factor(50)
