"""A schedule in a file: rows of time, stage, operation, micro_batch and chunk, separated by commas.

A stage runs its rows in the order of their times. Times only order: a stage goes on when what it needs is
there. Where a stage runs micro-batches in parts, a further column says which.

A schedule for the eye: as lines of text, and as SVG.
"""

from __future__ import annotations

import csv
from collections.abc import Collection, Iterator, Mapping
from html import escape
from pathlib import Path

from paceline.errors import StrategyError
from paceline.pipeline_schedule.schedule_table import (
    PipelineAction,
    ScheduleTable,
    ScheduleTimeline,
    TimelineRow,
)

CSV_COLUMNS = ("time", "stage", "operation", "micro_batch", "chunk")
_PART_COLUMN = "part"


def is_schedule_file(word: str) -> bool:
    """Whether a word of a strategy is the name of a file: it ends with .csv."""
    return word.endswith(".csv")


def schedule_word(text: str) -> str:
    """A schedule as a word and its argument: FILE.csv is file:FILE.csv."""
    return f"file:{text}" if is_schedule_file(text) and not text.startswith("file:") else text


def write_schedule_csv(proof: ScheduleTimeline, path: Path) -> None:
    """Write a schedule as `read_schedule_csv` reads it."""
    with path.open("w", encoding="utf-8", newline="") as file:
        rows = csv.writer(file, lineterminator="\n")
        columns = (*CSV_COLUMNS, *[_PART_COLUMN] * any(row.part for row in proof.rows))
        rows.writerow(columns)
        rows.writerows((f"{row.time:g}", *row[1 : len(columns)]) for row in proof.rows)


def read_schedule_csv(path: Path) -> ScheduleTable:
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
    found = sorted(_parse_row(row, line, path) for line, row in enumerate(rows, 2))
    if not found:
        raise StrategyError(f"the schedule {path} has no rows", next_step=_format_hint())
    orders: list[list[PipelineAction]] = [[] for _ in range(1 + max(stage for _, _, stage, _ in found))]
    for _, _, stage, action in found:
        orders[stage].append(action)
    return ScheduleTable(orders, 1 + max(action.chunk for _, _, _, action in found))


def _parse_row(
    row: Mapping[str, str | None], line: int, path: Path
) -> tuple[float, int, int, PipelineAction]:
    try:
        stage, micro_batch, chunk = (int(row[name] or "") for name in ("stage", "micro_batch", "chunk"))
        time, kind = float(row["time"] or ""), row["operation"] or ""
        part = int(row[_PART_COLUMN] or "") if _PART_COLUMN in row else 0
        if kind not in ("F", "B", "W") or min(stage, micro_batch, chunk, part) < 0:
            raise ValueError
    except (KeyError, ValueError):
        raise StrategyError(
            f"the schedule has a row that is none: {', '.join(str(value) for value in row.values())}",
            where=f"{path}, line {line}",
            next_step=_format_hint(),
        ) from None
    return time, line, stage, PipelineAction(kind, micro_batch, chunk, part)


def _format_hint() -> str:
    return (
        f"the first line is {','.join(CSV_COLUMNS)}, and {_PART_COLUMN} where there are parts; operations are F, B and"
        " W, numbers begin at 0"
    )


_COLORS = {"F": "#5b8fd6", "B": "#5fae7b", "W": "#d8a24a"}
_CELL, _HEIGHT, _LEFT = 22, 24, 64  # pixels: of one time unit, of a stage, before the first
_NAMES = {"F": "forward", "B": "backward", "W": "gradients of weights"}


def render_text(proof: ScheduleTimeline) -> Iterator[str]:
    """One line for each stage, one cell for each unit of time; letters are chunks, behind a dot are parts."""
    unit, parted = min(row.seconds for row in proof.rows), _stages_with_parts(proof)
    width = max(len(_action_label(row, parted)) for row in proof.rows) + 1
    for stage in range(len(proof.in_flight)):
        cells = ["." for _ in range(round(proof.total / unit))]
        for row in (row for row in proof.rows if row.stage == stage):
            first, last = (round(t / unit) for t in (row.time, row.time + row.seconds))
            cells[first:last] = [_action_label(row, parted)] + ["-"] * (last - first - 1)
        yield f"stage {stage}  " + "".join(cell.ljust(width) for cell in cells).rstrip()


def describe_timeline(proof: ScheduleTimeline) -> Iterator[str]:
    """Bubble and activations in words."""
    stages = len(proof.in_flight)
    yield f"bubble: {100 * proof.bubble:.1f} % of {proof.total:g} forwards' time on {stages} stages"
    kept = ", ".join(f"{n:g}" for n in proof.in_flight)
    yield f"micro-batches in flight, by stage: {kept}"


def render_svg(proof: ScheduleTimeline, title: str) -> str:
    """A picture: time to the right, a row for each stage."""
    scale = _CELL / min(row.seconds for row in proof.rows)
    width, height = _LEFT + scale * proof.total + 8, _HEIGHT * len(proof.in_flight) + 56
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width:g} {height:g}" font-family="sans-serif"'
        f' font-size="11"><title>{escape(title)}</title>',
        f'<text x="4" y="16" font-size="13">{escape(title)}</text>',
    ]
    for stage in range(len(proof.in_flight)):
        parts.append(f'<text x="4" y="{40 + _HEIGHT * stage}">stage {stage}</text>')
    parts += [_render_box(row, scale, _stages_with_parts(proof)) for row in proof.rows]
    parts.append(f'<text x="4" y="{height - 8:g}">{escape("; ".join(describe_timeline(proof)))}</text></svg>')
    return "\n".join(parts) + "\n"


def _render_box(row: TimelineRow, scale: float, parted: Collection[int]) -> str:
    x, y = _LEFT + scale * row.time, 24 + _HEIGHT * row.stage
    chunk = f", chunk {row.chunk}" if row.chunk else ""
    chunk += f", part {row.part}" if row.stage in parted else ""
    return (
        f'<rect x="{x:g}" y="{y}" width="{scale * row.seconds - 1:g}" height="{_HEIGHT - 3}" rx="2"'
        f' fill="{_COLORS[row.operation]}" opacity="{0.55 if row.chunk else 1:g}">'
        f"<title>{_NAMES[row.operation]} of micro-batch {row.micro_batch}{chunk}</title></rect>"
        f'<text x="{x + 4:g}" y="{y + 15}" fill="#fff">{_action_label(row, parted)}</text>'
    )


def _action_label(row: TimelineRow, parted: Collection[int]) -> str:
    chunk = "" if not row.chunk else chr(ord("a") + row.chunk)
    return f"{row.operation}{row.micro_batch}{chunk}" + (f".{row.part}" if row.stage in parted else "")


def _stages_with_parts(proof: ScheduleTimeline) -> set[int]:
    """Stages that run micro-batches in parts."""
    return {row.stage for row in proof.rows if row.part}
