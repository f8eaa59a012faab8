"""The sink `csv`: one row per step and evaluation in `metrics.csv`, for spreadsheets and data frames."""

from __future__ import annotations

import csv
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any, TextIO

from paceline.observe.background_sink import BackgroundSink, scalars_of_evaluation, scalars_of_step
from paceline.observe.sinks import SinkSite
from paceline.observe.step_stats import StepStats

CSV = "metrics.csv"


class CsvWriter:
    """A CSV file with the steps taken in the first column, and one column for each number.

    A row has the numbers of a step or of an evaluation; the other cells are empty. If a number appears that
    has no column yet, the file is written anew with that column.

    Args:
        path: appended to, so that a resumed run continues its file.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._columns = ["step"]
        if path.exists():
            with path.open(newline="", encoding="utf-8") as file:
                self._columns = next(csv.reader(file), self._columns)
        self._file: TextIO = path.open("a", newline="", encoding="utf-8")

    def step(self, stats: StepStats) -> None:
        """Write the numbers of one step, after which `step` steps were taken."""
        self._write(stats.step + 1, scalars_of_step(stats))

    def event(self, name: str, record: Mapping[str, Any]) -> None:
        """Write the numbers of an evaluation."""
        if name == "evaluation":
            self._write(record["step"], scalars_of_evaluation(record))

    def close(self) -> None:
        """Close the file."""
        self._file.close()

    def _write(self, step: int, scalars: Mapping[str, float]) -> None:
        row = {"step": step, **scalars}
        if new := [name for name in row if name not in self._columns]:
            self._add_columns(new)
        elif not self._file.tell():
            self._rows(self._file).writeheader()
        self._rows(self._file).writerow(row)
        self._file.flush()

    def _add_columns(self, names: list[str]) -> None:
        self._file.close()
        with self._path.open(newline="", encoding="utf-8") as file:
            rows = list(csv.DictReader(file))
        self._columns = [*self._columns, *names]
        temporary = self._path.with_name(f".{self._path.name}.{os.getpid()}")
        with temporary.open("w", newline="", encoding="utf-8") as file:
            self._rows(file).writeheader()
            self._rows(file).writerows({k: v for k, v in row.items() if k in self._columns} for row in rows)
        temporary.replace(self._path)
        self._file = self._path.open("a", newline="", encoding="utf-8")

    def _rows(self, file: TextIO) -> csv.DictWriter:
        return csv.DictWriter(file, self._columns, lineterminator="\n")


def build_csv(site: SinkSite, argument: object) -> BackgroundSink:
    """Build the sink of `metrics.csv`."""
    return BackgroundSink(
        "csv", lambda: CsvWriter(site.run_dir / CSV), events=("evaluation",), warn=site.warn
    )
