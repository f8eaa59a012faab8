"""The summary of a sweep: measurements of each run, rows over seeds, and a table for the terminal. Pure.

Cells that differ only in the seed are one row, with the mean and the standard deviation of each number.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from math import isfinite
from pathlib import Path
from statistics import fmean, median, stdev
from typing import Any

from paceline.errors import DataError, RecipeError
from paceline.report.rank_balance import rank_times
from paceline.report.run_reader import RecordedRun, read_run, to_float
from paceline.studies.critical_batch import CriticalBatch, find_critical_batch
from paceline.studies.sweep_cells import SweepCell


@dataclass(frozen=True)
class EvaluationPoint:
    """One evaluation of a run.

    Args:
        step, samples: number of steps and samples before it, since the beginning of the run.
        values: `loss` and the metrics.
    """

    step: int
    samples: int
    values: Mapping[str, float]


@dataclass(frozen=True)
class MetricTarget:
    """A target value of an evaluation; `upward` if larger values are better."""

    name: str
    value: float
    upward: bool

    @classmethod
    def parse(cls, text: str) -> MetricTarget:
        """Parse a text such as `loss<=0.3` or `accuracy>=0.95`.

        Raises:
            RecipeError: the text has another form.
        """
        match = re.fullmatch(r"\s*(\w+)\s*(<=|>=)\s*([-+.\deE]+)\s*", text)
        if match is None:
            raise RecipeError(
                f"expected NAME<=VALUE or NAME>=VALUE, found {text!r}",
                where="--target",
                next_step='for example --target "accuracy>=0.95", or leave it out',
            )
        return cls(match[1], float(match[3]), match[2] == ">=")

    def __str__(self) -> str:
        return f"{self.name} {'>=' if self.upward else '<='} {self.value:.4g}"

    def met(self, point: EvaluationPoint) -> bool:
        """Return whether an evaluation reaches the target."""
        # A metric that was not measured is NaN, which meets no target.
        value = point.values.get(self.name, float("nan"))
        return value >= self.value if self.upward else value <= self.value


@dataclass(frozen=True)
class RunMeasurements:
    """The measurements of one run.

    Args:
        steps, num_samples: number of steps and samples.
        samples_per_second: median over all steps but the first.
        seconds: wall time of the steps on rank 0.
        points: the evaluations, in order.
        skipped: number of steps whose update was skipped: overflows in fp16, or steps that health skipped.
        peak_bytes: peak memory of the largest process; None if it was not recorded.
    """

    steps: int
    num_samples: int
    samples_per_second: float
    seconds: float
    points: tuple[EvaluationPoint, ...]
    skipped: int = 0
    peak_bytes: float | None = None

    @property
    def best_loss(self) -> float:
        """The lowest finite evaluation loss; infinite without one."""
        losses = [point.values["loss"] for point in self.points]
        return min((loss for loss in losses if isfinite(loss)), default=float("inf"))

    def first(self, target: MetricTarget) -> EvaluationPoint | None:
        """Return the first evaluation that meets a target; None if none does."""
        return next((point for point in self.points if target.met(point)), None)


def read_measurements(run_dir: Path) -> RunMeasurements:
    """Read the measurements of a run; of steps that were taken again after a resume the last ones count.

    Raises:
        DataError: the folder holds no run, or the run has no steps.
    """
    run = read_run(run_dir)
    steps = run.steps
    if not steps:
        raise DataError("the run has no steps", where=str(run.folder))
    peaks = [rank.peak_bytes for rank in rank_times(run)]
    return RunMeasurements(
        steps=len(steps),
        num_samples=sum(int(step["num_samples"]) for step in steps),
        # The first step also pays for allocations and compilation.
        samples_per_second=median(to_float(step["samples_per_second"]) for step in steps[1:] or steps),
        seconds=sum(to_float(step["seconds"]) for step in steps),
        points=tuple(evaluation_points(run)),
        skipped=sum(step.get("applied") is False for step in steps),
        peak_bytes=max(peaks, default=None),
    )


def evaluation_points(run: RecordedRun) -> list[EvaluationPoint]:
    """Return the evaluations of a run that count, in order."""
    points = []
    for record in run.evaluations:
        step = int(record["step"])
        samples = sum(int(row["num_samples"]) for row in run.steps if int(row["step"]) < step)
        values = {"loss": record["loss"], **record["metrics"]}
        points.append(
            EvaluationPoint(step, samples, {name: to_float(value) for name, value in values.items()})
        )
    return points


_SEED_AXIS = "seed"


@dataclass(frozen=True)
class MeanAndDeviation:
    """A mean over runs and the sample standard deviation, which is 0 for a single run."""

    mean: float
    deviation: float

    @classmethod
    def of(cls, values: Sequence[float]) -> MeanAndDeviation | None:
        """Return the mean and deviation of values; None without values."""
        return cls(fmean(values), stdev(values) if len(values) > 1 else 0.0) if values else None


@dataclass(frozen=True)
class SweepRow:
    """A row of a sweep: the cells that differ only in the seed.

    Args:
        values: values of the axes other than the seed.
        runs: number of complete runs.
        numbers: measurements by name: `steps`, `seconds`, `samples/s`, `final loss`, `final NAME`,
            `steps to target`, `samples to target`. A number that a run lacks is left out.
    """

    values: Mapping[str, str]
    runs: int
    numbers: Mapping[str, MeanAndDeviation]


@dataclass(frozen=True)
class SweepSummary:
    """The results of a sweep.

    Args:
        target: the target of the numbers "to target"; None if there were no evaluations.
        rows: in the order of the cells.
        critical: critical batches by the values of the other axes, where at least three batch sizes reached
            the target.
        failed: the reason of each cell without a result, by label.
    """

    target: MetricTarget | None
    rows: Sequence[SweepRow]
    critical: Sequence[tuple[Mapping[str, str], CriticalBatch]]
    failed: Mapping[str, str]

    def to_json(self) -> dict[str, Any]:
        """Return the summary as plain values."""
        return {
            "target": str(self.target) if self.target is not None else None,
            "rows": [asdict(row) for row in self.rows],
            "critical_batch": [{"values": dict(values), **asdict(batch)} for values, batch in self.critical],
            "failed": dict(self.failed),
        }


def summarize_sweep(
    done: Sequence[tuple[SweepCell, RunMeasurements]],
    failed: Mapping[str, str],
    target: MetricTarget | None = None,
) -> SweepSummary:
    """Summarize the cells of a sweep.

    Args:
        done: complete cells with their measurements.
        failed: the reasons of the other cells, by label.
        target: None for the lowest evaluation loss that every complete cell reached.
    """
    best = [run.best_loss for _, run in done if isfinite(run.best_loss)]
    if target is None and best:
        # The largest of the lowest losses is the lowest that every run has reached.
        target = MetricTarget("loss", max(best), upward=False)
    groups: dict[tuple[tuple[str, str], ...], list[RunMeasurements]] = {}
    for cell, run in done:
        values = tuple((word, value) for word, value in cell.values.items() if word != _SEED_AXIS)
        groups.setdefault(values, []).append(run)
    rows = [SweepRow(dict(values), len(runs), _mean_numbers(runs, target)) for values, runs in groups.items()]
    return SweepSummary(target, rows, _critical_batches(rows), dict(failed))


def _mean_numbers(
    runs: Sequence[RunMeasurements], target: MetricTarget | None
) -> dict[str, MeanAndDeviation]:
    numbers = [_run_numbers(run, target) for run in runs]
    # A mean over only those runs that reached the target would favour unreliable settings.
    names = [name for name in numbers[0] if all(name in of_run for of_run in numbers)]
    means = {name: MeanAndDeviation.of([of_run[name] for of_run in numbers]) for name in names}
    return {name: mean for name, mean in means.items() if mean is not None}


_SKIPPED = "skipped updates"


def _run_numbers(run: RunMeasurements, target: MetricTarget | None) -> dict[str, float]:
    numbers = {"steps": float(run.steps), "seconds": run.seconds, "samples/s": run.samples_per_second}
    if run.peak_bytes is not None:
        numbers["peak MiB"] = run.peak_bytes / 2**20
    numbers[_SKIPPED] = float(run.skipped)
    if run.points:
        last = run.points[-1].values.items()
        numbers |= {f"final {name}": value for name, value in last if isfinite(value)}
    reached = run.first(target) if target is not None else None
    if reached is not None:
        numbers |= {"steps to target": float(reached.step), "samples to target": float(reached.samples)}
    return numbers


def _critical_batches(rows: Sequence[SweepRow]) -> list[tuple[Mapping[str, str], CriticalBatch]]:
    groups: dict[tuple[tuple[str, str], ...], dict[int, float]] = {}
    for row in rows:
        batch, reached = row.values.get("batch", ""), row.numbers.get("steps to target")
        if batch.isdecimal() and reached is not None:
            others = tuple((word, value) for word, value in row.values.items() if word != "batch")
            groups.setdefault(others, {})[int(batch)] = reached.mean
    fits = [(dict(others), find_critical_batch(steps)) for others, steps in groups.items()]
    return [(values, critical) for values, critical in fits if critical is not None]


def render_table(summary: SweepSummary) -> list[str]:
    """Return the lines of a table, and the recommendation that follows from it."""
    return render_rows(summary) + recommend(summary)


def render_rows(summary: SweepSummary) -> list[str]:
    """Return the lines of a table: the rows, the target, the critical batches, and the failed cells."""
    cells = table_cells(summary)
    widths = [max(len(line[i]) for line in cells) for i in range(len(cells[0]))]
    lines = ["  ".join(text.rjust(w) for text, w in zip(line, widths, strict=True)) for line in cells]
    lines = lines if summary.rows else []
    if summary.target is not None:
        lines.append(f"target: {summary.target}, checked at every evaluation")
    for values, batch in summary.critical:
        lines += _describe_critical_batch(values, batch)
    return lines + [f"failed: {label}: {reason}" for label, reason in summary.failed.items()]


def table_cells(summary: SweepSummary) -> list[list[str]]:
    """Return the header and the rows of a table; without skipped updates there is no column for them."""
    rows = summary.rows
    words = list(rows[0].values) if rows else []
    names = dict.fromkeys(
        name for row in rows for name, number in row.numbers.items() if name != _SKIPPED or number.mean
    )
    has_runs = any(row.runs > 1 for row in rows)
    header = [*words, *(["runs"] if has_runs else []), *names]
    return [header, *(_render_row(row, words, [*names], has_runs) for row in rows)]


_LEAST_RUNS = 3


def recommend(summary: SweepSummary, among: Mapping[str, str] | None = None) -> list[str]:
    """Return sentences about the best rows, each of which cites the rows that it follows from.

    Rows are counted from 1. Two rows are told apart if their means differ by more than the larger of their
    standard deviations. There is no recommendation from fewer than three seeds of any row, except that a row
    some of whose runs failed is left out, with a sentence.

    Args:
        among: values of the rows to choose from; None: all rows.
    """
    target = summary.target
    rows, wanted = summary.rows, (among or {}).items()
    name = f"final {target.name}" if target is not None else "final loss"
    upward = target is not None and target.upward
    chosen = {k: row for k, row in enumerate(rows, 1) if wanted <= row.values.items()}
    numbers = {
        k: row.numbers[name] for k, row in chosen.items() if name in row.numbers and row.runs >= _LEAST_RUNS
    }
    few = {k: row.runs for k, row in chosen.items() if row.runs < _LEAST_RUNS}
    if len(numbers) < 2 or (few and not summary.failed):
        return []
    best = min(numbers, key=lambda k: -numbers[k].mean if upward else numbers[k].mean)

    def is_close(k: int) -> bool:
        other, first = numbers[k], numbers[best]
        return abs(other.mean - first.mean) <= max(other.deviation, first.deviation)

    close = [k for k in numbers if k != best and is_close(k)]
    word = "highest" if upward else "lowest"
    lines = [f"{_cite(rows, k)} is left out: only {runs} of its runs did not fail" for k, runs in few.items()]
    lines += [f"the {word} {name} is that of {_cite(rows, best)}: {_format_mean(numbers[best], name)}"]
    if not close:
        second = min(
            (k for k in numbers if k != best),
            key=lambda k: -numbers[k].mean if upward else numbers[k].mean,
        )
        lines.append(f"{_cite(rows, second)} is next: {_format_mean(numbers[second], name)}")
        return [*lines, f"recommended: row {best}, which no other row equals within its deviation"]
    lines += [
        f"{_cite(rows, k)} is not told apart from row {best}: {_format_mean(numbers[k], name)}" for k in close
    ]
    fastest = min([best, *close], key=lambda k: rows[k - 1].numbers["seconds"].mean)
    seconds = _format_mean(rows[fastest - 1].numbers["seconds"], "seconds")
    return [*lines, f"recommended: row {fastest}, which takes the least time of these: {seconds} s"]


def _cite(rows: Sequence[SweepRow], number: int) -> str:
    values = " ".join(f"{word}={value}" for word, value in rows[number - 1].values.items())
    return f"row {number} ({values})"


def _render_row(row: SweepRow, words: list[str], names: list[str], runs: bool) -> list[str]:
    numbers = [_format_mean(row.numbers.get(name), name) for name in names]
    return [*(row.values[word] for word in words), *([str(row.runs)] if runs else []), *numbers]


def _format_mean(value: MeanAndDeviation | None, name: str) -> str:
    if value is None:
        return "-"
    is_whole = name == "steps" or "to target" in name or abs(value.mean) >= 1000
    mean, deviation = (
        (f"{value.mean:.0f}", f"{value.deviation:.0f}")
        if is_whole
        else (f"{value.mean:.4g}", f"{value.deviation:.2g}")
    )
    return f"{mean} ±{deviation}" if value.deviation else mean


def _describe_critical_batch(values: Mapping[str, str], fit: CriticalBatch) -> list[str]:
    others = " ".join(f"{word}={value}" for word, value in values.items())
    saved = ", ".join(f"{a} to {b}: {ratio:.2f} of {b / a:.2g}" for a, b, ratio in fit.savings)
    lines = [f"steps saved by larger batches{' with ' + others if others else ''}: {saved}"]
    if fit.batch is None:
        return [
            *lines,
            "  critical batch: larger than all of these; steps still fall in proportion to the batch",
        ]
    fewest = f"at least {fit.fewest_steps:.0f} steps with any batch"
    return [*lines, f"  critical batch: about {fit.batch:.0f} samples; larger ones save little ({fewest})"]
