"""Curves: what is drawn of a series of numbers, and on which scale. Pure; knows no HTML.

A chart as HTML: lines in an SVG that fills its box, labels beside it as text, values for the pointer.

The SVG is stretched to the box and its strokes are not, so the same page is sharp on a phone and on a screen.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from paceline.report.html import Html, tag
from paceline.report.run_facts import format_number

ChartPoint = tuple[float, float]

_MAX_BUCKETS = 400
_SMOOTHING_FRACTION = 40  # the running mean is over this part of the points
_LOGARITHMIC_FROM = 20.0
_MARGIN = 0.06


@dataclass(frozen=True)
class ChartCurve:
    """One series.

    Args:
        name: in the legend and under the pointer.
        color: name of a colour of the page.
        points: (step, value), ascending in step; values may be NaN.
        style: "noisy": faint, with its running mean on top; "line"; "dots": few points, each marked.
        run: which of the runs that a page shows it is of.
    """

    name: str
    color: str
    points: Sequence[ChartPoint]
    style: str = "line"
    run: int = 0


@dataclass(frozen=True)
class AxisScale:
    """A linear or logarithmic map of a range to 0..1.

    Args:
        low, high: the range; low < high.
        logarithmic: both are positive then.
    """

    low: float
    high: float
    logarithmic: bool = False

    def __call__(self, value: float) -> float:
        """Where a value is; outside of 0..1 for values outside of the range."""
        if self.logarithmic:
            return (math.log(max(value, 1e-300)) - math.log(self.low)) / (
                math.log(self.high) - math.log(self.low)
            )
        return (value - self.low) / (self.high - self.low)

    def ticks(self, about: int = 5) -> list[float]:
        """Round values inside the range."""
        if self.logarithmic:
            found = _decades(self.low, self.high)
            if len(found) >= 2:
                return found
        return list(_round_steps(self.low, self.high, about))


def fit_scale(
    values: Sequence[float], *, from_zero: bool = False, may_be_logarithmic: bool = False
) -> AxisScale:
    """A range with a margin around all finite values."""
    finite = [value for value in values if math.isfinite(value)] or [0.0, 1.0]
    low, high = min(finite), max(finite)
    if may_be_logarithmic and low > 0 and high / low > _LOGARITHMIC_FROM:
        margin = (high / low) ** _MARGIN
        return AxisScale(low / margin, high * margin, logarithmic=True)
    if from_zero:
        low = min(0.0, low)
    spread = (high - low) or abs(high) or 1.0
    return AxisScale(low if from_zero and low == 0 else low - _MARGIN * spread, high + _MARGIN * spread)


def downsample(points: Sequence[ChartPoint]) -> list[ChartPoint]:
    """So few points that a screen can show them, with the lowest and the highest of each stretch."""
    size = math.ceil(len(points) / _MAX_BUCKETS)
    if size <= 1:
        return list(points)
    found: list[ChartPoint] = []
    for start in range(0, len(points), size):
        bucket = [p for p in points[start : start + size] if math.isfinite(p[1])]
        ends = {min(bucket, key=lambda p: p[1]), max(bucket, key=lambda p: p[1])} if bucket else set()
        found += sorted(ends) or [points[start]]
    return found


def running_mean(points: Sequence[ChartPoint]) -> list[ChartPoint]:
    """The running mean over the points around each; those that are not finite are left out."""
    finite = [p for p in points if math.isfinite(p[1])]
    half = len(finite) // _SMOOTHING_FRACTION // 2
    sums = [0.0]
    for _, value in finite:
        sums.append(sums[-1] + value)
    means = []
    for i, (x, _) in enumerate(finite):
        first, end = max(0, i - half), min(len(finite), i + half + 1)
        means.append((x, (sums[end] - sums[first]) / (end - first)))
    step = max(1, len(means) // _MAX_BUCKETS)
    return means[::step] + ([means[-1]] if means and (len(means) - 1) % step else [])


def finite_segments(points: Sequence[ChartPoint]) -> Iterator[list[ChartPoint]]:
    """The points between those that are not finite."""
    found: list[ChartPoint] = []
    for point in points:
        if math.isfinite(point[1]):
            found.append(point)
        elif found:
            yield found
            found = []
    if found:
        yield found


def _decades(low: float, high: float) -> list[float]:
    exponents = range(math.floor(math.log10(low)), math.ceil(math.log10(high)) + 1)
    factors = (1, 2, 5) if len(exponents) <= 4 else (1,)
    return [f * 10.0**e for e in exponents for f in factors if low <= f * 10.0**e <= high]


def _round_steps(low: float, high: float, about: int) -> Iterator[float]:
    raw = (high - low) / about
    power = 10.0 ** math.floor(math.log10(raw))
    step = next(f * power for f in (1, 2, 2.5, 5, 10) if f * power >= raw * 0.999)
    for i in range(math.ceil(low / step - 1e-9), math.floor(high / step + 1e-9) + 1):
        yield i * step


_VIEWBOX_SIZE = 1000.0  # of the SVG's own coordinates
_MAX_LARGE_DOTS = 24
_CLEAR_FRACTION = 0.12  # of the width, that the word under the left end needs


def render_chart(
    title: str,
    curves: Sequence[ChartCurve],
    *,
    unit: str = "",
    from_zero: bool = False,
    may_be_logarithmic: bool = False,
    marks: Sequence[tuple[float, str]] = (),
) -> Html:
    """One chart over the steps.

    Args:
        curves: those without points are left out.
        unit: of the values, shown beside the title.
        marks: (step, text) for vertical lines, such as where a run was resumed.
    """
    curves = [curve for curve in curves if curve.points]
    if not curves:
        return Html("")
    steps = [x for curve in curves for x, _ in curve.points]
    across = AxisScale(min(0.0, *steps) if len(set(steps)) == 1 else min(steps), max(steps))
    values = [y for curve in curves for _, y in downsample(curve.points)]
    up = fit_scale(values, from_zero=from_zero, may_be_logarithmic=may_be_logarithmic)
    head = [tag("h3", title), tag("span", unit + (" · log scale" if up.logarithmic else ""), class_="unit")]
    labels, picture = _render_tick_labels(across, up), _render_svg(curves, across, up, marks)
    frame = json.dumps({"log": up.logarithmic, "zero": from_zero, "marks": marks})
    numbers = {"data_chart": _encode_curves(curves, across, up), "data_frame": frame}
    plot = tag("div", labels, picture, class_="plot", **numbers)
    return tag("figure", tag("figcaption", head, _render_legend(curves)), plot, class_="chart")


def _render_svg(
    curves: Sequence[ChartCurve], across: AxisScale, up: AxisScale, marks: Sequence[tuple[float, str]]
) -> Html:
    grid = [_render_path([(0.0, up(y)), (1.0, up(y))], "grid") for y in up.ticks()]
    lines = [_render_path([(across(x), 0.0), (across(x), 1.0)], "mark", text) for x, text in marks]
    drawn = [line for curve in curves for line in _render_curve(curve, across, up)]
    box = f"0 0 {_VIEWBOX_SIZE:g} {_VIEWBOX_SIZE:g}"
    return tag(
        "svg", grid, lines, drawn, viewBox=box, preserveAspectRatio="none", role="img", aria_hidden="true"
    )


def _render_curve(curve: ChartCurve, across: AxisScale, up: AxisScale) -> list[Html]:
    def place(points: Sequence[ChartPoint]) -> list[ChartPoint]:
        return [(across(x), up(y)) for x, y in points]

    style = f"--color: var(--{curve.color})"
    faint = "line faint" if curve.style == "noisy" else "line"
    found = [
        _render_path(place(part), faint, style=style) for part in finite_segments(downsample(curve.points))
    ]
    if curve.style == "noisy":
        found.append(_render_path(place(running_mean(curve.points)), "line", style=style))
    if curve.style == "dots" or len(curve.points) == 1:
        kind = "dot" if len(curve.points) <= _MAX_LARGE_DOTS else "dot small"
        found += [_render_path([p, p], kind, style=style) for p in place(curve.points) if math.isfinite(p[1])]
    return found


def _render_path(points: Sequence[ChartPoint], kind: str, text: str = "", style: str | None = None) -> Html:
    """A line through points of the unit square, whose first coordinate goes right and second up."""
    words = " L".join(f"{_VIEWBOX_SIZE * x:.1f} {_VIEWBOX_SIZE * (1 - y):.1f}" for x, y in points)
    title = tag("title", text) if text else ""
    return tag("path", title, d=f"M{words}", class_=kind, style=style)


def _render_tick_labels(across: AxisScale, up: AxisScale) -> list[Html]:
    ys = [
        tag("span", format_number(y, 3), class_="y", style=f"top: {100 * (1 - up(y)):.2f}%")
        for y in up.ticks()
    ]
    steps = [x for x in across.ticks(4) if x == int(x)]
    xs = [tag("span", f"{x:,.0f}", class_="x", style=f"left: {100 * across(x):.2f}%") for x in steps]
    free = all(across(x) > _CLEAR_FRACTION for x in steps)
    return [*ys, *xs, tag("span", "steps", class_="x left")] if free else [*ys, *xs]


def _render_legend(curves: Sequence[ChartCurve]) -> Html:
    if len(curves) < 2:
        return Html("")
    first = {c.color: c for c in reversed(curves)}  # dots in the colour of a line belong to it
    keys = [
        tag("span", tag("i", style=f"background: var(--{c.color})"), c.name, data_color=c.color)
        for c in curves
        if first[c.color] is c
    ]
    return tag("span", keys, class_="legend")


def _encode_curves(curves: Sequence[ChartCurve], across: AxisScale, up: AxisScale) -> str:
    """What the pointer reads: for every curve the places and the values as text."""
    found = [
        {
            "name": curve.name,
            "color": curve.color,
            "style": curve.style,
            "run": curve.run,
            "value": [y if math.isfinite(y) else None for _, y in points],
            "x": [round(across(x), 5) for x, _ in points],
            "y": [round(up(y), 5) if math.isfinite(y) else None for _, y in points],
            "step": [int(x) for x, _ in points],
            "text": [format_number(y, 5) for _, y in points],
        }
        for curve in curves
        for points in [downsample(curve.points)]
    ]
    return json.dumps(found, separators=(",", ":"))
