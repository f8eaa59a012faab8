"""What it costs to watch a run: phases, records of every rank, metrics, sinks, exporter and sampler.

Three sides are the same session. One measures and writes nothing; one measures its phases, as a session
without a run folder does; one does all that `paceline train` does between two checkpoints. On a busy machine
their ratios say little of one part in a hundred, so a table has the processor time of watching itself:
what rank 0 does behind a step, and what its phases take in it; and the share of a step that is in no phase.
The last table has the processor time of a step with 20 metrics in the sinks, without and with the exporter,
which is scraped, and the sampler; and in the loggers of TensorBoard and W&B, called as their users do.
"""

from __future__ import annotations

import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import asdict, dataclass
from functools import partial
from importlib.util import find_spec
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
from paceline.observe.sinks import Sink
from paceline.observe.step_stats import PHASES, StepStats
from paceline.session import Session, build_session
from paceline.session.checkpointing import CheckpointSchedule
from paceline.session.fit_loop import FitInProgress
from paceline.session.sink_setup import build_sinks
from paceline.testing import run_ranks

_REFERENCE = "nothing"
_WATCHED_STEPS = 40
_MARKS = 20_000
_NUM_METRICS = 20
_LOGGED_STEPS = 1000
_REST_SECONDS = 0.002  # between two steps: a logger's thread has time to write, and a scrape falls into them
_SCRAPE = """
import sys, time, urllib.request
while True:
    time.sleep(1)
    urllib.request.urlopen(sys.argv[1]).read()
"""


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
        session = session_of(with_processes(case.make(options)), cluster)
    found = build_sinks(session, folder, Console(file=StringIO()))
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
    for sink in found:
        sink.close()
    phases: Any = getattr(session.rule, "phases")  # noqa: B009, another rule might have none
    inside = phases.begun / len(steps) * mark_seconds()
    return Watched(statistics.median(steps), statistics.fmean(behind), inside, statistics.median(uncovered))


def with_processes(subject: Subject) -> Subject:
    """The same job with the exporter and the sampler, where their libraries are installed."""
    log: dict[str, Any] = {"prometheus": "127.0.0.1:0"} if find_spec("prometheus_client") else {}
    log |= {"sample_seconds": 1.0} if find_spec("psutil") else {}
    return subject.changed(log=subject.recipe.log.replace(**log))


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
    title = "Processor time of watching itself, with exporter and sampler (P1 and P10 allow 1 % and 3 %)"
    return Table(title, columns, rows), {title: asdict(one) for title, one in data.items()}


@dataclass(frozen=True)
class LoggerCost:
    """Processor seconds of one step in a logger.

    Args:
        call: of the call, in the thread of the training loop.
        process: of all threads of the process, less those of a loop that logs nothing.
        helpers: of the processes that it started.
    """

    call: float
    process: float
    helpers: float


def step_stats(step: int) -> StepStats:
    """A step with 20 metrics."""
    values = {f"metric_{number}": 1.0 / (1 + step + number) for number in range(_NUM_METRICS)}
    phases = dict.fromkeys(PHASES, 0.0004)
    return StepStats(step, 0, 0.5, values, 8, 8.0, 1.0, 1e-3, True, 1.0, 0, 0.002, phases, 64.0 * step)


Log = Callable[[StepStats], object]


@contextmanager
def no_logger(folder: Path) -> Iterator[Log]:
    """The loop alone."""
    yield lambda stats: None


@contextmanager
def default_sinks(folder: Path, *, processes: bool = False) -> Iterator[Log]:
    """The default sinks of a run, without or with the exporter, scraped each second, and the sampler."""
    subject = tiny(Options())
    session = session_of(with_processes(subject) if processes else subject, Cluster.single())
    found = build_sinks(session, folder, Console(file=StringIO()))
    with ExitStack() as stack:
        for sink in found:
            stack.callback(sink.close)
        address = next((one.address for one in found if hasattr(one, "address")), None)
        if address is not None:
            words = [sys.executable, "-c", _SCRAPE, f"http://{address}/metrics"]
            scraper = subprocess.Popen(words, stderr=subprocess.DEVNULL)
            stack.callback(scraper.wait)
            stack.callback(scraper.kill)
        yield partial(_send, found)


def _send(sinks: Sequence[Sink], stats: StepStats) -> None:
    for sink in sinks:
        sink.step(stats)


@contextmanager
def tensorboard_writer(folder: Path) -> Iterator[Log]:
    """One `add_scalar` for each metric."""
    from torch.utils.tensorboard import SummaryWriter

    writer = SummaryWriter(str(folder))
    yield lambda stats: [writer.add_scalar(k, v, stats.step) for k, v in stats.metrics.items()]
    writer.close()


@contextmanager
def wandb_run(folder: Path) -> Iterator[Log]:
    """One `run.log` for all metrics, offline."""
    import wandb

    settings = wandb.Settings(mode="offline", silent=True, console="off", x_disable_stats=True)
    run = wandb.init(project="cost", dir=str(folder), settings=settings)
    yield lambda stats: run.log(dict(stats.metrics), step=stats.step)
    run.finish()


LOGGERS: dict[str, Callable[[Path], Any]] = {
    "paceline, default sinks": default_sinks,
    "paceline, with exporter and sampler": partial(default_sinks, processes=True),
    "TensorBoard SummaryWriter": tensorboard_writer,
    "W&B run.log, offline": wandb_run,
}


def log_steps(open_logger: Callable[[Path], Any], steps: int) -> LoggerCost:
    """Some steps of 20 metrics, and the logger's end."""
    with tempfile.TemporaryDirectory() as folder:
        with open_logger(Path(folder)) as log:
            for step in range(20):
                log(step_stats(step))
            call, began, before = 0.0, time.process_time(), _helper_seconds()
            for step in range(20, 20 + steps):
                stats = step_stats(step)
                started = time.thread_time()
                log(stats)
                call += time.thread_time() - started
                time.sleep(_REST_SECONDS)
            helpers = _helper_seconds() - before
        return LoggerCost(call / steps, (time.process_time() - began) / steps, helpers / steps)


def _helper_seconds() -> float:
    """Processor seconds of the processes that this one has started and that live."""
    if find_spec("psutil") is None:
        return 0.0
    import psutil

    total = 0.0
    for child in psutil.Process().children(recursive=True):
        with suppress(psutil.Error):
            total += sum(child.cpu_times()[:2])
    return total


def logger_table(options: Options) -> tuple[Table, dict[str, Any]]:
    """Every logger that is installed, in turns; the medians."""
    steps, repeats = (20, 1) if options.quick else (_LOGGED_STEPS, 5)
    needs = {"TensorBoard SummaryWriter": "tensorboard", "W&B run.log, offline": "wandb"}
    present_loggers = {k: one for k, one in LOGGERS.items() if k not in needs or find_spec(needs[k])}
    found: dict[str, list[LoggerCost]] = {name: [] for name in ("nothing", *present_loggers)}
    for _ in range(repeats):
        for name, one in {"nothing": no_logger, **present_loggers}.items():
            found[name].append(log_steps(one, steps))
    idle = statistics.median(cost.process for cost in found["nothing"])
    rows = [
        (
            name,
            *(f"{1e6 * value:.1f}" for value in _median_and_range([cost.call for cost in costs])),
            f"{1e6 * (statistics.median(cost.process for cost in costs) - idle):.1f}",
            f"{1e6 * statistics.median(cost.helpers for cost in costs):.1f}",
        )
        for name, costs in found.items()
        if name != "nothing"
    ]
    columns = ("logger", "call us", "least", "most", "process us", "other processes us")
    remarks = (
        f"{repeats} blocks of {steps} steps, one every {1e3 * _REST_SECONDS:g} ms; process: all threads, and"
        f" the end of the logger, less the same loop without a logger ({1e6 * idle:.1f} us).",
        "Other processes: the exporter, the sampler and the scraper; W&B's service.",
    )
    title = f"Processor time of a step with {_NUM_METRICS} metrics"
    return Table(title, columns, rows, remarks), {k: [asdict(one) for one in v] for k, v in found.items()}


def _median_and_range(values: Sequence[float]) -> tuple[float, float, float]:
    return statistics.median(values), min(values), max(values)


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
    logger, logged = logger_table(options)
    return Report(
        "What it costs to watch a run (the row P1 allows 1 % of a step).",
        [*tables, table, logger],
        {"cases": data, "watched": watched, "loggers": logged},
    )


if __name__ == "__main__":
    present(measure, __doc__ or "")
