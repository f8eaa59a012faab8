"""The curves of a run: one value of each measurement a step, thinned out for drawing.

Invariant: of steps that were taken again after a resume the last ones count. A range of steps is returned as
the smallest and the largest value of each of some intervals, so that no spike is lost however long the run.
The memory of a run is bounded: beyond 262,144 rows, neighbors are joined in the same way.
"""

from __future__ import annotations

import math
from array import array
from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from typing import Any, NamedTuple

import numpy as np

STEP_FIELDS = ("loss", "grad_norm", "lr", "seconds", "samples_per_second", "loss_scale")
_MAX_METRICS = 64
_MAX_SOURCES = 64  # ranks and hosts with curves of their samples
_MAX_ROWS = 2**18
_NAN = math.nan


class CurvePoints(NamedTuple):
    """A part of a curve.

    Args:
        steps: where each interval begins.
        low, high: the smallest and the largest finite value in the interval; NaN if it has none. They are
            equal where each interval is one step.
        last: the value of the last step of each interval, which may not be finite.
        times: of each interval's first step, in seconds since the epoch; NaN if unknown.
    """

    steps: list[int]
    low: list[float]
    high: list[float]
    last: list[float]
    times: list[float]


NO_POINTS = CurvePoints([], [], [], [], [])


class RunCurves:
    """Curves by name.

    They are the fields of a step, `metrics.NAME`, `evaluation.loss` and `evaluation.NAME`; and of a run with
    a system sampler `rank.RANK.NAME` and `host.HOST.NAME`, at the step that was taken at their time.

    Attributes:
        has_repeated_steps: a resume or a roll-back went to an earlier step.
    """

    def __init__(self) -> None:
        self._steps, self._evaluations = _Table(), _Table()
        self._sources: dict[str, _Table] = {}
        self.has_repeated_steps = False

    def add(self, records: Iterable[Mapping[str, Any]]) -> None:
        """Take records into account, in the order in which they were written."""
        for record in records:
            event = record["event"]
            if event == "step":
                values = [(name, record.get(name, _NAN)) for name in STEP_FIELDS]
                values += [(f"metrics.{name}", value) for name, value in record["metrics"].items()]
                self.has_repeated_steps |= self._steps.append(
                    record["step"], record.get("time", _NAN), values
                )
            elif event == "evaluation":
                values = [("evaluation.loss", record["loss"])]
                values += [(f"evaluation.{name}", value) for name, value in record["metrics"].items()]
                self._evaluations.append(record["step"], record.get("time", _NAN), values)
            elif event == "run":
                first = record["step"]
                self.has_repeated_steps |= self._steps.cut(first)
                # An evaluation counts the steps before it, so the one at the step of the checkpoint stays.
                self._evaluations.cut(first + 1)
            elif event in _SAMPLED_VALUES:
                self._add_sample(record)

    def _add_sample(self, record: Mapping[str, Any]) -> None:
        is_rank = record["event"] == "process"
        source = f"rank.{record.get('rank', 0)}" if is_rank else f"host.{record.get('host', '')}"
        if source not in self._sources and len(self._sources) >= _MAX_SOURCES:
            return
        table = self._sources.setdefault(source, _Table())
        time = float(record.get("time", 0.0))
        # The key of a sample is its time, in microseconds; its step is looked up when it is drawn, because
        # the samples of a long run are read before its steps.
        key = max(round(1e6 * time), table.keys[-1] + 1 if table.keys else 0)
        with suppress(TypeError, ValueError, ArithmeticError):  # a table may have anything in it
            found = _SAMPLED_VALUES[record["event"]](record)
            table.append(key, time, [(f"{source}.{name}", float(value)) for name, value in found])

    @property
    def _tables(self) -> list[_Table]:
        return [self._steps, self._evaluations, *self._sources.values()]

    @property
    def names(self) -> list[str]:
        """All curves that have a value."""
        return [name for table in self._tables for name in table.columns]

    @property
    def num_steps(self) -> int:
        """Number of rows of steps."""
        return self._steps.num_values

    @property
    def stride(self) -> int:
        """Number of steps of a row; 1 unless the run is so long that its rows were joined."""
        return self._steps.stride

    def is_sampled(self, name: str) -> bool:
        """Return whether a curve is one of the system sampler."""
        return any(name in table.columns for table in self._sources.values())

    def points(
        self, name: str, first: int = 0, end: int | None = None, max_points: int = 1000
    ) -> CurvePoints:
        """Return the part of a curve in steps `first` to `end`, in at most `max_points` intervals.

        Returns:
            An empty part if there is no such curve.
        """
        table = next((table for table in self._tables if name in table.columns), None)
        if table is None:
            return NO_POINTS
        if table is self._steps or table is self._evaluations:
            return table.points(name, first, end, max_points)
        times, steps = self._steps.times, self._steps.keys
        first_key = self._key_of(first) if first > 0 else 0
        found = table.points(name, first_key, None if end is None else self._key_of(end), max_points)
        rows = (bisect_right(times, time) - 1 for time in found.times)
        return found._replace(steps=[steps[max(0, row)] if steps else 0 for row in rows])

    def _key_of(self, step: int) -> int | None:
        """Return the key of samples at the time of a step; None beyond the last one."""
        row = bisect_left(self._steps.keys, step)
        return round(1e6 * self._steps.times[row]) if row < len(self._steps.keys) else None


class _Table:
    """Rows by ascending key.

    Attributes:
        keys, times: of the first value of each row.
        stride: how many values a row has, the last one perhaps fewer.
        columns: by name the last value of each row.
    """

    def __init__(self) -> None:
        self.keys = array("q")
        self.times = array("d")
        self.stride = 1
        self.columns: dict[str, array[float]] = {}
        self._low: dict[str, array[float]] = {}  # empty while a row is one value
        self._high: dict[str, array[float]] = {}
        self._num_in_last_row, self._last_key = 0, -1

    @property
    def num_values(self) -> int:
        """Number of values of a column."""
        return max(0, len(self.keys) - 1) * self.stride + self._num_in_last_row

    def append(self, key: int, time: float, values: Sequence[tuple[str, Any]]) -> bool:
        """Add a row; return whether rows from this key on had to be removed first."""
        is_repeated = bool(self.keys) and self._last_key >= key and self.cut(key)
        if self.stride > 1 and 0 < self._num_in_last_row < self.stride:
            self._join_to_last(values)
            self._num_in_last_row += 1
            self._last_key = key
            return is_repeated
        if len(self.keys) >= _MAX_ROWS:
            self._join_neighbors()
        num_rows = len(self.keys)
        self.keys.append(key)
        self.times.append(float(time))
        for name, value in values:
            column = self.columns.get(name)
            if column is None:
                if len(self.columns) >= len(STEP_FIELDS) + _MAX_METRICS:
                    continue
                column = self._new_column(name, num_rows)
            number = float(value)
            column.append(number)
            if self.stride > 1:
                finite = number if math.isfinite(number) else _NAN
                self._low[name].append(finite)
                self._high[name].append(finite)
        for table in (self.columns, self._low, self._high):
            for column in table.values():
                if len(column) == num_rows:
                    column.append(_NAN)
        self._num_in_last_row, self._last_key = 1, key
        return is_repeated

    def _new_column(self, name: str, num_rows: int) -> array[float]:
        tables = (self.columns, self._low, self._high) if self.stride > 1 else (self.columns,)
        for table in tables:
            table[name] = array("d", [_NAN]) * num_rows
        return self.columns[name]

    def _join_to_last(self, values: Sequence[tuple[str, Any]]) -> None:
        for name, value in values:
            column = self.columns.get(name)
            if column is None:
                continue  # it begins with the next row
            number = column[-1] = float(value)
            if math.isfinite(number):
                # Comparisons with NaN are false.
                if not self._low[name][-1] <= number:
                    self._low[name][-1] = number
                if not self._high[name][-1] >= number:
                    self._high[name][-1] = number

    def _join_neighbors(self) -> None:
        """Join each two rows, so that there is room again."""
        if self.stride == 1:
            for name, column in self.columns.items():
                finite = _without_infinities(column)
                self._low[name], self._high[name] = _packed(finite), _packed(finite)
        for table, choose in ((self._low, np.fmin), (self._high, np.fmax)):
            for name, column in table.items():
                values = np.array(column)
                table[name] = _packed(choose(values[::2], values[1::2]))
        for name in self.columns:
            self.columns[name] = self.columns[name][1::2]
        self.keys, self.times = self.keys[::2], self.times[::2]
        self.stride *= 2
        self._num_in_last_row = self.stride

    def cut(self, key: int) -> bool:
        """Remove the values from a key on, but whole rows only; return whether there were any."""
        if not self.keys or self._last_key < key:
            return False
        self._last_key = key - 1
        row = bisect_left(self.keys, key)
        if row == len(self.keys):  # within the last row, whose other values are kept
            return True
        self._num_in_last_row = self.stride if row else 0
        del self.keys[row:], self.times[row:]
        for table in (self.columns, self._low, self._high):
            for column in table.values():
                del column[row:]
        return True

    def points(self, name: str, first: int | None, end: int | None, max_points: int) -> CurvePoints:
        num_rows = len(self.keys)
        start = num_rows if first is None else bisect_left(self.keys, first)
        stop = num_rows if end is None else bisect_left(self.keys, end)
        if start >= stop:
            return NO_POINTS
        keys, times, last = self.keys[start:stop], self.times[start:stop], self.columns[name][start:stop]
        stride = -(-(stop - start) // max(1, max_points))
        if stride == 1 and self.stride == 1:
            values = last.tolist()
            return CurvePoints(keys.tolist(), values, values, values, times.tolist())
        begins = np.arange(0, stop - start, stride)
        low, high = (
            choose.reduceat(_without_infinities(table.get(name, self.columns[name])[start:stop]), begins)
            for table, choose in ((self._low, np.fmin), (self._high, np.fmax))
        )
        ends = [*(begins[1:] - 1), stop - start - 1]
        return CurvePoints(
            keys[::stride].tolist(),
            low.tolist(),
            high.tolist(),
            [last[end] for end in ends],
            times[::stride].tolist(),
        )


def _without_infinities(column: array[float]) -> np.ndarray:
    """Return float64 [rows] with NaN where a value is not finite."""
    values = np.array(column)
    values[np.isinf(values)] = _NAN
    return values


def _packed(values: np.ndarray) -> array[float]:
    return array("d", values.tobytes())


def _total(record: Mapping[str, Any], name: str, *, without: Sequence[str] = ()) -> float:
    """Return the sum of a table of a sample; 0 where it is missing."""
    table = record.get(name)
    if not isinstance(table, Mapping):
        return 0.0
    return float(sum(value for key, value in table.items() if key not in without))


def rank_cpu_cores(sample: Mapping[str, Any]) -> float:
    """Return the CPU time of a rank by second, of a record `process`; 0 if it does not say."""
    with suppress(TypeError, ValueError, ArithmeticError):
        return _total(sample, "cpu_seconds") / float(sample["seconds"])
    return 0.0


def _values_of_rank(record: Mapping[str, Any]) -> Iterator[tuple[str, float]]:
    memory = record.get("memory_bytes") or {}
    if "rss" in memory:
        yield "memory_bytes", memory["rss"]
    seconds = float(record.get("seconds", 0.0))
    if seconds > 0:
        yield "cpu_cores", rank_cpu_cores(record)
        yield "disk_bytes_per_second", _total(record, "disk_bytes") / seconds
        links = _total(record, "link_sent_bytes") + _total(record, "link_received_bytes")
        yield "link_bytes_per_second", links / seconds


def _values_of_host(record: Mapping[str, Any]) -> Iterator[tuple[str, float]]:
    seconds, memory = float(record.get("seconds", 0.0)), record.get("memory_bytes") or {}
    modes = _total(record, "cpu_seconds")
    if modes > 0:
        yield "cpu_fraction", _total(record, "cpu_seconds", without=("idle", "iowait")) / modes
    if memory.get("total") and "available" in memory:
        yield "memory_fraction", 1 - memory["available"] / memory["total"]
    if seconds > 0:
        for name, fields in (("network", ("sent", "received")), ("disk", ("read", "written"))):
            moved = sum(_total(record, f"{name}_{field}_bytes") for field in fields)
            yield f"{name}_bytes_per_second", moved / seconds
    for gpu, value in (record.get("gpu_utilization") or {}).items():
        yield f"gpu_{gpu}_fraction", value
    for gpu, value in (record.get("gpu_memory_bytes") or {}).items():
        yield f"gpu_{gpu}_memory_bytes", value


_SAMPLED_VALUES = {"process": _values_of_rank, "system": _values_of_host}
