"""The plot of a sweep as one SVG without scripts and fonts: steps and samples to the target, and speed.

The horizontal axis is the sweep axis with the most values; each combination of the other axes is a line.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from html import escape

from paceline.report.svg_chart import format_ticks
from paceline.studies.sweep_summary import MeanAndDeviation, SweepRow, SweepSummary

_WIDTH, _HEIGHT, _LEFT, _TOP = 360, 240, 70, 68
_LETTER_WIDTH = 8  # pixels; an upper bound of the average over a line of text
_COLORS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9", "#000000")
_PANELS = ("steps to target", "samples to target", "samples/s")


@dataclass(frozen=True)
class _PlotSeries:
    """A line of the plot: the rows that differ only in its axis."""

    label: str
    color: str
    rows: Sequence[SweepRow]


def render_plot(summary: SweepSummary) -> str:
    """Return an SVG with a panel for each number; vertical bars show the deviation over seeds."""
    word = _plot_axis(summary.rows)
    series = _build_series(summary.rows, word)
    title = f"target: {summary.target}" if summary.target is not None else "no evaluation"
    names = [name for name in _PANELS if any(name in row.numbers for row in summary.rows)]
    heading = f"{', '.join(names) or 'no numbers'} by {word or 'nothing'}"
    texts = [heading, title, *(f"    {line.label}" for line in series)]
    width = max(max(1, len(names)) * (_WIDTH + _LEFT) + 40, 2 * _LEFT + _LETTER_WIDTH * max(map(len, texts)))
    height = _TOP + _HEIGHT + 60 + 18 * len(series)
    body = [render_text(_LEFT, 20, heading, "start", "bold")]
    body.append(render_text(_LEFT, 36, title, "start"))
    for i, name in enumerate(names):
        marks = _critical_marks(summary, word) if name == "steps to target" else []
        body += _render_panel(name, word, series, _LEFT + i * (_WIDTH + _LEFT), marks)
    for i, line in enumerate(series):
        y = _TOP + _HEIGHT + 60 + 18 * i
        body += [f'<rect x="{_LEFT}" y="{y - 9}" width="14" height="10" fill="{line.color}"/>']
        body += [render_text(_LEFT + 22, y, line.label, "start")]
    return render_svg(width, height, heading, body)


def render_svg(width: int, height: int, title: str, body: Sequence[str]) -> str:
    """Return an SVG of `width` x `height` pixels with a white background and some elements."""
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{width}" height="{height}" '
        f'viewBox="0 0 {width} {height}" font-family="sans-serif" font-size="12">\n'
        f"<title>{escape(title)}</title>\n"
        f'<rect width="{width}" height="{height}" fill="white"/>\n' + "\n".join(body) + "\n</svg>\n"
    )


def _plot_axis(rows: Sequence[SweepRow]) -> str:
    """Return the axis with the most values; `batch` before all others."""
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
    """Render axes with their numbers, a line for each series, and dashed lines at the critical batches."""
    texts = list(dict.fromkeys(row.values.get(word, "") for line in series for row in line.rows))
    across = _horizontal_scale(texts)
    means = [row.numbers[name] for line in series for row in line.rows if name in row.numbers]
    ends = [m.mean + m.deviation for m in means] + [m.mean - m.deviation for m in means]
    up, bottom = _vertical_scale(ends), _TOP + _HEIGHT
    elements = [
        render_text(left + _WIDTH / 2, _TOP - 8, name),
        render_text(left + _WIDTH / 2, bottom + 34, word),
    ]
    elements += [f'<path d="M{left} {_TOP}V{bottom}H{left + _WIDTH}" fill="none" stroke="#888"/>']
    # Labels would overlap if there are more than the width has room for.
    stride = max(1, math.ceil(_LETTER_WIDTH * sum(len(text) + 2 for text in texts) / _WIDTH))
    elements += [render_text(left + across(text) * _WIDTH, bottom + 16, text) for text in texts[::stride]]
    ticks = _ticks(ends)
    elements += [
        render_text(left - 6, bottom - up(v) * _HEIGHT + 4, text, "end")
        for v, text in zip(ticks, format_ticks(ticks), strict=True)
    ]
    for mark in marks:
        x = left + across(str(mark)) * _WIDTH
        elements.append(f'<path d="M{x:.1f} {_TOP}V{bottom}" stroke="#888" stroke-dasharray="4 4"/>')
    for line in series:
        rows = [row for row in line.rows if name in row.numbers]
        points = [(left + across(row.values.get(word, "")) * _WIDTH, row.numbers[name]) for row in rows]
        elements += _render_line(points, line.color, lambda value: bottom - up(value) * _HEIGHT)
    return elements


def _critical_marks(summary: SweepSummary, word: str) -> list[float]:
    """Return the critical batches that lie between the measured ones."""
    batches = [float(row.values["batch"]) for row in summary.rows] if word == "batch" else []
    # None means larger than all measured batches, so it gets no mark, like 0.
    critical = [fit.batch or 0.0 for _, fit in summary.critical]
    return [batch for batch in critical if batches and min(batches) < batch < max(batches)]


def _ticks(values: Sequence[float]) -> list[float]:
    """Return up to five numbers from the smallest to the largest, evenly spaced in the plot."""
    low, high = min(values, default=0.0), max(values, default=0.0)
    if low == high:
        return [low] if values else []
    # The axis is logarithmic if all values are positive.
    if low > 0:
        return [low * (high / low) ** (i / 4) for i in range(5)]
    return [low + (high - low) * i / 4 for i in range(5)]


def _render_line(
    points: Iterable[tuple[float, MeanAndDeviation]], color: str, y_of: Callable[[float], float]
) -> list[str]:
    points = sorted(points, key=lambda point: point[0])
    path = " ".join(f"{x:.1f},{y_of(s.mean):.1f}" for x, s in points)
    elements = [f'<polyline points="{path}" fill="none" stroke="{color}"/>']
    for x, s in points:
        elements.append(f'<circle cx="{x:.1f}" cy="{y_of(s.mean):.1f}" r="3" fill="{color}"/>')
        if s.deviation:
            low, high = y_of(s.mean - s.deviation), y_of(s.mean + s.deviation)
            elements.append(f'<path d="M{x:.1f} {low:.1f}V{high:.1f}" stroke="{color}"/>')
    return elements


def _horizontal_scale(texts: Sequence[str]) -> Callable[[str], float]:
    """Return a map from values to 0..1: numbers by their logarithm, words evenly spaced."""
    try:
        scale = _vertical_scale([float(text) for text in texts])
        return lambda text: scale(float(text))
    except ValueError:
        return lambda text: (list(texts).index(text) + 0.5) / len(texts)


def _vertical_scale(values: Sequence[float]) -> Callable[[float], float]:
    """Return a map from values to 0.05 .. 0.95, logarithmic if all are positive."""
    positive = all(value > 0 for value in values)
    transform: Callable[[float], float] = math.log if positive else float
    low, high = min(map(transform, values), default=0.0), max(map(transform, values), default=1.0)
    return lambda value: 0.5 if high == low else 0.05 + 0.9 * (transform(value) - low) / (high - low)


def render_text(x: float, y: float, text: str, anchor: str = "middle", weight: str = "normal") -> str:
    """Return a text element at a point, in pixels."""
    return (
        f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}" font-weight="{weight}">{escape(text)}</text>'
    )
