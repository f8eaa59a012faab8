"""What it costs to watch a run: phases, records of every rank, metrics, the log and the progress line.

Three sides are the same session. One measures and writes nothing; one measures its phases, as a session
without a run folder does; one does all that `paceline train` does between two checkpoints. On a busy machine
their ratios say little of one part in a hundred, so the last table has the processor time of watching itself:
what rank 0 does behind a step, and what its phases take in it; and the share of a step that is in no phase.
"""

from __future__ import annotations

import statistics
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from io import StringIO
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
from rich.console import Console

from benchmarks.measure import Side
from benchmarks.pair import measure_pair
from benchmarks.report import Options, Report, Table, blocks, comparison_table, present, series_data
from benchmarks.subjects import Subject, byte_gpt, mlp
from paceline.job.cluster import Cluster
from paceline.observe import PhaseTimer, StepPhase
from paceline.observe.rank_activity import RankActivity
from paceline.session import Session, build_session
from paceline.session.checkpointing import CheckpointSchedule
from paceline.session.fit_loop import FitInProgress
from paceline.session.sink_setup import build_sinks
from paceline.testing import run_ranks

_REFERENCE = "nothing"
_WATCHED_STEPS = 40
_MARKS = 20_000


@dataclass(frozen=True)
class Case:
    """A job on some processes of one thread."""

    title: str
    make: Callable[[Options], Subject]
    processes: int
    steps: int
    unit: str = "ms"


def tiny(options: Options) -> Subject:
    """A model whose step is all overhead."""
    return mlp((16,), batch_size=8, shards=2, inputs=256)


def gpt(options: Options) -> Subject:
    """The recipe of the repository, as it is."""
    return byte_gpt(quick=options.quick, precision=options.precision)


CASES = (
    Case("recipes/byte-gpt.toml, 1 process", gpt, 1, 6),
    Case("recipes/byte-gpt.toml, 2 processes", gpt, 2, 6),
    Case("MLP 256-16-10, batch 8, 2 micro-batches, 1 process", tiny, 1, 200, "us"),
    Case("MLP 256-16-10, batch 8, 2 micro-batches, 2 processes", tiny, 2, 100, "us"),
)


class Unmeasured(PhaseTimer):
    """Reads no clock within a step."""

    def begin(self, phase: StepPhase) -> None:
        """Nothing is measured."""


def session_of(subject: Subject, cluster: Cluster) -> Session:
    """Paceline as users run it."""
    return build_session(subject.recipe, subject.fresh(), cluster, torch.device("cpu"))


def build_sides(case: Case, options: Options, folder: Path, cluster: Cluster) -> Sequence[Side]:
    """One session a side."""
    subject = case.make(options)
    with patch("paceline.session.build.PhaseTimer", Unmeasured):
        bare = session_of(subject, cluster)
    measured, watched = session_of(subject, cluster), session_of(subject, cluster)
    return [
        Side(_REFERENCE, partial(_step, bare.rounds())),
        Side("phases", partial(_step, measured.rounds())),
        Side("everything", partial(_step, _watched(watched, folder))),
    ]


def _step(rounds: Any) -> float:
    return float(next(rounds).loss)


def _watched(session: Session, folder: Path) -> Any:
    """The rounds of a fit that never saves."""
    console = Console(file=StringIO()) if session.is_first else None
    found = build_sinks(session, folder, console)
    fitting = FitInProgress(session, folder, found, CheckpointSchedule(session, None, found, print))
    for stats in fitting.schedule.rounds():
        fitting.after_round(stats)
        yield stats


@dataclass(frozen=True)
class Watched:
    """Of one step, medians.

    Args:
        step: seconds of the step.
        behind: processor seconds of what is done behind it.
        inside: processor seconds of its phases.
        uncovered: share of the step that is in no phase.
    """

    step: float
    behind: float
    inside: float
    uncovered: float


class Counted(PhaseTimer):
    """Knows how many phases were begun."""

    def __init__(self, activity: RankActivity | None = None) -> None:
        super().__init__(activity)
        self.begun = 0

    def begin(self, phase: StepPhase) -> None:
        """See `PhaseTimer`."""
        self.begun += 1
        super().begin(phase)


def mark_seconds() -> float:
    """Processor seconds of one mark."""
    phases = PhaseTimer()
    began = time.thread_time()
    for _ in range(_MARKS):
        phases.begin("data")
    return (time.thread_time() - began) / _MARKS


def watch(case: Case, options: Options, folder: Path, cluster: Cluster) -> Watched:
    """Some steps on this rank, with everything on."""
    torch.set_num_threads(1)
    with patch("paceline.session.build.PhaseTimer", Counted):
        session = session_of(case.make(options), cluster)
    found = build_sinks(session, folder, Console(file=StringIO())) if session.is_first else []
    fitting = FitInProgress(session, folder, found, CheckpointSchedule(session, None, found, print))
    steps, behind, uncovered = [], [], []
    for stats in fitting.schedule.rounds():
        began = time.thread_time()
        fitting.after_round(stats)
        behind.append(time.thread_time() - began)
        steps.append(stats.seconds)
        uncovered.append(1 - sum(stats.phases.values()) / stats.seconds)
        if len(steps) == (5 if options.quick else _WATCHED_STEPS):
            break
    phases: Any = getattr(session.rule, "phases")  # noqa: B009, another rule might have none
    inside = phases.begun / len(steps) * mark_seconds()
    return Watched(statistics.median(steps), statistics.fmean(behind), inside, statistics.median(uncovered))


def watched_table(options: Options) -> tuple[Table, dict[str, dict[str, float]]]:
    """Rank 0 of every case."""
    data = {}
    for case in CASES:
        with tempfile.TemporaryDirectory() as folder:
            ranks = run_ranks(partial(watch, case, options, Path(folder)), case.processes, deadline=240.0)
        data[case.title] = ranks[0]
    rows = [
        (
            title,
            f"{1e3 * one.step:.2f}",
            f"{1e6 * one.behind:.0f}",
            f"{1e6 * one.inside:.0f}",
            f"{100 * (one.behind + one.inside) / one.step:.2f} %",
            f"{100 * one.uncovered:.2f} %",
        )
        for title, one in data.items()
    ]
    columns = ("job", "step ms", "behind it us", "phases us", "together, of a step", "in no phase")
    title = "Processor time of watching itself (the rows P1 and P10 allow 1 % and 3 %)"
    return Table(title, columns, rows), {title: asdict(one) for title, one in data.items()}


def measure(options: Options) -> Report:
    """Run all cases."""
    tables: list[Table] = []
    data = {}
    for case in CASES[:1] if options.quick else CASES:
        with tempfile.TemporaryDirectory() as folder:
            build = partial(build_sides, case, options, Path(folder))
            steps, repeats = (2, 3) if options.quick else (case.steps, 15)
            found = measure_pair(
                build, repeats=repeats, steps=steps, warmup=max(2, steps // 4), num_ranks=case.processes
            )
        title = f"{case.title} (1 thread each, {blocks(found)})"
        tables.append(comparison_table(title, found, _REFERENCE, case.unit))
        data[case.title] = series_data(found)
    table, watched = watched_table(options)
    return Report(
        "What it costs to watch a run (the row P1 allows 1 % of a step).",
        [*tables, table],
        {"cases": data, "watched": watched},
    )


if __name__ == "__main__":
    present(measure, __doc__ or "")
