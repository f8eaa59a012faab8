"""Formats of schedules: CSV files, text and SVG.

A file has rows of time, stage, operation, micro_batch and chunk, separated by commas. A stage runs its rows
in the order of their times. Times only order the rows: a stage continues when its inputs have arrived. Where
a stage runs micro-batches in parts, a further column has the index of the part.
"""

from __future__ import annotations

import csv
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
from html import escape
from pathlib import Path

from paceline.errors import StrategyError, format_count
from paceline.pipeline_schedule.schedule_table import (
    PipelineAction,
    ScheduleTable,
    ScheduleTimeline,
    TimelineRow,
)

CSV_COLUMNS = ("time", "stage", "operation", "micro_batch", "chunk")
_PART_COLUMN = "part"


def write_schedule_csv(proof: ScheduleTimeline, path: Path) -> None:
    """Write a schedule in the format of `read_schedule_csv`."""
    with path.open("w", encoding="utf-8", newline="") as file:
        rows = csv.writer(file, lineterminator="\n")
        columns = (*CSV_COLUMNS, *[_PART_COLUMN] * any(row.part for row in proof.rows))
        rows.writerow(columns)
        rows.writerows((f"{row.time:g}", *row[1 : len(columns)]) for row in proof.rows)


def read_schedule_csv(path: Path) -> ScheduleTable:
    """Read a schedule, without checking that it can run.

    Raises:
        StrategyError: the file does not exist, or a row cannot be parsed; the error has the line number.
    """
    try:
        with path.open(encoding="utf-8", newline="") as file:
            rows = list(csv.DictReader(file))
    except (OSError, UnicodeDecodeError) as error:
        raise StrategyError(
            f"the schedule {path} cannot be read: {error}",
            next_step='write one with "paceline schedule show 1f1b --csv FILE", and give its path',
        ) from error
    # The line comes after the time, so rows of equal times keep the order of the file.
    actions = sorted(_parse_row(row, line, path) for line, row in enumerate(rows, 2))
    if not actions:
        raise StrategyError(f"the schedule {path} has no rows", next_step=_format_hint())
    orders: list[list[PipelineAction]] = [[] for _ in range(1 + max(stage for _, _, stage, _ in actions))]
    for _, _, stage, action in actions:
        orders[stage].append(action)
    return ScheduleTable(orders, 1 + max(action.chunk for _, _, _, action in actions))


def _parse_row(
    row: Mapping[str, str | None], line: int, path: Path
) -> tuple[float, int, int, PipelineAction]:
    try:
        stage, micro_batch, chunk = (int(row[name] or "") for name in ("stage", "micro_batch", "chunk"))
        time, kind = float(row["time"] or ""), row["operation"] or ""
        part_index = int(row[_PART_COLUMN] or "") if _PART_COLUMN in row else 0
        if kind not in ("F", "B", "W") or min(stage, micro_batch, chunk, part_index) < 0:
            raise ValueError
    except (KeyError, ValueError):
        raise StrategyError(
            f"the schedule has an invalid row: {', '.join(str(value) for value in row.values())}",
            where=f"{path}, line {line}",
            next_step=_format_hint(),
        ) from None
    return time, line, stage, PipelineAction(kind, micro_batch, chunk, part_index)


def _format_hint() -> str:
    return (
        f"the first line must be {','.join(CSV_COLUMNS)}, with {_PART_COLUMN} if there are parts; operations"
        " are F, B and W, and numbers begin at 0"
    )


_COLORS = {"F": "#5b8fd6", "B": "#5fae7b", "W": "#d8a24a"}
# Pixels of one time unit, of a stage, before the first time unit, and of the narrowest box with a label.
_CELL, _HEIGHT, _LEFT, _MIN_LABEL = 22, 24, 64, 18
_NAMES = {"F": "forward", "B": "backward", "W": "gradients of weights"}


def render_text(proof: ScheduleTimeline) -> Iterator[str]:
    """Yield a line for each stage, with a cell for each time unit; letters are chunks, parts follow a dot."""
    unit, parted = min(row.seconds for row in proof.rows), _stages_with_parts(proof)
    width = max(len(_action_label(row, parted)) for row in proof.rows) + 1
    for stage in range(len(proof.in_flight)):
        cells = ["." for _ in range(round(proof.total / unit))]
        for row in (row for row in proof.rows if row.stage == stage):
            first, last = (round(t / unit) for t in (row.time, row.time + row.seconds))
            cells[first:last] = [_action_label(row, parted)] + ["-"] * (last - first - 1)
        yield f"stage {stage}  " + "".join(cell.ljust(width) for cell in cells).rstrip()


def describe_timeline(proof: ScheduleTimeline) -> Iterator[str]:
    """Yield lines about the bubble and the activations."""
    stages = format_count(len(proof.in_flight), "stage")
    yield f"bubble: {100 * proof.bubble:.1f} % of {proof.total:g} forwards' time on {stages}"
    in_flight = ", ".join(f"{n:g}" for n in proof.in_flight)
    yield f"micro-batches in flight, by stage: {in_flight}"


@dataclass(frozen=True)
class PictureScale:
    """The scale of a picture, so that several can have the same.

    Args:
        pixels: of one unit of time.
        width: of the picture, in units of time.
    """

    pixels: float
    width: float


def render_svg(
    proof: ScheduleTimeline, title: str, *, caption: str | None = None, scale: PictureScale | None = None
) -> str:
    """Return a picture as SVG: time from left to right, one row for each stage.

    Args:
        caption: the line below; None: the bubble and the micro-batches in flight.
        scale: None: the shortest action is as wide as its label.
    """
    scale = scale or PictureScale(_CELL / min(row.seconds for row in proof.rows), proof.total)
    width, height = _LEFT + scale.pixels * scale.width + 8, _HEIGHT * len(proof.in_flight) + 56
    elements = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width:g} {height:g}" font-family="sans-serif"'
        f' font-size="11" fill="currentColor"><title>{escape(title)}</title>',
        f'<text x="4" y="16" font-size="13">{escape(title)}</text>',
    ]
    for stage in range(len(proof.in_flight)):
        elements.append(f'<text x="4" y="{40 + _HEIGHT * stage}">stage {stage}</text>')
    elements += [_render_box(row, scale.pixels, _stages_with_parts(proof)) for row in proof.rows]
    caption = "; ".join(describe_timeline(proof)) if caption is None else caption
    elements.append(f'<text x="4" y="{height - 8:g}">{escape(caption)}</text></svg>')
    return "\n".join(elements) + "\n"


def _render_box(row: TimelineRow, scale: float, parted: Collection[int]) -> str:
    x, y, width = _LEFT + scale * row.time, 24 + _HEIGHT * row.stage, scale * row.seconds
    chunk = f", chunk {row.chunk}" if row.chunk else ""
    chunk += f", part {row.part}" if row.stage in parted else ""
    has_label = width >= _MIN_LABEL
    return (
        f'<rect x="{x:g}" y="{y}" width="{max(0.5, width - 1):g}" height="{_HEIGHT - 3}" rx="2"'
        f' fill="{_COLORS[row.operation]}" opacity="{0.55 if row.chunk else 1:g}">'
        f"<title>{_NAMES[row.operation]} of micro-batch {row.micro_batch}{chunk}</title></rect>"
        + (f'<text x="{x + 4:g}" y="{y + 15}" fill="#fff">{_action_label(row, parted)}</text>' * has_label)
    )


def _action_label(row: TimelineRow, parted: Collection[int]) -> str:
    chunk = "" if not row.chunk else chr(ord("a") + row.chunk)
    return f"{row.operation}{row.micro_batch}{chunk}" + (f".{row.part}" if row.stage in parted else "")


def _stages_with_parts(proof: ScheduleTimeline) -> set[int]:
    """Return the stages that run micro-batches in parts."""
    return {row.stage for row in proof.rows if row.part}
