"""The curves of a run: one value of each measurement a step, thinned out for drawing.

Invariant: of steps that were taken again after a resume the last ones count. A range of steps is returned as
the smallest and the largest value of each of some intervals, so that no spike is lost however long the run.
"""

from __future__ import annotations

import math
from array import array
from bisect import bisect_left
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

STEP_FIELDS = ("loss", "grad_norm", "lr", "seconds", "samples_per_second", "loss_scale")
_MAX_METRICS = 64
_NAN = math.nan


class CurvePoints(NamedTuple):
    """A part of a curve.

    Args:
        steps: where each interval begins.
        low, high: the smallest and the largest finite value in the interval; NaN if it has none. They are
            equal where each interval is one step.
        last: the value of the last step of each interval, which may not be finite.
    """

    steps: list[int]
    low: list[float]
    high: list[float]
    last: list[float]


class RunCurves:
    """Curves by name: fields of a step, `metrics.NAME`, and `evaluation.loss` and `evaluation.NAME`."""

    def __init__(self) -> None:
        self._tables = {"step": _Table(), "evaluation": _Table()}

    def add(self, records: Iterable[Mapping[str, Any]]) -> None:
        """Take records into account, in the order in which they were written."""
        for record in records:
            event = record["event"]
            if event == "step":
                values = {name: record.get(name, _NAN) for name in STEP_FIELDS}
                values |= {f"metrics.{name}": value for name, value in record["metrics"].items()}
                self._tables["step"].append(record["step"], record.get("time", _NAN), values)
            elif event == "evaluation":
                values = {"evaluation.loss": record["loss"]}
                values |= {f"evaluation.{name}": value for name, value in record["metrics"].items()}
                self._tables["evaluation"].append(record["step"], record.get("time", _NAN), values)
            elif event == "run":
                first = record["step"]
                self._tables["step"].cut(first)
                # An evaluation counts the steps before it, so the one at the step of the checkpoint stays.
                self._tables["evaluation"].cut(first + 1)

    @property
    def names(self) -> list[str]:
        """All curves that have a value."""
        return [name for table in self._tables.values() for name in table.columns]

    @property
    def num_steps(self) -> int:
        """Number of rows of steps."""
        return len(self._tables["step"].steps)

    def points(
        self, name: str, first: int = 0, end: int | None = None, max_points: int = 1000
    ) -> CurvePoints:
        """Return the part of a curve in steps `first` to `end`, in at most `max_points` intervals.

        Returns:
            An empty part if there is no such curve.
        """
        table = next((table for table in self._tables.values() if name in table.columns), None)
        return CurvePoints([], [], [], []) if table is None else table.points(name, first, end, max_points)

    def times(self, steps: Sequence[int], *, of_evaluations: bool = False) -> list[float]:
        """Return the time of each step, in seconds since the epoch; NaN if it is unknown."""
        table = self._tables["evaluation" if of_evaluations else "step"]
        rows = (bisect_left(table.steps, step) for step in steps)
        return [table.times[row] if row < len(table.times) else _NAN for row in rows]


class _Table:
    """Rows by ascending step."""

    def __init__(self) -> None:
        self.steps = array("q")
        self.times = array("d")
        self.columns: dict[str, array[float]] = {}

    def append(self, step: int, time: float, values: Mapping[str, Any]) -> None:
        if self.steps and self.steps[-1] >= step:
            self.cut(step)
        num_rows = len(self.steps)
        self.steps.append(step)
        self.times.append(float(time))
        for name, value in values.items():
            column = self.columns.get(name)
            if column is None:
                if len(self.columns) >= len(STEP_FIELDS) + _MAX_METRICS:
                    continue
                column = self.columns[name] = array("d", [_NAN]) * num_rows
            column.append(float(value))
        for column in self.columns.values():
            if len(column) == num_rows:
                column.append(_NAN)

    def cut(self, step: int) -> None:
        """Remove the rows from a step on."""
        row = bisect_left(self.steps, step)
        del self.steps[row:], self.times[row:]
        for column in self.columns.values():
            del column[row:]

    def points(self, name: str, first: int, end: int | None, max_points: int) -> CurvePoints:
        start = bisect_left(self.steps, first)
        stop = len(self.steps) if end is None else bisect_left(self.steps, end)
        column = self.columns[name]
        stride = max(1, -(-(stop - start) // max(1, max_points)))
        points = CurvePoints([], [], [], [])
        for row in range(start, stop, stride):
            values = column[row : min(row + stride, stop)]
            finite = values if stride == 1 else [value for value in values if math.isfinite(value)]
            points.steps.append(self.steps[row])
            points.low.append(min(finite, default=_NAN))
            points.high.append(max(finite, default=_NAN))
            points.last.append(values[-1])
        return points
