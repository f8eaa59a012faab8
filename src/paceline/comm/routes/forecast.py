"""How long a collective takes by each route, and which route is best for a size. Pure.

Sums were measured: between two sizes a time is that of the straight line, so that there alpha and beta are
their own, and beyond the largest one it is that of the line through the last few. A larger buffer takes no
less time, so sizes of which the larger took less have one time, the median of theirs. A byte of a route that
was given up costs at least what it costs the first one, which is tried throughout. Of the other collectives
only the closed forms are known (`longest_way`), with the alpha and beta of the sums of each route: there a
route has to promise more before it takes the place of the first.
Invariant: equal times give equal choices, so ranks that know the same choose the same.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import pairwise
from statistics import median_low
from typing import NamedTuple

from paceline.comm.link_profile import Line, Point, fit_line
from paceline.comm.routes.longest_way import OPS, longest_way

GAIN = 1.05
"""A route takes the place of the first one where its sums are this many times as fast."""
FORETOLD_GAIN = 1.5
"""The same of collectives that were not measured; alpha-beta is often a third off (G13)."""
SIZES = tuple(1 << k for k in range(8, 28))
"""Bytes at which the best route is looked for; from 256 bytes to 128 MiB."""
_LAST = 3  # sizes, of which a larger one is told


class Forecast(NamedTuple):
    """What was measured of the routes of one group.

    Args:
        world: number of its ranks.
        ranks_per_host: of these.
        lines: by route; its points count the longest way.
    """

    world: int
    ranks_per_host: int
    lines: Mapping[str, Line]

    def seconds(self, route: str, num_bytes: int, op: str = "all_reduce") -> float:
        """How long a collective of so many bytes of a rank takes by a route."""
        way = longest_way(route, num_bytes, self.world, self.ranks_per_host, op)
        line = self.lines[route]
        if len(line.points) < 2 or op != "all_reduce":
            return line.seconds(way)
        points = evened(line.points)
        if way.sent_bytes > points[-1].sent_bytes:
            slope = max(_last_slope(points), self._slope_of_first(len(points)))
            return points[-1].seconds + slope * (way.sent_bytes - points[-1].sent_bytes)
        if way.sent_bytes <= points[0].sent_bytes:
            return points[0].seconds
        return _on_line(points, way.sent_bytes)

    def _slope_of_first(self, num_tried: int) -> float:
        """Seconds of a byte of the first route on sizes that another was not tried on; 0: there are none."""
        points = evened(next(iter(self.lines.values())).points)[num_tried - 1 :]
        return _slope(points[0], points[-1]) if len(points) > 1 else 0.0

    def best(self, num_bytes: int, op: str = "all_reduce") -> str:
        """The route of a size: the first one, unless another is `GAIN` times as fast, or `FORETOLD_GAIN`.

        A route that was given up on smaller buffers is not looked at: nothing is known of it there.
        """
        first, *others = self.lines
        known = [first, *(route for route in others if self._was_tried(route, num_bytes, op))]
        found = min(known, key=lambda route: self.seconds(route, num_bytes, op))
        gain = GAIN if op == "all_reduce" else FORETOLD_GAIN
        gains = self.seconds(first, num_bytes, op) >= gain * self.seconds(found, num_bytes, op)
        return found if gains else first

    def _was_tried(self, route: str, num_bytes: int, op: str) -> bool:
        """On a buffer as large, or on the largest that any route was tried on."""
        most = max(len(line.points) for line in self.lines.values())
        points = self.lines[route].points
        way = longest_way(route, num_bytes, self.world, self.ranks_per_host, op)
        return len(points) == most or way.sent_bytes <= max(point.sent_bytes for point in points)


def evened(points: Sequence[Point]) -> list[Point]:
    """By bytes, with times that do not fall: runs of sizes that do have one time, the lower median of theirs.

    Source: Barlow, Bartholomew, Bremner, Brunk 1972, Statistical Inference under Order Restrictions, section
    1.2 (pool adjacent violators), with medians, which one disturbed time does not move.
    """
    ordered = sorted(points, key=lambda point: point.sent_bytes)
    runs: list[list[float]] = []
    for point in ordered:
        runs.append([point.seconds])
        while len(runs) > 1 and median_low(runs[-2]) > median_low(runs[-1]):
            runs[-2:] = [runs[-2] + runs[-1]]
    times = [median_low(run) for run in runs for _ in run]
    return [replace(point, seconds=seconds) for point, seconds in zip(ordered, times, strict=True)]


def _on_line(points: Sequence[Point], sent_bytes: float) -> float:
    low, high = next(pair for pair in pairwise(points) if sent_bytes <= pair[1].sent_bytes)
    return low.seconds + _slope(low, high) * (sent_bytes - low.sent_bytes)


def _slope(low: Point, high: Point) -> float:
    return (high.seconds - low.seconds) / (high.sent_bytes - low.sent_bytes)


def _last_slope(points: Sequence[Point]) -> float:
    """Seconds of a byte on the largest buffers; three of them, as of two a noisy one may make bytes free."""
    return fit_line(points[-_LAST:]).beta_seconds_per_byte


class Choice(NamedTuple):
    """Which route a collective goes by.

    Args:
        limits: the most bytes, and the route of what is not larger; ascending.
        above: the route of what is larger than all of these.
    """

    limits: tuple[tuple[int, str], ...]
    above: str

    def route(self, num_bytes: int) -> str:
        """Of so many bytes of a rank."""
        return next((route for most, route in self.limits if num_bytes <= most), self.above)

    @property
    def routes(self) -> list[str]:
        """All that are used."""
        return list(dict.fromkeys([*(route for _, route in self.limits), self.above]))

    def __str__(self) -> str:
        parts = [f"{route} up to {_spell_bytes(most)}" for most, route in self.limits]
        return ", ".join([*parts, f"{self.above} above" if parts else self.above])


def choose(forecast: Forecast, sizes: Sequence[int] = SIZES, op: str = "all_reduce") -> Choice:
    """The best route of every size, as limits between them."""
    best = [(size, forecast.best(size, op)) for size in sorted(sizes)]
    limits = tuple((size, route) for (size, route), (_, after) in pairwise(best) if route != after)
    return Choice(limits, best[-1][1])


def choose_all(forecast: Forecast) -> dict[str, Choice]:
    """By collective, sums first."""
    return {op: choose(forecast, op=op) for op in OPS}


def explain(forecast: Forecast, num_bytes: int, op: str = "all_reduce") -> str:
    """What is expected of a size by every route, the best one first."""
    times = sorted((forecast.seconds(route, num_bytes, op), route) for route in forecast.lines)
    return ", ".join(f"{route} {seconds * 1e3:.3g} ms" for seconds, route in times)


def say_others(forecast: Forecast, choices: Mapping[str, Choice], first: str) -> str:
    """The collectives that were not measured and go by another route than the first, each with its reason;
    empty where none does.

    The reason is the largest size for which a limit was found, where the routes are nearest to each other.
    """
    found = []
    for op, choice in choices.items():
        if op == "all_reduce" or choice.routes == [first]:
            continue
        size = choice.limits[-1][0] if choice.limits else SIZES[-1]
        found.append(f"{op} {choice}, foretold of {_spell_bytes(size)}: {explain(forecast, size, op)}")
    return "; ".join(found)


def _spell_bytes(num_bytes: int) -> str:
    for unit, name in ((1 << 20, "MiB"), (1 << 10, "KiB")):
        if num_bytes >= unit and num_bytes % unit == 0:
            return f"{num_bytes // unit} {name}"
    return f"{num_bytes} bytes"
