"""What a step of a tiny model costs beside PyTorch, counted in calls of functions: the same on any machine.

Seconds are in `benchmarks/results/small_steps.txt`; counts do not see what one call costs.
"""

from __future__ import annotations

import io
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import FrameType, SimpleNamespace
from typing import Any

import pytest
import torch
from rich.console import Console

from benchmarks.loops import HandLoop, bare
from benchmarks.subjects import mlp
from paceline.job.cluster import Cluster
from paceline.observe import PhaseTimer, StepPhase, StepStats, step_stats
from paceline.session import Session, build, build_session
from paceline.session.checkpointing import CheckpointSchedule
from paceline.session.fit_loop import FitInProgress
from paceline.session.sink_setup import build_sinks

STEPS = 20
WARM_UP = 5


class Calls:
    """Counts the calls that this thread makes, of Python's functions and of those in C."""

    def __init__(self) -> None:
        self.number = 0

    def __enter__(self) -> Calls:
        self._before = sys.getprofile()
        sys.setprofile(self._see)
        return self

    def __exit__(self, *_: object) -> None:
        sys.setprofile(self._before)

    def _see(self, frame: FrameType, event: str, arg: Any) -> None:
        if event in ("call", "c_call") and frame.f_code is not Calls.perf_counter.__code__:
            self.number += 1

    def perf_counter(self) -> float:
        """A clock that goes on with every call, and not by being read."""
        return float(self.number)


def calls_a_step(step: Callable[[], object]) -> float:
    """Of a step that was made some times before."""
    for _ in range(WARM_UP):
        step()
    with Calls() as calls:
        for _ in range(STEPS):
            step()
    return calls.number / STEPS


def tiny(shards: int = 1) -> Any:
    return mlp((16,), batch_size=8, shards=shards, inputs=256)


def session_of(shards: int = 1) -> Session:
    subject = tiny(shards)
    return build_session(subject.recipe, subject.fresh(), Cluster.single(), torch.device("cpu"))


def by_hand(shards: int = 1) -> Callable[[], object]:
    subject = tiny(shards)
    return HandLoop(subject, bare(subject)).step


def ours(shards: int = 1) -> Callable[[], object]:
    rounds = session_of(shards).rounds()
    return lambda: next(rounds)


@pytest.fixture
def watched(tmp_path: Path) -> Iterator[Callable[[], object]]:
    """A step, and all that rank 0 tells of it."""
    session = session_of()
    found = build_sinks(session, tmp_path, Console(file=io.StringIO()))
    fitting = FitInProgress(session, tmp_path, found, CheckpointSchedule(session, None, found, print))
    rounds = fitting.schedule.rounds()
    yield lambda: fitting.after_round(next(rounds))
    for sink in found:
        sink.close()


@pytest.mark.parametrize(("shards", "more"), [(1, 75), (8, 525)])
def test_a_step_makes_few_calls_more_than_a_loop_by_hand(shards: int, more: int) -> None:
    """It was 104 and 791; what stays is the order of the samples, keys, health, phases and the tally.

    A micro-batch seeds three generators and opens the scope of `paceline.gather`: six calls.
    """
    assert calls_a_step(ours(shards)) - calls_a_step(by_hand(shards)) < more


def test_telling_of_a_step_makes_few_calls(watched: Callable[[], object]) -> None:
    """It was 76: counters were read again where nothing had been done since the round.

    Of these, 24 show the current operation and look for a request to trace: two calls a phase.
    """
    assert calls_a_step(watched) - calls_a_step(ours()) < 90


@pytest.mark.capability("P10")
@pytest.mark.parametrize("shards", [1, 8])
def test_all_calls_of_a_tiny_step_are_in_a_phase(shards: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """The row allows 3 % of the time; what lies before the first phase is three calls."""
    assert share_in_no_phase(shards, monkeypatch) <= 0.01


@pytest.mark.capability("P10")
def test_without_a_phase_calls_are_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    """The mutation twin: the step has begun long before its first phase."""

    class Late(PhaseTimer):
        def begin(self, phase: StepPhase) -> None:
            if phase not in ("data", "forward"):
                super().begin(phase)

    monkeypatch.setattr(build, "PhaseTimer", Late)
    assert share_in_no_phase(1, monkeypatch) > 0.1


def share_in_no_phase(shards: int, monkeypatch: pytest.MonkeyPatch) -> float:
    """The largest of some steps."""
    step = ours(shards)
    with monkeypatch.context() as patch, Calls() as calls:
        patch.setattr(step_stats, "time", SimpleNamespace(perf_counter=calls.perf_counter))
        found: list[Any] = [step() for _ in range(WARM_UP + STEPS)]
    return max(gap(stats) for stats in found[WARM_UP:])


def gap(stats: StepStats) -> float:
    return 1 - sum(stats.phases.values()) / stats.seconds
