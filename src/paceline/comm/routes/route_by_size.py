"""The choice of a route by the size of a buffer: costs of routes, forecasts of their time, and the
collective.

The costs and the forecast are pure. Costs are closed forms of the bytes and rounds that follow each other,
written without looking at the messages; a test runs the messages on clocks that count rounds and bytes, and
both must agree (tests/unit/comm/routes/test_route_by_size.py). A link carries one message each way at a time.

Sums were measured: between two sizes the time is interpolated, and beyond the largest one it follows the line
through the last few. A larger buffer takes no less time, so sizes of which the larger took less get one time,
their median. A byte of a route that was not measured on large buffers costs at least what it costs the first
one, which is always measured. Of the other collectives only the closed forms are known
(`critical_path_cost`), with alpha and beta of the sums of each route: there a route has to promise more
before it replaces the first.
Invariant: equal measurements give equal choices, so ranks that have the same ones choose the same.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from itertools import pairwise
from statistics import median_low
from typing import NamedTuple

from torch import Tensor

from paceline.comm.collective_cost import CollectiveCost, hierarchical_cost, native_cost
from paceline.comm.collectives.collective_protocol import Collective, ReceiveBuffer
from paceline.comm.handle import Handle
from paceline.comm.link_profile import LinkModel, LinkSample, fit_link_model
from paceline.comm.routes.grid_route import num_grid_columns
from paceline.comm.routes.recursive_doubling import power_of_two_below
from paceline.job.mesh import RankGroup
from paceline.recipe.registry import RouteSpec, import_object, parse_word

ROUTED_OPS = ("all_reduce", "reduce_scatter", "all_gather", "broadcast")
PathCost = Callable[[int, int, int], CollectiveCost]
"""A closed form of the bytes that a rank passes in, the number of ranks, and the ranks of each host."""


def critical_path_cost(
    route: str, num_bytes: int, world: int, ranks_per_host: int = 1, op: str = "all_reduce"
) -> CollectiveCost:
    """Return the bytes and rounds of a collective that follow each other.

    Args:
        num_bytes: bytes that each rank passes in: [n] of an all_reduce, an all_gather and a broadcast, [P, n]
            of a reduce_scatter.
    Sources: those of the routes. Of the hierarchical route it is what the link of a host carries.
    """
    if world == 1:
        return CollectiveCost(0.0, 0.0, 0)
    costs: RouteCosts = import_object(parse_word(RouteSpec, route).spec.costs)
    cost: PathCost = getattr(costs, op)
    return cost(num_bytes, world, ranks_per_host)


def _symmetric_cost(num_bytes: float, rounds: int) -> CollectiveCost:
    return CollectiveCost(float(num_bytes), float(num_bytes), rounds)


def _tree_depth(world: int) -> int:
    """Return the rounds in which one rank reaches all."""
    return (world - 1).bit_length()


# -- all_reduce -----------------------------------------------------------------------------------------


def _ring_all_reduce(num_bytes: int, world: int, _: int) -> CollectiveCost:
    return native_cost("all_reduce", num_bytes, world)


def _tree_all_reduce(num_bytes: int, world: int, _: int) -> CollectiveCost:
    return _symmetric_cost(2 * _tree_depth(world) * num_bytes, 2 * _tree_depth(world))


def _doubling_all_reduce(num_bytes: int, world: int, _: int) -> CollectiveCost:
    rounds = _doubling_rounds(world)
    return _symmetric_cost(rounds * num_bytes, rounds)


def _grid_all_reduce(num_bytes: int, world: int, _: int) -> CollectiveCost:
    width = num_grid_columns(world)
    height = world // width
    num_moved_bytes = 2 * (width - 1) / width * num_bytes + 2 * (height - 1) / height * num_bytes / width
    return _symmetric_cost(num_moved_bytes, 2 * (width - 1) + 2 * (height - 1))


def _hierarchical_all_reduce(num_bytes: int, world: int, ranks_per_host: int) -> CollectiveCost:
    between = hierarchical_cost(num_bytes, world // ranks_per_host, ranks_per_host)[1]
    return CollectiveCost(
        ranks_per_host * between.sent_bytes, ranks_per_host * between.received_bytes, between.rounds
    )


# -- reduce_scatter: `num_bytes` of P rows ----------------------------------------------------------------


def _native_reduce_scatter(num_bytes: int, world: int, _: int) -> CollectiveCost:
    return native_cost("reduce_scatter", num_bytes, world)


def _ring_reduce_scatter(num_bytes: int, world: int, _: int) -> CollectiveCost:
    return _symmetric_cost((world - 1) / world * num_bytes, world - 1)


def _doubling_reduce_scatter(num_bytes: int, world: int, _: int) -> CollectiveCost:
    extra = world - power_of_two_below(world)
    rows = _doubled_rows(world) + (world + 1 if extra else 0)
    return _symmetric_cost(rows / world * num_bytes, _doubling_rounds(world))


def _grid_reduce_scatter(num_bytes: int, world: int, _: int) -> CollectiveCost:
    return _grid_rows_cost(num_bytes / world, world)


def _hierarchical_reduce_scatter(num_bytes: int, world: int, ranks_per_host: int) -> CollectiveCost:
    nodes = world // ranks_per_host
    return _symmetric_cost((nodes - 1) / nodes * num_bytes, 1)


# -- all_gather: `num_bytes` of one row -------------------------------------------------------------------


def _ring_all_gather(num_bytes: int, world: int, _: int) -> CollectiveCost:
    return _symmetric_cost((world - 1) * num_bytes, world - 1)


def _tree_all_gather(num_bytes: int, world: int, _: int) -> CollectiveCost:
    depth = _tree_depth(world)
    return _symmetric_cost((world - 1 + depth * world) * num_bytes, 2 * depth)


def _doubling_all_gather(num_bytes: int, world: int, _: int) -> CollectiveCost:
    extra = world - power_of_two_below(world)
    rows = _doubled_rows(world) + (world + 1 if extra else 0)
    return _symmetric_cost(rows * num_bytes, _doubling_rounds(world))


def _grid_all_gather(num_bytes: int, world: int, _: int) -> CollectiveCost:
    return _grid_rows_cost(num_bytes, world)


def _hierarchical_all_gather(num_bytes: int, world: int, ranks_per_host: int) -> CollectiveCost:
    nodes = world // ranks_per_host
    return _symmetric_cost((nodes - 1) * ranks_per_host * num_bytes, nodes - 1)


# -- broadcast, from rank 0 -------------------------------------------------------------------------------


def _tree_broadcast(num_bytes: int, world: int, _: int) -> CollectiveCost:
    return _symmetric_cost(_tree_depth(world) * num_bytes, _tree_depth(world))


def _ring_broadcast(num_bytes: int, world: int, _: int) -> CollectiveCost:
    return _symmetric_cost((world - 1) * num_bytes, world - 1)


def _grid_broadcast(num_bytes: int, world: int, _: int) -> CollectiveCost:
    width = num_grid_columns(world)
    rounds = width - 1 + world // width - 1
    return _symmetric_cost(rounds * num_bytes, rounds)


def _doubling_rounds(world: int) -> int:
    core = power_of_two_below(world)
    return core.bit_length() - 1 + (2 if core < world else 0)


def _doubled_rows(world: int) -> int:
    """Return the rows that the core of recursive doubling exchanges, with those of the ranks outside it."""
    core = power_of_two_below(world)
    bits = [1 << k for k in range(core.bit_length() - 1)]
    return sum(bit + min(bit, world - core) for bit in bits)


def _grid_rows_cost(row_bytes: float, world: int) -> CollectiveCost:
    width = num_grid_columns(world)
    height = world // width
    return _symmetric_cost(((width - 1) * height + height - 1) * row_bytes, width - 1 + height - 1)


class RouteCosts(NamedTuple):
    """The closed forms of a route, one for each collective operation; `RouteSpec.costs` names them."""

    all_reduce: PathCost
    reduce_scatter: PathCost
    all_gather: PathCost
    broadcast: PathCost


NATIVE_COSTS = RouteCosts(_ring_all_reduce, _native_reduce_scatter, _ring_all_gather, _tree_broadcast)
RING_COSTS = RouteCosts(_ring_all_reduce, _ring_reduce_scatter, _ring_all_gather, _ring_broadcast)
TREE_COSTS = RouteCosts(_tree_all_reduce, _tree_all_reduce, _tree_all_gather, _tree_broadcast)
RECURSIVE_DOUBLING_COSTS = RouteCosts(
    _doubling_all_reduce, _doubling_reduce_scatter, _doubling_all_gather, _tree_broadcast
)
GRID_COSTS = RouteCosts(_grid_all_reduce, _grid_reduce_scatter, _grid_all_gather, _grid_broadcast)
HIERARCHICAL_COSTS = RouteCosts(
    _hierarchical_all_reduce, _hierarchical_reduce_scatter, _hierarchical_all_gather, _tree_broadcast
)

MEASURED_GAIN = 1.05
"""A route replaces the first one if its sums are this many times as fast."""
PREDICTED_GAIN = 1.5
"""The same for collectives that were not measured; alpha-beta is often off by a third (G13)."""
CHOICE_SIZES = tuple(1 << k for k in range(8, 28))
"""Sizes for which the best route is searched; from 256 bytes to 128 MiB."""
# Largest sizes, from which the time of a larger one is extrapolated.
_NUM_SLOPE_SAMPLES = 3


class RouteForecast(NamedTuple):
    """Measurements of the routes of one group.

    Args:
        world: number of its ranks.
        ranks_per_host: number of ranks on each host.
        lines: fitted model by route; its points count the critical path.
    """

    world: int
    ranks_per_host: int
    lines: Mapping[str, LinkModel]

    def seconds(self, route: str, num_bytes: int, op: str = "all_reduce") -> float:
        """Return the time that a collective of `num_bytes` of a rank takes on a route."""
        cost = critical_path_cost(route, num_bytes, self.world, self.ranks_per_host, op)
        model = self.lines[route]
        # Only sums were measured, and a line needs two sizes.
        if len(model.points) < 2 or op != "all_reduce":
            return model.seconds(cost)
        points = isotonic_samples(model.points)
        if cost.sent_bytes > points[-1].sent_bytes:
            # A route that was given up early may look cheap per byte only because it was never measured
            # there.
            slope = max(_last_slope(points), self._slope_of_first_route(len(points)))
            return points[-1].seconds + slope * (cost.sent_bytes - points[-1].sent_bytes)
        # Smaller buffers take as long as the smallest one: that is all latency.
        if cost.sent_bytes <= points[0].sent_bytes:
            return points[0].seconds
        return _interpolate(points, cost.sent_bytes)

    def _slope_of_first_route(self, num_tried: int) -> float:
        """Return seconds per byte of the first route on sizes for which another was not measured; 0 if
        there are none.
        """
        points = isotonic_samples(next(iter(self.lines.values())).points)[num_tried - 1 :]
        return _slope(points[0], points[-1]) if len(points) > 1 else 0.0

    def best(self, num_bytes: int, op: str = "all_reduce") -> str:
        """Return the route for a size: the first one, unless another is `MEASURED_GAIN` (or `PREDICTED_GAIN`)
        times as fast.

        A route that was not measured on buffers of this size is not considered: nothing is known of it there.
        """
        first, *others = self.lines
        known = [first, *(route for route in others if self._was_measured(route, num_bytes, op))]
        fastest = min(known, key=lambda route: self.seconds(route, num_bytes, op))
        gain = MEASURED_GAIN if op == "all_reduce" else PREDICTED_GAIN
        is_worth_it = self.seconds(first, num_bytes, op) >= gain * self.seconds(fastest, num_bytes, op)
        return fastest if is_worth_it else first

    def _was_measured(self, route: str, num_bytes: int, op: str) -> bool:
        """Return whether a route was measured on a buffer as large, or on the largest that any route was
        measured on.
        """
        max_num_points = max(len(line.points) for line in self.lines.values())
        points = self.lines[route].points
        cost = critical_path_cost(route, num_bytes, self.world, self.ranks_per_host, op)
        return len(points) == max_num_points or cost.sent_bytes <= max(point.sent_bytes for point in points)


def isotonic_samples(points: Sequence[LinkSample]) -> list[LinkSample]:
    """Return samples by bytes, with times that do not fall: runs that do get one time, the lower median of
    theirs.

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


def _interpolate(points: Sequence[LinkSample], sent_bytes: float) -> float:
    low, high = next(pair for pair in pairwise(points) if sent_bytes <= pair[1].sent_bytes)
    return low.seconds + _slope(low, high) * (sent_bytes - low.sent_bytes)


def _slope(low: LinkSample, high: LinkSample) -> float:
    return (high.seconds - low.seconds) / (high.sent_bytes - low.sent_bytes)


def _last_slope(points: Sequence[LinkSample]) -> float:
    """Return seconds per byte on the largest buffers."""
    # Three of them: with two, a noisy one may make bytes free.
    return fit_link_model(points[-_NUM_SLOPE_SAMPLES:]).beta_seconds_per_byte


class RouteChoice(NamedTuple):
    """The choice of a route by size.

    Args:
        limits: the largest size, and the route of sizes that are not larger; ascending.
        above: the route of sizes that are larger than all of these.
    """

    limits: tuple[tuple[int, str], ...]
    above: str

    def route(self, num_bytes: int) -> str:
        """Return the route of a buffer of `num_bytes`."""
        return next((route for limit, route in self.limits if num_bytes <= limit), self.above)

    @property
    def routes(self) -> list[str]:
        """All routes that are used."""
        return list(dict.fromkeys([*(route for _, route in self.limits), self.above]))

    def __str__(self) -> str:
        texts = [f"{route} up to {_format_bytes(limit)}" for limit, route in self.limits]
        return ", ".join([*texts, f"{self.above} above" if texts else self.above])


def choose_route(
    forecast: RouteForecast, sizes: Sequence[int] = CHOICE_SIZES, op: str = "all_reduce"
) -> RouteChoice:
    """Return the best route for every size, as the sizes at which the best route changes."""
    best = [(size, forecast.best(size, op)) for size in sorted(sizes)]
    limits = tuple((size, route) for (size, route), (_, after) in pairwise(best) if route != after)
    return RouteChoice(limits, best[-1][1])


def choose_routes(forecast: RouteForecast) -> dict[str, RouteChoice]:
    """Return the choice for each collective, sums first."""
    return {op: choose_route(forecast, op=op) for op in ROUTED_OPS}


def explain_route_times(forecast: RouteForecast, num_bytes: int, op: str = "all_reduce") -> str:
    """Return a text with the expected time of a size on every route, the best one first."""
    times = sorted((forecast.seconds(route, num_bytes, op), route) for route in forecast.lines)
    return ", ".join(f"{route} {seconds * 1e3:.3g} ms" for seconds, route in times)


def explain_predicted_choices(forecast: RouteForecast, choices: Mapping[str, RouteChoice], first: str) -> str:
    """Return a text with the collectives that were not measured and use another route than the first; empty
    if none does.

    Each has the times that were decisive: those of the largest size with a limit, where the routes are
    nearest to each other.
    """
    texts = []
    for op, choice in choices.items():
        if op == "all_reduce" or choice.routes == [first]:
            continue
        size = choice.limits[-1][0] if choice.limits else CHOICE_SIZES[-1]
        texts.append(
            f"{op} {choice}, predicted for {_format_bytes(size)}: {explain_route_times(forecast, size, op)}"
        )
    return "; ".join(texts)


def _format_bytes(num_bytes: int) -> str:
    for unit, name in ((1 << 20, "MiB"), (1 << 10, "KiB")):
        if num_bytes >= unit and num_bytes % unit == 0:
            return f"{num_bytes // unit} {name}"
    return f"{num_bytes} bytes"


class SizeRoutedCollective:
    """A collective that chooses one of several routes by operation and size.

    Args:
        paths: collectives by route, each on process groups of its own. The first is used for operations
            without a choice.
        choices: choices by operation, equal on every rank.
    Wire: that of the route.
    Exactness: that of rounding, as each route; equal bits on every rank.
    Source: Thakur, Rabenseifner, Gropp 2005, Optimization of Collective Communication Operations in MPICH,
        section 6 (algorithms by message size).
    """

    feedback = None

    def __init__(self, paths: Mapping[str, Collective], choices: Mapping[str, RouteChoice]) -> None:
        self._paths, self.choices = paths, choices
        self._first = next(iter(paths.values()))

    @property
    def group(self) -> RankGroup:
        return self._first.group

    def buffer(self, num_values: int, like: Tensor, key: str) -> Tensor:
        return self._first.buffer(num_values, like, key)

    def all_reduce(self, x: Tensor, key: str) -> Handle:
        return self._path("all_reduce", x).all_reduce(x, key)

    def reduce_scatter(self, x: Tensor, key: str, arriving: ReceiveBuffer = None) -> Handle:
        return self._path("reduce_scatter", x).reduce_scatter(x, key, arriving)

    def all_gather(self, x: Tensor, key: str, out: Tensor | None = None) -> Handle:
        return self._path("all_gather", x).all_gather(x, key, out)

    def broadcast(self, x: Tensor, key: str, source: int = 0) -> Handle:
        return self._path("broadcast", x).broadcast(x, key, source)

    def abort(self) -> None:
        for path in self._paths.values():
            path.abort()

    def _path(self, op: str, x: Tensor) -> Collective:
        choice = self.choices.get(op)
        return self._first if choice is None else self._paths[choice.route(x.numel() * x.element_size())]
