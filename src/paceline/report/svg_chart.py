"""Charts as HTML: curves of a run in an SVG, with labels as text and values for the pointer. Pure.

The SVG is stretched to its box and its strokes are not, so the same page is sharp on a phone and on a screen.
The labels lie beside the SVG as HTML text, because text in a stretched SVG would be distorted.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from paceline.report.html import Html, tag
from paceline.report.number_format import format_number

ChartPoint = tuple[float, float]

_MAX_BUCKETS = 400
_SMOOTHING_FRACTION = 40  # the running mean is over one in this many points
_LOGARITHMIC_FROM = 20.0
_MARGIN = 0.06


@dataclass(frozen=True)
class ChartCurve:
    """One series of a chart.

    Args:
        name: shown in the legend and at the pointer.
        color: name of a CSS variable of the page.
        points: (step, value), ascending in step; values may be NaN.
        style: "noisy" (faint, with its running mean on top), "line", or "dots" (few points, each marked).
        run: index of the run among those of the page.
    """

    name: str
    color: str
    points: Sequence[ChartPoint]
    style: str = "line"
    run: int = 0


@dataclass(frozen=True)
class AxisScale:
    """A linear or logarithmic map from a range to 0..1.

    Args:
        low, high: the range, low < high; both positive if `logarithmic`.
    """

    low: float
    high: float
    logarithmic: bool = False

    def __call__(self, value: float) -> float:
        """Return the position of a value; outside of 0..1 for values outside of the range."""
        if self.logarithmic:
            return (math.log(max(value, 1e-300)) - math.log(self.low)) / (
                math.log(self.high) - math.log(self.low)
            )
        return (value - self.low) / (self.high - self.low)

    def ticks(self, about: int = 5) -> list[float]:
        """Return round values inside the range, about as many as `about`."""
        if self.logarithmic:
            decades = _decades(self.low, self.high)
            if len(decades) >= 2:
                return decades
        return list(_round_steps(self.low, self.high, about))


def fit_scale(
    values: Sequence[float], *, from_zero: bool = False, may_be_logarithmic: bool = False
) -> AxisScale:
    """Return a scale with a margin around all finite values."""
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
    """Reduce points to what a screen can show: the lowest and the highest of each bucket."""
    size = math.ceil(len(points) / _MAX_BUCKETS)
    if size <= 1:
        return list(points)
    extremes: list[ChartPoint] = []
    for start in range(0, len(points), size):
        bucket = [p for p in points[start : start + size] if math.isfinite(p[1])]
        ends = {min(bucket, key=lambda p: p[1]), max(bucket, key=lambda p: p[1])} if bucket else set()
        extremes += sorted(ends) or [points[start]]
    return extremes


def running_mean(points: Sequence[ChartPoint]) -> list[ChartPoint]:
    """Return the running mean, centred at each point; values that are not finite are left out."""
    finite = [p for p in points if math.isfinite(p[1])]
    half = len(finite) // _SMOOTHING_FRACTION // 2
    # Differences of prefix sums: the window may have thousands of points.
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
    """Yield the runs of finite points; a line must not bridge a NaN."""
    segment: list[ChartPoint] = []
    for point in points:
        if math.isfinite(point[1]):
            segment.append(point)
        elif segment:
            yield segment
            segment = []
    if segment:
        yield segment


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


_VIEWBOX_SIZE = 1000.0  # coordinates of the SVG
_MAX_LARGE_DOTS = 24
_CLEAR_FRACTION = 0.12  # the part of the width that the label at the left end needs


def render_chart(
    title: str,
    curves: Sequence[ChartCurve],
    *,
    unit: str = "",
    from_zero: bool = False,
    may_be_logarithmic: bool = False,
    marks: Sequence[tuple[float, str]] = (),
) -> Html:
    """Render a chart over the steps; empty if no curve has points.

    Args:
        curves: those without points are left out.
        unit: unit of the values, shown beside the title.
        from_zero: the vertical axis begins at zero.
        may_be_logarithmic: the vertical axis is logarithmic if the values span a factor of 20.
        marks: (step, text) of vertical lines, for example where the run was resumed.
    """
    curves = [curve for curve in curves if curve.points]
    if not curves:
        return Html("")
    steps = [x for curve in curves for x, _ in curve.points]
    low = min(0.0, *steps) if len(set(steps)) == 1 else min(steps)
    across = AxisScale(low, max(steps) if max(steps) > low else low + 1.0)  # a single point at step 0
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
    def scale(points: Sequence[ChartPoint]) -> list[ChartPoint]:
        return [(across(x), up(y)) for x, y in points]

    style = f"--color: var(--{curve.color})"
    faint = "line faint" if curve.style == "noisy" else "line"
    paths = [
        _render_path(scale(segment), faint, style=style)
        for segment in finite_segments(downsample(curve.points))
    ]
    if curve.style == "noisy":
        paths.append(_render_path(scale(running_mean(curve.points)), "line", style=style))
    if curve.style == "dots" or len(curve.points) == 1:
        kind = "dot" if len(curve.points) <= _MAX_LARGE_DOTS else "dot small"
        paths += [_render_path([p, p], kind, style=style) for p in scale(curve.points) if math.isfinite(p[1])]
    return paths


def _render_path(points: Sequence[ChartPoint], kind: str, text: str = "", style: str | None = None) -> Html:
    """Render a line through points of the unit square; x goes to the right, y upwards."""
    coordinates = " L".join(f"{_VIEWBOX_SIZE * x:.1f} {_VIEWBOX_SIZE * (1 - y):.1f}" for x, y in points)
    title = tag("title", text) if text else ""
    return tag("path", title, d=f"M{coordinates}", class_=kind, style=style)


def _render_tick_labels(across: AxisScale, up: AxisScale) -> list[Html]:
    ticks = up.ticks()
    ys = [
        tag("span", text, class_="y", style=f"top: {100 * (1 - up(y)):.2f}%")
        for y, text in zip(ticks, format_ticks(ticks), strict=True)
    ]
    # Adding zero turns -0.0 into 0.0.
    steps = [x + 0.0 for x in across.ticks(4) if x == int(x)]
    xs = [tag("span", f"{x:,.0f}", class_="x", style=f"left: {100 * across(x):.2f}%") for x in steps]
    has_room = all(across(x) > _CLEAR_FRACTION for x in steps)
    return [*ys, *xs, tag("span", "steps", class_="x left")] if has_room else [*ys, *xs]


_MAX_DIGITS = 12


def format_ticks(ticks: Sequence[float]) -> list[str]:
    """Return the values of an axis with as many digits as tell them apart, at least three."""
    for digits in range(3, _MAX_DIGITS):
        texts = [format_number(value, digits) for value in ticks]
        if len({*texts}) == len(ticks):
            return texts
    return [format_number(value, _MAX_DIGITS) for value in ticks]


def _render_legend(curves: Sequence[ChartCurve]) -> Html:
    if len(curves) < 2:
        return Html("")
    first = {c.color: c for c in reversed(curves)}  # dots in the colour of a line are its evaluations
    keys = [
        tag("span", tag("i", style=f"background: var(--{c.color})"), c.name, data_color=c.color)
        for c in curves
        if first[c.color] is c
    ]
    return tag("span", keys, class_="legend")


def _encode_curves(curves: Sequence[ChartCurve], across: AxisScale, up: AxisScale) -> str:
    """Encode for page.js, per curve, positions in the box and values as text."""
    encoded = [
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
    return json.dumps(encoded, separators=(",", ":"))
