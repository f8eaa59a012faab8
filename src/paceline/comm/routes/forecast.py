"""How long an all_reduce takes by each route, and which route is best for a size. Pure.

The closed forms count what lies on the longest way: rounds that wait for each other, and bytes that pass one
after another. Between two sizes that were measured a time is that of the straight line: there alpha and beta
are their own. Invariant: equal times give equal choices, so ranks that know the same choose the same.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from itertools import pairwise
from typing import NamedTuple

from paceline.comm.cost import Cost, cost, hierarchical_cost
from paceline.comm.link_profile import Line, Point
from paceline.comm.routes.grid import columns_of
from paceline.comm.routes.recursive_doubling import core_of

GAIN = 1.1
"""A route takes the place of the first one where it is this many times as fast."""
SIZES = tuple(1 << k for k in range(8, 28))
"""Bytes at which the best route is looked for; from 256 bytes to 128 MiB."""


def longest_way(route: str, num_bytes: int, world: int, ranks_per_host: int = 1) -> Cost:
    """What an all_reduce of so many bytes of a rank waits for, one after another.

    Sources: those of the routes. Of the hierarchical route it is what a host's link carries.
    """
    if world == 1:
        return Cost(0.0, 0.0, 0)
    return _WAYS[route](num_bytes, world, ranks_per_host)


def _ring(num_bytes: int, world: int, _: int) -> Cost:
    return cost("all_reduce", num_bytes, world)


def _tree(num_bytes: int, world: int, _: int) -> Cost:
    rounds = 2 * (world - 1).bit_length()
    return Cost(float(rounds * num_bytes), float(rounds * num_bytes), rounds)


def _doubling(num_bytes: int, world: int, _: int) -> Cost:
    core = core_of(world)
    rounds = core.bit_length() - 1 + (2 if core < world else 0)
    return Cost(float(rounds * num_bytes), float(rounds * num_bytes), rounds)


def _grid(num_bytes: int, world: int, _: int) -> Cost:
    width = columns_of(world)
    height = world // width
    moved = 2 * (width - 1) / width * num_bytes + 2 * (height - 1) / height * num_bytes / width
    return Cost(moved, moved, 2 * (width - 1) + 2 * (height - 1))


def _hierarchical(num_bytes: int, world: int, here: int) -> Cost:
    between = hierarchical_cost(num_bytes, world // here, here)[1]
    return Cost(here * between.sent_bytes, here * between.received_bytes, between.rounds)


_WAYS: Mapping[str, Callable[[int, int, int], Cost]] = {
    "native": _ring,
    "ring": _ring,
    "tree": _tree,
    "recursive-doubling": _doubling,
    "grid": _grid,
    "hierarchical": _hierarchical,
}


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

    def seconds(self, route: str, num_bytes: int) -> float:
        """How long an all_reduce of so many bytes takes by a route."""
        way, line = longest_way(route, num_bytes, self.world, self.ranks_per_host), self.lines[route]
        points = sorted(line.points, key=lambda point: point.sent_bytes)
        if len(points) < 2:
            return line.seconds(way)
        if way.sent_bytes <= points[0].sent_bytes:
            return points[0].seconds
        return _on_line(_around(points, way.sent_bytes), way.sent_bytes)

    def best(self, num_bytes: int) -> str:
        """The route of a size: the first one, unless another is `GAIN` times as fast.

        A route that was given up on smaller buffers is not looked at: nothing is known of it there.
        """
        first, *others = self.lines
        known = [first, *(route for route in others if self._was_tried(route, num_bytes))]
        found = min(known, key=lambda route: self.seconds(route, num_bytes))
        gains = self.seconds(first, num_bytes) >= GAIN * self.seconds(found, num_bytes)
        return found if gains else first

    def _was_tried(self, route: str, num_bytes: int) -> bool:
        """On a buffer as large, or on the largest that any route was tried on."""
        most = max(len(line.points) for line in self.lines.values())
        points = self.lines[route].points
        way = longest_way(route, num_bytes, self.world, self.ranks_per_host)
        return len(points) == most or way.sent_bytes <= max(point.sent_bytes for point in points)


def _around(points: Sequence[Point], sent_bytes: float) -> tuple[Point, Point]:
    """The measured points between which so many bytes lie; the last two beyond them."""
    found = (pair for pair in pairwise(points) if sent_bytes <= pair[1].sent_bytes)
    return next(found, (points[-2], points[-1]))


def _on_line(ends: tuple[Point, Point], sent_bytes: float) -> float:
    low, high = ends
    slope = max(0.0, high.seconds - low.seconds) / (high.sent_bytes - low.sent_bytes)
    return low.seconds + slope * (sent_bytes - low.sent_bytes)


class Choice(NamedTuple):
    """Which route an all_reduce goes by.

    Args:
        limits: the most bytes, and the route of what is not larger; ascending.
        above: the route of what is larger than all of these.
    """

    limits: tuple[tuple[int, str], ...]
    above: str

    def route(self, num_bytes: int) -> str:
        """Of an all_reduce of so many bytes of a rank."""
        return next((route for most, route in self.limits if num_bytes <= most), self.above)

    @property
    def routes(self) -> list[str]:
        """All that are used."""
        return list(dict.fromkeys([*(route for _, route in self.limits), self.above]))

    def __str__(self) -> str:
        parts = [f"{route} up to {_spell_bytes(most)}" for most, route in self.limits]
        return ", ".join([*parts, f"{self.above} above" if parts else self.above])


def choose(forecast: Forecast, sizes: Sequence[int] = SIZES) -> Choice:
    """The best route of every size, as limits between them."""
    best = [(size, forecast.best(size)) for size in sorted(sizes)]
    limits = tuple((size, route) for (size, route), (_, after) in pairwise(best) if route != after)
    return Choice(limits, best[-1][1])


def explain(forecast: Forecast, num_bytes: int) -> str:
    """What is expected of a size by every route, the best one first."""
    times = sorted((forecast.seconds(route, num_bytes), route) for route in forecast.lines)
    return ", ".join(f"{route} {seconds * 1e3:.3g} ms" for seconds, route in times)


def _spell_bytes(num_bytes: int) -> str:
    for unit, name in ((1 << 20, "MiB"), (1 << 10, "KiB")):
        if num_bytes >= unit and num_bytes % unit == 0:
            return f"{num_bytes // unit} {name}"
    return f"{num_bytes} bytes"
