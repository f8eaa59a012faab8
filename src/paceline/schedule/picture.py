"""A schedule for the eye: as lines of text, and as SVG."""

from __future__ import annotations

from collections.abc import Collection, Iterator
from html import escape

from paceline.schedule.proof import Proof, Row

_COLORS = {"F": "#5b8fd6", "B": "#5fae7b", "W": "#d8a24a"}
_CELL, _HEIGHT, _LEFT = 22, 24, 64  # pixels: of one time unit, of a stage, before the first
_NAMES = {"F": "forward", "B": "backward", "W": "gradients of weights"}


def text_lines(proof: Proof) -> Iterator[str]:
    """One line for each stage, one cell for each unit of time; letters are chunks, behind a dot are parts."""
    unit, parted = min(row.seconds for row in proof.rows), _in_parts(proof)
    width = max(len(_label(row, parted)) for row in proof.rows) + 1
    for stage in range(len(proof.in_flight)):
        cells = ["." for _ in range(round(proof.total / unit))]
        for row in (row for row in proof.rows if row.stage == stage):
            first, last = (round(t / unit) for t in (row.time, row.time + row.seconds))
            cells[first:last] = [_label(row, parted)] + ["-"] * (last - first - 1)
        yield f"stage {stage}  " + "".join(cell.ljust(width) for cell in cells).rstrip()


def facts(proof: Proof) -> Iterator[str]:
    """Bubble and activations in words."""
    stages = len(proof.in_flight)
    yield f"bubble: {100 * proof.bubble:.1f} % of {proof.total:g} forwards' time on {stages} stages"
    kept = ", ".join(f"{n:g}" for n in proof.in_flight)
    yield f"micro-batches in flight, by stage: {kept}"


def svg(proof: Proof, title: str) -> str:
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
    parts += [_box(row, scale, _in_parts(proof)) for row in proof.rows]
    parts.append(f'<text x="4" y="{height - 8:g}">{escape("; ".join(facts(proof)))}</text></svg>')
    return "\n".join(parts) + "\n"


def _box(row: Row, scale: float, parted: Collection[int]) -> str:
    x, y = _LEFT + scale * row.time, 24 + _HEIGHT * row.stage
    chunk = f", chunk {row.chunk}" if row.chunk else ""
    chunk += f", part {row.part}" if row.stage in parted else ""
    return (
        f'<rect x="{x:g}" y="{y}" width="{scale * row.seconds - 1:g}" height="{_HEIGHT - 3}" rx="2"'
        f' fill="{_COLORS[row.operation]}" opacity="{0.55 if row.chunk else 1:g}">'
        f"<title>{_NAMES[row.operation]} of micro-batch {row.micro_batch}{chunk}</title></rect>"
        f'<text x="{x + 4:g}" y="{y + 15}" fill="#fff">{_label(row, parted)}</text>'
    )


def _label(row: Row, parted: Collection[int]) -> str:
    chunk = "" if not row.chunk else chr(ord("a") + row.chunk)
    return f"{row.operation}{row.micro_batch}{chunk}" + (f".{row.part}" if row.stage in parted else "")


def _in_parts(proof: Proof) -> set[int]:
    """Stages that run micro-batches in parts."""
    return {row.stage for row in proof.rows if row.part}
