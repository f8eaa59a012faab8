"""What a run measured, from its metrics.jsonl.

The rows of a sweep: cells that differ only in the seed are one row, with their spread.

A sweep as text.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from math import isfinite
from pathlib import Path
from statistics import fmean, median, stdev
from typing import Any

from paceline.errors import DataError, RecipeError
from paceline.studies.critical_batch import CriticalBatch, find_critical_batch
from paceline.studies.sweep_cells import SweepCell


@dataclass(frozen=True)
class EvaluationPoint:
    """One evaluation.

    Args:
        step, samples: taken before it, since the beginning of the run.
        values: `loss` and the metrics.
    """

    step: int
    samples: int
    values: Mapping[str, float]


@dataclass(frozen=True)
class MetricTarget:
    """A value of an evaluation that is to be reached."""

    name: str
    value: float
    upward: bool

    @classmethod
    def parse(cls, text: str) -> MetricTarget:
        """Read `loss<=0.3` or `accuracy>=0.95`.

        Raises:
            RecipeError: it is neither.
        """
        found = re.fullmatch(r"\s*(\w+)\s*(<=|>=)\s*([-+.\deE]+)\s*", text)
        if found is None:
            raise RecipeError(
                f"expected NAME<=VALUE or NAME>=VALUE, found {text!r}",
                where="--target",
                next_step='for example --target "accuracy>=0.95", or leave it out',
            )
        return cls(found[1], float(found[3]), found[2] == ">=")

    def __str__(self) -> str:
        return f"{self.name} {'>=' if self.upward else '<='} {self.value:.4g}"

    def met(self, point: EvaluationPoint) -> bool:
        """Has it been reached there?"""
        value = point.values.get(self.name, float("nan"))
        return value >= self.value if self.upward else value <= self.value


@dataclass(frozen=True)
class RunMeasurements:
    """One run.

    Args:
        steps, num_samples: taken.
        samples_per_second: the median over all steps but the first.
        seconds: in steps, on rank 0.
        points: its evaluations in order.
    """

    steps: int
    num_samples: int
    samples_per_second: float
    seconds: float
    points: tuple[EvaluationPoint, ...]

    @property
    def best_loss(self) -> float:
        """The lowest finite evaluation loss; infinite without one."""
        losses = [point.values["loss"] for point in self.points]
        return min((loss for loss in losses if isfinite(loss)), default=float("inf"))

    def first(self, target: MetricTarget) -> EvaluationPoint | None:
        """The first evaluation that meets a target."""
        return next((point for point in self.points if target.met(point)), None)


def read_measurements(run_dir: Path) -> RunMeasurements:
    """Read what a run wrote; of steps that were done again after a crash the last counts.

    Raises:
        DataError: there is nothing to read.
    """
    path = run_dir / "metrics.jsonl"
    try:
        records = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
    except (OSError, ValueError) as error:
        raise DataError(f"cannot read the measurements of a run: {error}", where=str(path)) from error
    steps = {int(r["step"]): r for r in records if r["event"] == "step"}
    if not steps:
        raise DataError("the run has no steps", where=str(path))
    taken = [steps[i] for i in sorted(steps)]
    points = {int(r["step"]): _evaluation_point(r, steps) for r in records if r["event"] == "evaluation"}
    return RunMeasurements(
        steps=len(taken),
        num_samples=sum(int(r["num_samples"]) for r in taken),
        samples_per_second=median(float(r["samples_per_second"]) for r in taken[1:] or taken),
        seconds=sum(float(r["seconds"]) for r in taken),
        points=tuple(points[step] for step in sorted(points)),
    )


def _evaluation_point(record: Mapping[str, Any], steps: Mapping[int, Mapping[str, Any]]) -> EvaluationPoint:
    step = int(record["step"])
    samples = sum(int(r["num_samples"]) for i, r in steps.items() if i < step)
    values = {"loss": record["loss"], **record["metrics"]}
    return EvaluationPoint(step, samples, {name: float(value) for name, value in values.items()})


_SEED_AXIS = "seed"


@dataclass(frozen=True)
class MeanAndDeviation:
    """A mean over runs, and their sample standard deviation; 0 for a single run."""

    mean: float
    deviation: float

    @classmethod
    def of(cls, values: Sequence[float]) -> MeanAndDeviation | None:
        """None without values."""
        return cls(fmean(values), stdev(values) if len(values) > 1 else 0.0) if values else None


@dataclass(frozen=True)
class SweepRow:
    """Cells that differ only in the seed.

    Args:
        values: of the axes, but for the seed.
        runs: complete ones.
        numbers: what was measured, by name: `steps`, `samples/s`, `final loss`, `final NAME`,
            `steps to target`, `samples to target`. A number that not every run has is left out.
    """

    values: Mapping[str, str]
    runs: int
    numbers: Mapping[str, MeanAndDeviation]


@dataclass(frozen=True)
class SweepSummary:
    """All of a sweep.

    Args:
        target: what "to target" means.
        rows: in the order of the cells.
        critical: by the values of the other axes, where at least three batch sizes reached the target.
        failed: why cells have no result, by label.
    """

    target: MetricTarget | None
    rows: Sequence[SweepRow]
    critical: Sequence[tuple[Mapping[str, str], CriticalBatch]]
    failed: Mapping[str, str]

    def to_json(self) -> dict[str, Any]:
        """Plain values."""
        return {
            "target": str(self.target) if self.target is not None else None,
            "rows": [asdict(row) for row in self.rows],
            "critical_batch": [{"values": dict(values), **asdict(found)} for values, found in self.critical],
            "failed": dict(self.failed),
        }


def summarize_sweep(
    done: Sequence[tuple[SweepCell, RunMeasurements]],
    failed: Mapping[str, str],
    target: MetricTarget | None = None,
) -> SweepSummary:
    """Put cells together.

    Args:
        done: complete cells.
        failed: why others are not, by label.
        target: None: the evaluation loss that every complete cell has reached at some time.
    """
    best = [run.best_loss for _, run in done if isfinite(run.best_loss)]
    if target is None and best:
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
    each = [_run_numbers(run, target) for run in runs]
    names = [name for name in each[0] if all(name in one for one in each)]
    found = {name: MeanAndDeviation.of([one[name] for one in each]) for name in names}
    return {name: spread for name, spread in found.items() if spread is not None}


def _run_numbers(run: RunMeasurements, target: MetricTarget | None) -> dict[str, float]:
    found = {"steps": float(run.steps), "seconds": run.seconds, "samples/s": run.samples_per_second}
    if run.points:
        last = run.points[-1].values.items()
        found |= {f"final {name}": value for name, value in last if isfinite(value)}
    reached = run.first(target) if target is not None else None
    if reached is not None:
        found |= {"steps to target": float(reached.step), "samples to target": float(reached.samples)}
    return found


def _critical_batches(rows: Sequence[SweepRow]) -> list[tuple[Mapping[str, str], CriticalBatch]]:
    groups: dict[tuple[tuple[str, str], ...], dict[int, float]] = {}
    for row in rows:
        batch, reached = row.values.get("batch", ""), row.numbers.get("steps to target")
        if batch.isdecimal() and reached is not None:
            others = tuple((word, value) for word, value in row.values.items() if word != "batch")
            groups.setdefault(others, {})[int(batch)] = reached.mean
    found = [(dict(others), find_critical_batch(steps)) for others, steps in groups.items()]
    return [(values, critical) for values, critical in found if critical is not None]


def render_table(summary: SweepSummary) -> list[str]:
    """The rows in columns, then what they show, then what failed."""
    rows = summary.rows
    words = list(rows[0].values) if rows else []
    names = list(dict.fromkeys(name for row in rows for name in row.numbers))
    cells = [[*words, *(["runs"] if any(row.runs > 1 for row in rows) else []), *names]]
    cells += [_render_row(row, words, names, "runs" in cells[0]) for row in rows]
    widths = [max(len(line[i]) for line in cells) for i in range(len(cells[0]))] if rows else []
    lines = ["  ".join(text.rjust(w) for text, w in zip(line, widths, strict=True)) for line in cells if rows]
    if summary.target is not None:
        lines.append(f"target: {summary.target}, looked at whenever a run was evaluated")
    for values, found in summary.critical:
        lines += _describe_critical_batch(values, found)
    return lines + [f"failed: {label}: {why}" for label, why in summary.failed.items()]


def _render_row(row: SweepRow, words: list[str], names: list[str], runs: bool) -> list[str]:
    numbers = [_format_mean(row.numbers.get(name), name) for name in names]
    return [*(row.values[word] for word in words), *([str(row.runs)] if runs else []), *numbers]


def _format_mean(found: MeanAndDeviation | None, name: str) -> str:
    if found is None:
        return "-"
    whole = name == "steps" or "to target" in name or abs(found.mean) >= 1000
    spell = "{:.0f}".format if whole else "{:.4g}".format
    spread = f" ±{found.deviation:.0f}" if whole else f" ±{found.deviation:.2g}"
    return spell(found.mean) + (spread if found.deviation else "")


def _describe_critical_batch(values: Mapping[str, str], found: CriticalBatch) -> list[str]:
    where = " ".join(f"{word}={value}" for word, value in values.items())
    saved = ", ".join(f"{a} to {b}: {ratio:.2f} of {b / a:.2g}" for a, b, ratio in found.savings)
    lines = [f"steps saved by larger batches{' with ' + where if where else ''}: {saved}"]
    if found.batch is None:
        return [*lines, "  critical batch: beyond the largest one; steps fall as fast as the batch grows"]
    low = f"fewest steps {found.fewest_steps:.0f}"
    return [*lines, f"  critical batch: about {found.batch:.0f} samples ({low}); beyond it returns diminish"]
