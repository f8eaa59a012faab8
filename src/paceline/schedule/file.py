"""A schedule in a file: rows of time, stage, operation, micro_batch and chunk, separated by commas.

A stage runs its rows in the order of their times. Times only order: a stage goes on when what it needs is
there. Where a stage runs micro-batches in parts, a further column says which.
"""

from __future__ import annotations

import csv
from collections.abc import Mapping
from pathlib import Path

from paceline.errors import StrategyError
from paceline.schedule.proof import Proof
from paceline.schedule.table import Action, Table

COLUMNS = ("time", "stage", "operation", "micro_batch", "chunk")
_PART = "part"


def is_file(word: str) -> bool:
    """Whether a word of a strategy is the name of a file: it ends with .csv."""
    return word.endswith(".csv")


def as_word(text: str) -> str:
    """A schedule as a word and its argument: FILE.csv is file:FILE.csv."""
    return f"file:{text}" if is_file(text) and not text.startswith("file:") else text


def write_rows(proof: Proof, path: Path) -> None:
    """Write a schedule as `read_table` reads it."""
    with path.open("w", encoding="utf-8", newline="") as file:
        rows = csv.writer(file, lineterminator="\n")
        columns = (*COLUMNS, *[_PART] * any(row.part for row in proof.rows))
        rows.writerow(columns)
        rows.writerows((f"{row.time:g}", *row[1 : len(columns)]) for row in proof.rows)


def read_table(path: Path) -> Table:
    """Read a schedule; it is not proven yet.

    Raises:
        StrategyError: there is no such file, or a row that cannot be read; names the line.
    """
    try:
        with path.open(encoding="utf-8", newline="") as file:
            rows = list(csv.DictReader(file))
    except (OSError, UnicodeDecodeError) as error:
        raise StrategyError(
            f"the schedule {path} cannot be read: {error}",
            next_step='write one with "paceline schedule show 1f1b --csv FILE", and give its path',
        ) from error
    found = sorted(_row(row, line, path) for line, row in enumerate(rows, 2))
    if not found:
        raise StrategyError(f"the schedule {path} has no rows", next_step=_expected())
    orders: list[list[Action]] = [[] for _ in range(1 + max(stage for _, _, stage, _ in found))]
    for _, _, stage, action in found:
        orders[stage].append(action)
    return Table(orders, 1 + max(action.chunk for _, _, _, action in found))


def _row(row: Mapping[str, str | None], line: int, path: Path) -> tuple[float, int, int, Action]:
    try:
        stage, micro_batch, chunk = (int(row[name] or "") for name in ("stage", "micro_batch", "chunk"))
        time, kind = float(row["time"] or ""), row["operation"] or ""
        part = int(row[_PART] or "") if _PART in row else 0
        if kind not in ("F", "B", "W") or min(stage, micro_batch, chunk, part) < 0:
            raise ValueError
    except (KeyError, ValueError):
        raise StrategyError(
            f"the schedule has a row that is none: {', '.join(str(value) for value in row.values())}",
            where=f"{path}, line {line}",
            next_step=_expected(),
        ) from None
    return time, line, stage, Action(kind, micro_batch, chunk, part)


def _expected() -> str:
    return (
        f"the first line is {','.join(COLUMNS)}, and {_PART} where there are parts; operations are F, B and"
        " W, numbers begin at 0"
    )
