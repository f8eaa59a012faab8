"""The rows of a sweep: cells that differ only in the seed are one row, with their spread."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from math import isfinite
from statistics import fmean, stdev
from typing import Any

from paceline.studies.axes import Cell
from paceline.studies.critical_batch import CriticalBatch, find_critical_batch
from paceline.studies.measured import Measured, Target

_SEED = "seed"


@dataclass(frozen=True)
class Spread:
    """A mean over runs, and their sample standard deviation; 0 for a single run."""

    mean: float
    deviation: float

    @classmethod
    def of(cls, values: Sequence[float]) -> Spread | None:
        """None without values."""
        return cls(fmean(values), stdev(values) if len(values) > 1 else 0.0) if values else None


@dataclass(frozen=True)
class Row:
    """Cells that differ only in the seed.

    Args:
        values: of the axes, but for the seed.
        runs: complete ones.
        numbers: what was measured, by name: `steps`, `samples/s`, `final loss`, `final NAME`,
            `steps to target`, `samples to target`. A number that not every run has is left out.
    """

    values: Mapping[str, str]
    runs: int
    numbers: Mapping[str, Spread]


@dataclass(frozen=True)
class Summary:
    """All of a sweep.

    Args:
        target: what "to target" means.
        rows: in the order of the cells.
        critical: by the values of the other axes, where at least three batch sizes reached the target.
        failed: why cells have no result, by label.
    """

    target: Target | None
    rows: Sequence[Row]
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


def summarize(
    done: Sequence[tuple[Cell, Measured]], failed: Mapping[str, str], target: Target | None = None
) -> Summary:
    """Put cells together.

    Args:
        done: complete cells.
        failed: why others are not, by label.
        target: None: the evaluation loss that every complete cell has reached at some time.
    """
    best = [run.best_loss for _, run in done if isfinite(run.best_loss)]
    if target is None and best:
        target = Target("loss", max(best), upward=False)
    groups: dict[tuple[tuple[str, str], ...], list[Measured]] = {}
    for cell, run in done:
        values = tuple((word, value) for word, value in cell.values.items() if word != _SEED)
        groups.setdefault(values, []).append(run)
    rows = [Row(dict(values), len(runs), _numbers(runs, target)) for values, runs in groups.items()]
    return Summary(target, rows, _critical(rows), dict(failed))


def _numbers(runs: Sequence[Measured], target: Target | None) -> dict[str, Spread]:
    each = [_of_run(run, target) for run in runs]
    names = [name for name in each[0] if all(name in one for one in each)]
    found = {name: Spread.of([one[name] for one in each]) for name in names}
    return {name: spread for name, spread in found.items() if spread is not None}


def _of_run(run: Measured, target: Target | None) -> dict[str, float]:
    found = {"steps": float(run.steps), "seconds": run.seconds, "samples/s": run.samples_per_second}
    if run.points:
        last = run.points[-1].values.items()
        found |= {f"final {name}": value for name, value in last if isfinite(value)}
    reached = run.first(target) if target is not None else None
    if reached is not None:
        found |= {"steps to target": float(reached.step), "samples to target": float(reached.samples)}
    return found


def _critical(rows: Sequence[Row]) -> list[tuple[Mapping[str, str], CriticalBatch]]:
    groups: dict[tuple[tuple[str, str], ...], dict[int, float]] = {}
    for row in rows:
        batch, reached = row.values.get("batch", ""), row.numbers.get("steps to target")
        if batch.isdecimal() and reached is not None:
            others = tuple((word, value) for word, value in row.values.items() if word != "batch")
            groups.setdefault(others, {})[int(batch)] = reached.mean
    found = [(dict(others), find_critical_batch(steps)) for others, steps in groups.items()]
    return [(values, critical) for values, critical in found if critical is not None]
