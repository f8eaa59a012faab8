"""Phases: each lasts until the next begins, seconds add up by name, and every take starts anew."""

from typing import Any

import pytest

from paceline.observe import PHASES, PhaseTimer
from paceline.observe import step_stats as module
from paceline.observe.step_stats import RANK_COLUMNS, build_rank_records
from tests.unit.observe.clock import Clock


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


def row(seconds: float, communication: float, busy: float, exposed: float, peak: float = 1.0) -> list[float]:
    """One round, in the order of the columns."""
    values = dict.fromkeys(RANK_COLUMNS, 0.0) | {"seconds": seconds, "communication": communication}
    values |= {"busy_seconds": busy, "exposed_seconds": exposed, "sent_bytes": 100.0, "cpu_seconds": 0.5}
    return [(values | {"peak_bytes": peak})[name] for name in RANK_COLUMNS]


@pytest.mark.capability("P1", "P10")
def test_a_record_sums_the_rounds_of_a_rank() -> None:
    rounds = [row(1.0, 0.25, 0.5, 0.25, peak=8.0), row(3.0, 0.5, 0.25, 0.5, peak=9.0)]
    (record,) = build_rank_records(7, {0: rounds})
    assert record["phases"] == {**dict.fromkeys(PHASES, 0.0), "communication": 0.75}
    assert (record["seconds"], record["slowest_seconds"], record["rounds"]) == (4.0, 3.0, 2)
    assert (record["sent_bytes"], record["cpu_seconds"], record["peak_bytes"]) == (200.0, 1.0, 9.0)
    assert record["exposed_seconds"] == 0.75
    assert record["hidden_seconds"] == 0.25  # of the first round; in the second nothing was hidden
    assert (record["step"], record["rank"], record["waiting_seconds"]) == (7, 0, 0.0)


@pytest.mark.capability("P10")
def test_ranks_wait_for_the_slowest_of_each_round() -> None:
    """In the first round rank 1 comes last, in the second rank 0: each waits for the other once."""
    first = [row(2.0, 1.5, 1.5, 1.5), row(2.0, 0.5, 0.5, 0.5)]
    second = [row(2.0, 0.5, 0.5, 0.5), row(2.0, 0.75, 0.75, 0.75)]
    assert [record["waiting_seconds"] for record in build_rank_records(1, {0: first, 3: second})] == [
        1.0,
        0.25,
    ]
