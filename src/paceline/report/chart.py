"""A chart as HTML: lines in an SVG that fills its box, labels beside it as text, values for the pointer.

The SVG is stretched to the box and its strokes are not, so the same page is sharp on a phone and on a screen.
"""

from __future__ import annotations

import json
import math
from collections.abc import Sequence

from paceline.report.curves import Curve, Point, Scale, scale_of, smooth, stretches, thin
from paceline.report.facts import spell
from paceline.report.html import Html, tag

_SIDE = 1000.0  # of the SVG's own coordinates
_MOST_LARGE_DOTS = 24
_CLEAR = 0.12  # of the width, that the word under the left end needs


def chart(
    title: str,
    curves: Sequence[Curve],
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
    across = Scale(min(0.0, *steps) if len(set(steps)) == 1 else min(steps), max(steps))
    values = [y for curve in curves for _, y in thin(curve.points)]
    up = scale_of(values, from_zero=from_zero, may_be_logarithmic=may_be_logarithmic)
    head = [tag("h3", title), tag("span", unit + (" · log scale" if up.logarithmic else ""), class_="unit")]
    labels, picture = _labels(across, up), _picture(curves, across, up, marks)
    frame = json.dumps({"log": up.logarithmic, "zero": from_zero, "marks": marks})
    numbers = {"data_chart": _data(curves, across, up), "data_frame": frame}
    plot = tag("div", labels, picture, class_="plot", **numbers)
    return tag("figure", tag("figcaption", head, _legend(curves)), plot, class_="chart")


def _picture(curves: Sequence[Curve], across: Scale, up: Scale, marks: Sequence[tuple[float, str]]) -> Html:
    grid = [_path([(0.0, up(y)), (1.0, up(y))], "grid") for y in up.ticks()]
    lines = [_path([(across(x), 0.0), (across(x), 1.0)], "mark", text) for x, text in marks]
    drawn = [line for curve in curves for line in _lines(curve, across, up)]
    box = f"0 0 {_SIDE:g} {_SIDE:g}"
    return tag(
        "svg", grid, lines, drawn, viewBox=box, preserveAspectRatio="none", role="img", aria_hidden="true"
    )


def _lines(curve: Curve, across: Scale, up: Scale) -> list[Html]:
    def place(points: Sequence[Point]) -> list[Point]:
        return [(across(x), up(y)) for x, y in points]

    style = f"--color: var(--{curve.color})"
    faint = "line faint" if curve.style == "noisy" else "line"
    found = [_path(place(part), faint, style=style) for part in stretches(thin(curve.points))]
    if curve.style == "noisy":
        found.append(_path(place(smooth(curve.points)), "line", style=style))
    if curve.style == "dots" or len(curve.points) == 1:
        kind = "dot" if len(curve.points) <= _MOST_LARGE_DOTS else "dot small"
        found += [_path([p, p], kind, style=style) for p in place(curve.points) if math.isfinite(p[1])]
    return found


def _path(points: Sequence[Point], kind: str, text: str = "", style: str | None = None) -> Html:
    """A line through points of the unit square, whose first coordinate goes right and second up."""
    words = " L".join(f"{_SIDE * x:.1f} {_SIDE * (1 - y):.1f}" for x, y in points)
    title = tag("title", text) if text else ""
    return tag("path", title, d=f"M{words}", class_=kind, style=style)


def _labels(across: Scale, up: Scale) -> list[Html]:
    ys = [tag("span", spell(y, 3), class_="y", style=f"top: {100 * (1 - up(y)):.2f}%") for y in up.ticks()]
    steps = [x for x in across.ticks(4) if x == int(x)]
    xs = [tag("span", f"{x:,.0f}", class_="x", style=f"left: {100 * across(x):.2f}%") for x in steps]
    free = all(across(x) > _CLEAR for x in steps)
    return [*ys, *xs, tag("span", "steps", class_="x left")] if free else [*ys, *xs]


def _legend(curves: Sequence[Curve]) -> Html:
    if len(curves) < 2:
        return Html("")
    first = {c.color: c for c in reversed(curves)}  # dots in the colour of a line belong to it
    keys = [
        tag("span", tag("i", style=f"background: var(--{c.color})"), c.name, data_color=c.color)
        for c in curves
        if first[c.color] is c
    ]
    return tag("span", keys, class_="legend")


def _data(curves: Sequence[Curve], across: Scale, up: Scale) -> str:
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
            "text": [spell(y, 5) for _, y in points],
        }
        for curve in curves
        for points in [thin(curve.points)]
    ]
    return json.dumps(found, separators=(",", ":"))
