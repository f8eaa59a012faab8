"""Phases: each lasts until the next begins, seconds add up by name, and every take starts anew."""

from typing import Any

import pytest

from paceline.observe import PHASES, PhaseTimer
from paceline.observe import step_stats as module


class Clock:
    """A clock that stands still until it is told to go on."""

    def __init__(self) -> None:
        self.now = 1000.0

    def perf_counter(self) -> float:
        return self.now


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    made = Clock()
    monkeypatch.setattr(module, "time", made)
    return made


@pytest.mark.capability("I1")
def test_seconds_add_up_by_phase_and_each_lasts_until_the_next_begins(clock: Clock) -> None:
    phases = PhaseTimer()
    clock.now += 0.5  # before the first one
    for phase, seconds in (("forward", 1.0), ("backward", 2.0), ("forward", 4.0), ("communication", 8.0)):
        phases.begin(phase)
        clock.now += seconds
    whole, parts = phases.take()
    assert whole == 15.5
    assert parts == {"data": 0.0, "forward": 5.0, "backward": 2.0, "communication": 8.0, "optimizer": 0.0}


def test_a_take_starts_anew_and_ends_the_phase(clock: Clock) -> None:
    phases = PhaseTimer()
    phases.begin("data")
    clock.now += 1.0
    assert phases.take() == (1.0, {**dict.fromkeys(PHASES, 0.0), "data": 1.0})
    clock.now += 0.25
    assert phases.take() == (0.25, dict.fromkeys(PHASES, 0.0))


def test_an_unknown_phase_is_an_error(clock: Clock) -> None:
    phases: Any = PhaseTimer()
    phases.begin("forwards")
    with pytest.raises(KeyError, match="forwards"):
        phases.take()
