"""Curves: what is drawn of a series of numbers, and on which scale. Pure; knows no HTML."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

Point = tuple[float, float]

_MOST_BUCKETS = 400
_SMOOTH = 40  # the running mean is over this part of the points
_LOGARITHMIC_FROM = 20.0
_MARGIN = 0.06


@dataclass(frozen=True)
class Curve:
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
    points: Sequence[Point]
    style: str = "line"
    run: int = 0


@dataclass(frozen=True)
class Scale:
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


def scale_of(values: Sequence[float], *, from_zero: bool = False, may_be_logarithmic: bool = False) -> Scale:
    """A range with a margin around all finite values."""
    finite = [value for value in values if math.isfinite(value)] or [0.0, 1.0]
    low, high = min(finite), max(finite)
    if may_be_logarithmic and low > 0 and high / low > _LOGARITHMIC_FROM:
        margin = (high / low) ** _MARGIN
        return Scale(low / margin, high * margin, logarithmic=True)
    if from_zero:
        low = min(0.0, low)
    spread = (high - low) or abs(high) or 1.0
    return Scale(low if from_zero and low == 0 else low - _MARGIN * spread, high + _MARGIN * spread)


def thin(points: Sequence[Point]) -> list[Point]:
    """So few points that a screen can show them, with the lowest and the highest of each stretch."""
    size = math.ceil(len(points) / _MOST_BUCKETS)
    if size <= 1:
        return list(points)
    found: list[Point] = []
    for start in range(0, len(points), size):
        bucket = [p for p in points[start : start + size] if math.isfinite(p[1])]
        ends = {min(bucket, key=lambda p: p[1]), max(bucket, key=lambda p: p[1])} if bucket else set()
        found += sorted(ends) or [points[start]]
    return found


def smooth(points: Sequence[Point]) -> list[Point]:
    """The running mean over the points around each; those that are not finite are left out."""
    finite = [p for p in points if math.isfinite(p[1])]
    half = len(finite) // _SMOOTH // 2
    sums = [0.0]
    for _, value in finite:
        sums.append(sums[-1] + value)
    means = []
    for i, (x, _) in enumerate(finite):
        first, end = max(0, i - half), min(len(finite), i + half + 1)
        means.append((x, (sums[end] - sums[first]) / (end - first)))
    step = max(1, len(means) // _MOST_BUCKETS)
    return means[::step] + ([means[-1]] if means and (len(means) - 1) % step else [])


def stretches(points: Sequence[Point]) -> Iterator[list[Point]]:
    """The points between those that are not finite."""
    found: list[Point] = []
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
