"""The dynamic scale of an fp16 loss: halve at once, double after a clean run of updates."""

import pytest

from paceline.state.train_state import LossScale

pytestmark = pytest.mark.capability("K1")


def test_an_overflow_halves_and_starts_the_count_anew() -> None:
    scale = LossScale(1024.0, growth_steps=3)
    for overflow in (False, False, True, False, False):
        scale.update(overflow)
    assert (scale.value, scale.clean_steps) == (512.0, 2)
    scale.update(overflow=False)
    assert (scale.value, scale.clean_steps) == (1024.0, 0)


def test_it_doubles_once_in_every_growth_period() -> None:
    scale = LossScale(1.0, growth_steps=5)
    values = []
    for _ in range(15):
        scale.update(overflow=False)
        values.append(scale.value)
    assert values == [1.0] * 4 + [2.0] * 5 + [4.0] * 5 + [8.0]


def test_it_finds_the_largest_scale_that_does_not_overflow() -> None:
    scale = LossScale(2.0**20, growth_steps=10)
    values = []
    for _ in range(200):
        values.append(scale.value)
        scale.update(overflow=scale.value > 4096.0)
    assert set(values[10:]) == {4096.0, 8192.0}
    assert values[10:].count(8192.0) < 20


def test_without_growth_steps_it_is_constant() -> None:
    scale = LossScale()
    for overflow in (True, False, True):
        scale.update(overflow)
    assert scale == LossScale(1.0, 0, 0)
    assert not scale.dynamic
