"""Phases: seconds add up by name, start anew at every take, and are counted when a block raises."""

import pytest

from paceline.observe import PHASES, Phases
from paceline.observe import phases as module


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
def test_seconds_add_up_by_phase_and_the_whole_includes_what_has_no_phase(clock: Clock) -> None:
    phases = Phases()
    for phase, seconds in (("forward", 1.0), ("backward", 2.0), ("forward", 4.0), ("communication", 8.0)):
        with phases.during(phase):
            clock.now += seconds
        clock.now += 0.5
    whole, parts = phases.take()
    assert whole == 17.0
    assert parts == {"data": 0.0, "forward": 5.0, "backward": 2.0, "communication": 8.0, "optimizer": 0.0}


def test_a_take_starts_anew(clock: Clock) -> None:
    phases = Phases()
    clock.now += 3.0
    with phases.during("data"):
        clock.now += 1.0
    first = phases.take()
    clock.now += 0.25
    assert first == (4.0, {**dict.fromkeys(PHASES, 0.0), "data": 1.0})
    assert phases.take() == (0.25, dict.fromkeys(PHASES, 0.0))


def test_a_block_that_raises_is_counted(clock: Clock) -> None:
    phases = Phases()
    with pytest.raises(ValueError, match="boom"), phases.during("optimizer"):
        clock.now += 2.0
        raise ValueError("boom")
    assert phases.take()[1]["optimizer"] == 2.0


def test_an_unknown_phase_is_an_error(clock: Clock) -> None:
    with pytest.raises(KeyError, match="forwards"), Phases().during("forwards"):
        pass
