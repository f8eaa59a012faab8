"""A sweep as one SVG without scripts or fonts of its own: steps to the target, and speed, over an axis."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from html import escape

from paceline.studies.sweep_summary import MeanAndDeviation, SweepRow, SweepSummary

_WIDTH, _HEIGHT, _LEFT, _TOP = 360, 240, 70, 68
_LETTER_WIDTH = 8  # the widest that a letter is, on the average of a line
_COLORS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9", "#000000")
_PANELS = ("steps to target", "samples to target", "samples/s")


@dataclass(frozen=True)
class _PlotSeries:
    """Rows that differ only in the axis of the plot."""

    label: str
    color: str
    rows: Sequence[SweepRow]


def render_plot(summary: SweepSummary) -> str:
    """A panel for each number, a line for each combination of other axes, bars for the spread of seeds."""
    word = _plot_axis(summary.rows)
    series = _build_series(summary.rows, word)
    title = f"target: {summary.target}" if summary.target is not None else "no evaluation"
    names = [name for name in _PANELS if any(name in row.numbers for row in summary.rows)]
    heading = f"{', '.join(names) or 'no numbers'} by {word or 'nothing'}"
    texts = [heading, title, *(f"    {one.label}" for one in series)]
    width = max(max(1, len(names)) * (_WIDTH + _LEFT) + 40, 2 * _LEFT + _LETTER_WIDTH * max(map(len, texts)))
    height = _TOP + _HEIGHT + 60 + 18 * len(series)
    body = [_render_text(_LEFT, 20, heading, "start", "bold")]
    body.append(_render_text(_LEFT, 36, title, "start"))
    for i, name in enumerate(names):
        marks = _critical_marks(summary, word) if name == "steps to target" else []
        body += _render_panel(name, word, series, _LEFT + i * (_WIDTH + _LEFT), marks)
    for i, one in enumerate(series):
        y = _TOP + _HEIGHT + 60 + 18 * i
        body += [f'<rect x="{_LEFT}" y="{y - 9}" width="14" height="10" fill="{one.color}"/>']
        body += [_render_text(_LEFT + 22, y, one.label, "start")]
    return _render_svg(width, height, heading, body)


def _render_svg(width: int, height: int, title: str, body: Sequence[str]) -> str:
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{width}" height="{height}" '
        f'viewBox="0 0 {width} {height}" font-family="sans-serif" font-size="12">\n'
        f"<title>{escape(title)}</title>\n"
        f'<rect width="{width}" height="{height}" fill="white"/>\n' + "\n".join(body) + "\n</svg>\n"
    )


def _plot_axis(rows: Sequence[SweepRow]) -> str:
    """The axis with the most values, `batch` first."""
    words = list(rows[0].values) if rows else []
    counts = {word: len({row.values[word] for row in rows}) for word in words}
    return max(words, key=lambda word: (word == "batch", counts[word]), default="")


def _build_series(rows: Sequence[SweepRow], word: str) -> list[_PlotSeries]:
    groups: dict[str, list[SweepRow]] = {}
    for row in rows:
        label = " ".join(f"{w}={v}" for w, v in row.values.items() if w != word) or word
        groups.setdefault(label, []).append(row)
    return [
        _PlotSeries(label, _COLORS[i % len(_COLORS)], members)
        for i, (label, members) in enumerate(groups.items())
    ]


def _render_panel(
    name: str, word: str, series: Sequence[_PlotSeries], left: int, marks: Sequence[float]
) -> list[str]:
    """Axes with their numbers, a line for each series, and dashed lines where the critical batches are."""
    texts = list(dict.fromkeys(row.values.get(word, "") for one in series for row in one.rows))
    along = _horizontal_scale(texts)
    spreads = [row.numbers[name] for one in series for row in one.rows if name in row.numbers]
    ends = [s.mean + s.deviation for s in spreads] + [s.mean - s.deviation for s in spreads]
    up, bottom = _vertical_scale(ends), _TOP + _HEIGHT
    found = [
        _render_text(left + _WIDTH / 2, _TOP - 8, name),
        _render_text(left + _WIDTH / 2, bottom + 34, word),
    ]
    found += [f'<path d="M{left} {_TOP}V{bottom}H{left + _WIDTH}" fill="none" stroke="#888"/>']
    every = max(1, math.ceil(_LETTER_WIDTH * sum(len(text) + 2 for text in texts) / _WIDTH))
    found += [_render_text(left + along(text) * _WIDTH, bottom + 16, text) for text in texts[::every]]
    found += [
        _render_text(left - 6, bottom - up(v) * _HEIGHT + 4, _format_tick(v), "end") for v in _ticks(ends)
    ]
    for mark in marks:
        x = left + along(str(mark)) * _WIDTH
        found.append(f'<path d="M{x:.1f} {_TOP}V{bottom}" stroke="#888" stroke-dasharray="4 4"/>')
    for one in series:
        rows = [row for row in one.rows if name in row.numbers]
        shown = [(left + along(row.values.get(word, "")) * _WIDTH, row.numbers[name]) for row in rows]
        found += _render_line(shown, one.color, lambda value: bottom - up(value) * _HEIGHT)
    return found


def _critical_marks(summary: SweepSummary, word: str) -> list[float]:
    """Critical batches that lie among those that were measured."""
    batches = [float(row.values["batch"]) for row in summary.rows] if word == "batch" else []
    found = [critical.batch or 0.0 for _, critical in summary.critical]
    return [batch for batch in found if batches and min(batches) < batch < max(batches)]


def _ticks(values: Sequence[float]) -> list[float]:
    """Up to five numbers between the smallest and the largest, evenly spaced in the plot."""
    low, high = min(values, default=0.0), max(values, default=0.0)
    if low == high:
        return [low] if values else []
    if low > 0:
        return [low * (high / low) ** (i / 4) for i in range(5)]
    return [low + (high - low) * i / 4 for i in range(5)]


def _format_tick(value: float) -> str:
    return f"{value:.0f}" if abs(value) >= 100 else f"{value:.3g}"


def _render_line(
    points: Iterable[tuple[float, MeanAndDeviation]], color: str, y_of: Callable[[float], float]
) -> list[str]:
    points = sorted(points, key=lambda point: point[0])
    path = " ".join(f"{x:.1f},{y_of(s.mean):.1f}" for x, s in points)
    found = [f'<polyline points="{path}" fill="none" stroke="{color}"/>']
    for x, s in points:
        found.append(f'<circle cx="{x:.1f}" cy="{y_of(s.mean):.1f}" r="3" fill="{color}"/>')
        if s.deviation:
            low, high = y_of(s.mean - s.deviation), y_of(s.mean + s.deviation)
            found.append(f'<path d="M{x:.1f} {low:.1f}V{high:.1f}" stroke="{color}"/>')
    return found


def _horizontal_scale(texts: Sequence[str]) -> Callable[[str], float]:
    """Where values stand along the axis, 0 to 1: numbers by their logarithm, words evenly."""
    try:
        scale = _vertical_scale([float(text) for text in texts])
        return lambda text: scale(float(text))
    except ValueError:
        return lambda text: (list(texts).index(text) + 0.5) / len(texts)


def _vertical_scale(values: Sequence[float]) -> Callable[[float], float]:
    """From values to 0.05 .. 0.95: logarithmic if all are positive."""
    positive = all(value > 0 for value in values)
    place: Callable[[float], float] = math.log if positive else float
    low, high = min(map(place, values), default=0.0), max(map(place, values), default=1.0)
    return lambda value: 0.5 if high == low else 0.05 + 0.9 * (place(value) - low) / (high - low)


def _render_text(x: float, y: float, text: str, anchor: str = "middle", weight: str = "normal") -> str:
    return (
        f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}" font-weight="{weight}">{escape(text)}</text>'
    )
