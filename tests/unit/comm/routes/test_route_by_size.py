"""Which route is best for a size follows from what was measured, and equal findings give equal choices."""

from __future__ import annotations

import threading
from dataclasses import dataclass, field
from queue import Queue
from typing import Any

import pytest
import torch
from torch import Tensor

from paceline.comm.collective_cost import CollectiveCost
from paceline.comm.link_benchmark import num_sums_per_timing, routes_worth_trying
from paceline.comm.link_profile import LinkModel, LinkProfile, LinkSample, fit_link_model
from paceline.comm.routes.grid_route import GridRoute, num_grid_columns
from paceline.comm.routes.message_route import MessageRoute
from paceline.comm.routes.recursive_doubling import RecursiveDoublingRoute
from paceline.comm.routes.ring_route import RingRoute
from paceline.comm.routes.route_by_size import (
    CHOICE_SIZES,
    ROUTED_OPS,
    RouteChoice,
    RouteForecast,
    choose_route,
    choose_routes,
    critical_path_cost,
    explain_predicted_choices,
    explain_route_times,
    isotonic_samples,
)
from paceline.comm.routes.tree_route import TreeRoute
from paceline.comm.workspace import Workspace

ROUTES = ("native", "ring", "tree", "recursive-doubling", "grid")
MEASURED = (1 << 10, 1 << 14, 1 << 18, 1 << 22)


def forecast(alphas: dict[str, float], betas: dict[str, float], world: int = 4) -> RouteForecast:
    """Links on which routes take so many seconds a round and a byte."""
    lines = {}
    for route, alpha in alphas.items():
        ways = [critical_path_cost(route, size, world) for size in MEASURED]
        points = [
            LinkSample(w.sent_bytes, w.rounds, w.rounds * alpha + w.sent_bytes * betas[route]) for w in ways
        ]
        lines[route] = fit_link_model(points)
    return RouteForecast(world, 1, lines)


def alike(alpha: float, beta: float, world: int = 4) -> RouteForecast:
    return forecast(dict.fromkeys(ROUTES, alpha), dict.fromkeys(ROUTES, beta), world)


@pytest.mark.capability("G9", "G13")
@pytest.mark.parametrize("world", [2, 3, 4, 6, 8])
def test_small_buffers_take_few_rounds_and_large_ones_few_bytes(world: int) -> None:
    found = choose_route(alike(1e-3, 8e-8, world))  # 1 ms and 100 Mbit/s
    rounds = {route: critical_path_cost(route, 256, world).rounds for route in ROUTES}
    fewest = min(rounds.values())
    assert rounds[found.route(256)] == fewest or 1.1 * fewest >= rounds["native"]
    assert found.route(64 << 20) in ("native", "ring", "grid")
    if world in (4, 8):
        assert found.route(256) == "recursive-doubling" and len(found.routes) > 1


@pytest.mark.capability("G9")
def test_every_choice_is_within_the_bound_of_the_best(subtests: pytest.Subtests) -> None:
    for alpha, beta in ((5e-5, 8e-9), (5e-4, 8e-8), (1e-2, 8e-7)):
        known = alike(alpha, beta)
        found = choose_route(known)
        for size in CHOICE_SIZES:
            with subtests.test(alpha=alpha, size=size):
                taken = known.seconds(found.route(size), size)
                assert taken <= 1.1 * min(known.seconds(route, size) for route in ROUTES) * (1 + 1e-9)


@pytest.mark.capability("G9")
def test_the_first_route_stays_where_nothing_is_gained() -> None:
    near = forecast({"native": 1e-3, "ring": 0.97e-3}, {"native": 8e-8, "ring": 7.8e-8})
    assert choose_route(near) == RouteChoice((), "native")
    far = forecast({"native": 1e-3, "ring": 0.5e-3}, {"native": 8e-8, "ring": 4e-8})
    assert choose_route(far) == RouteChoice((), "ring")


@pytest.mark.capability("G9")
def test_other_collectives_go_by_what_alpha_and_beta_of_the_sums_foretell() -> None:
    known = alike(1e-3, 8e-8, 8)
    found = choose_routes(known)
    assert [*found] == ["all_reduce", "reduce_scatter", "all_gather", "broadcast"]
    assert found["all_gather"].route(256) == "recursive-doubling"  # 3 rounds, where a ring has 7
    assert found["all_gather"].above == found["reduce_scatter"].above == "native"
    assert found["broadcast"] == found["reduce_scatter"] == RouteChoice((), "native")  # 3 rounds, and 1
    said = explain_predicted_choices(known, found, "native")
    limit = found["all_gather"].limits[-1][0]
    assert said.startswith("all_gather recursive-doubling up to ") and said.count("predicted for") == 1
    assert explain_route_times(known, limit, "all_gather") in said
    assert explain_predicted_choices(known, choose_routes(alike(0.0, 8e-8, 8)), "native") == ""


@pytest.mark.capability("G9")
def test_what_was_not_measured_has_to_promise_more(subtests: pytest.Subtests) -> None:
    """Where sums go by another route, the other collectives may stay on the first one."""
    for gain, route in ((1.3, "native"), (1.6, "ring")):
        with subtests.test(gain=gain):
            betas = {"native": 8e-8, "ring": 8e-8 / gain}
            found = choose_routes(forecast({"native": 1e-3, "ring": 1e-3 / gain}, betas))
            assert found["all_reduce"].routes == ["ring"]
            assert found["all_gather"].routes == [route]


@pytest.mark.capability("G9")
def test_a_slow_uplink_that_was_measured_sends_large_buffers_another_way() -> None:
    """Two racks: the ring crosses the uplink once, doubling with every rank of a rack at a time."""
    betas = {"native": 8e-8, "ring": 8e-8, "tree": 8e-8, "recursive-doubling": 3.2e-7}
    found = choose_route(forecast(dict.fromkeys(betas, 1e-3), betas))
    assert found.route(1 << 10) == "recursive-doubling" and found.route(1 << 24) == "native"
    limits = [most for most, _ in found.limits]
    assert limits == sorted(limits) and str(found).endswith("native above")


@pytest.mark.capability("G9")
def test_a_route_that_was_given_up_is_not_chosen_for_larger_buffers() -> None:
    """Two noisy points that fall would make it free there."""
    line = alike(1e-3, 8e-8).lines["native"]
    falls = LinkModel(1e-2, 0.0, 0.1, (LinkSample(1536.0, 6, 2e-2), LinkSample(24576.0, 6, 1e-2)))
    found = choose_route(RouteForecast(4, 1, {"native": line, "ring": falls}))
    assert found == RouteChoice((), "native")


@pytest.mark.capability("G13")
def test_a_time_between_two_sizes_is_on_the_line_between_them() -> None:
    points = (LinkSample(1000.0, 6, 1e-3), LinkSample(2000.0, 6, 3e-3), LinkSample(4000.0, 6, 3e-3))
    known = RouteForecast(4, 1, {"native": LinkModel(0.0, 0.0, 0.0, points)})
    at = {size: known.seconds("native", size * 2 // 3) for size in (500, 1500, 3000)}
    assert at[500] == 1e-3 and at[1500] == pytest.approx(2e-3, rel=1e-2)
    assert at[3000] == 3e-3  # a later size that took no longer
    one = RouteForecast(4, 1, {"native": LinkModel(1e-3, 1e-6, 0.0, points[:1])})
    assert one.seconds("native", 2000) == pytest.approx(6e-3 + 3e-3)


@pytest.mark.capability("G13")
def test_a_disturbed_time_is_set_right_by_a_larger_buffer_and_no_byte_is_free(
    subtests: pytest.Subtests,
) -> None:
    """Links of 2 ms and 10 ns a byte, of which one size was measured wrong."""
    true = {size: 2e-3 + 1e-8 * size for size in MEASURED[1:]}
    wrong = [(size, factor) for size in true for factor in (0.5, 2.0)]
    wrong += [(size, 10.0) for size in MEASURED[1:-1]]  # nothing sets the largest one right
    for size, factor in wrong:
        points = [LinkSample(float(b), 6, t * (factor if b == size else 1)) for b, t in true.items()]
        times = [point.seconds for point in isotonic_samples(points)]
        assert times == sorted(times) and all(t <= p.seconds for t, p in zip(times, points, strict=True))
        known = RouteForecast(4, 1, {"native": fit_link_model(points)})
        with subtests.test(size=size, factor=factor):
            told, right = known.seconds("native", 1 << 26), 2e-3 + 1e-8 * 1.5 * (1 << 26)
            assert 0.45 * right < told < 2.2 * right


@pytest.mark.capability("G13")
def test_sizes_that_take_as_long_have_the_median_of_their_times_and_not_the_least() -> None:
    times = (7.67e-3, 9.27e-3, 6.47e-3, 6.69e-3, 2e-2)
    points = [LinkSample(1000.0 * 4**k, 6, seconds) for k, seconds in enumerate(times)]
    assert [point.seconds for point in isotonic_samples(points)] == [6.69e-3] * 4 + [2e-2]
    assert isotonic_samples(points[::-1]) == isotonic_samples(points)
    rising = [LinkSample(1000.0 * k, 6, 1e-3 * k) for k in (1, 2, 3)]
    assert isotonic_samples(rising) == rising


@pytest.mark.capability("G13")
def test_a_byte_of_a_route_that_was_given_up_costs_what_it_costs_the_first() -> None:
    """The ring was tried on small buffers only, of which its messages hide the bytes."""
    known = alike(1e-3, 8e-8)
    native = known.lines["native"]
    flat = tuple(LinkSample(p.sent_bytes, p.rounds, 2e-2) for p in native.points[:2])
    told = RouteForecast(4, 1, {"native": native, "ring": fit_link_model(flat)})
    for size in (1 << 18, 1 << 22, 1 << 24):
        more = 1.5 * (size - MEASURED[1]) * 8e-8
        assert told.seconds("ring", size) == pytest.approx(2e-2 + more, rel=0.1)
    assert told.seconds("ring", MEASURED[1]) == 2e-2


@pytest.mark.capability("G13")
def test_short_sums_are_timed_several_in_a_row() -> None:
    assert num_sums_per_timing({"native": 0.02, "tree": 0.002}) == 4
    assert num_sums_per_timing({"native": 0.02, "tree": 0.011}) == 1


@pytest.mark.capability("G13")
def test_beyond_the_largest_buffer_a_time_grows_with_the_bytes() -> None:
    for alpha, beta in ((1e-3, 8e-8), (1e-2, 8e-9)):
        known = alike(alpha, beta)
        for route in ROUTES:
            way = critical_path_cost(route, 1 << 26, 4)
            right = way.rounds * alpha + way.sent_bytes * beta
            assert known.seconds(route, 1 << 26) == pytest.approx(right, rel=1e-3)


@pytest.mark.capability("G9")
def test_the_first_route_is_tried_throughout_and_others_are_given_up_on_large_buffers_only() -> None:
    times = {"native": 9.0, "ring": 4.0, "tree": 1.0, "grid": 1.9}
    assert routes_worth_trying(times, 1 << 10) == [*times]
    assert routes_worth_trying(times, 1 << 18) == ["native", "tree", "grid"]
    milliseconds = {word: seconds / 1e3 for word, seconds in times.items()}
    assert routes_worth_trying(milliseconds, 1 << 18) == [*times]  # it costs little to know


@pytest.mark.capability("G13")
def test_the_longest_way_is_that_of_the_papers() -> None:
    n = 1200
    for route in ("ring", "native"):
        assert critical_path_cost(route, n, 4) == CollectiveCost(1800.0, 1800.0, 6)
    assert critical_path_cost("tree", n, 4) == CollectiveCost(4.0 * n, 4.0 * n, 4)
    assert critical_path_cost("recursive-doubling", n, 4) == CollectiveCost(2.0 * n, 2.0 * n, 2)
    assert critical_path_cost("recursive-doubling", n, 5) == CollectiveCost(4.0 * n, 4.0 * n, 4)
    assert critical_path_cost("grid", n, 4) == CollectiveCost(1.0 * n + 0.5 * n, 1.5 * n, 4)
    assert critical_path_cost("hierarchical", n, 4, 2).sent_bytes == n  # each of two hosts sends all once
    assert critical_path_cost("tree", n, 1) == CollectiveCost(0.0, 0.0, 0)


def test_a_choice_says_its_limits_and_the_best_route_first() -> None:
    choice = RouteChoice(((1 << 16, "tree"), (1 << 20, "ring")), "native")
    assert str(choice) == "tree up to 64 KiB, ring up to 1 MiB, native above"
    assert [choice.route(size) for size in (1, 1 << 16, (1 << 16) + 1, 1 << 20, 1 << 21)] == [
        "tree",
        "tree",
        "ring",
        "ring",
        "native",
    ]
    assert explain_route_times(alike(1e-3, 8e-8), 256).startswith("recursive-doubling 2.16 ms, grid 4.12 ms")


def test_a_profile_carries_the_routes(tmp_path) -> None:
    known = alike(1e-3, 8e-8)
    profile = LinkProfile(("h0", "h1"), (), known.lines["native"], known.lines)
    profile.save(tmp_path / "links.json")
    assert LinkProfile.load(tmp_path / "links.json") == profile


HOPS = {
    "ring": RingRoute(),
    "tree": TreeRoute(),
    "recursive-doubling": RecursiveDoublingRoute(),
    "grid": GridRoute(),
}
WORLDS = (2, 3, 4, 5, 6, 7, 8)
N = 840  # values of a row; parts are equal for every number of ranks


@dataclass
class Wire:
    """From one rank to another: a message with the time at which it can leave, and when it had arrived."""

    messages: Queue[tuple[float, Tensor]] = field(default_factory=Queue)
    arrivals: Queue[float] = field(default_factory=Queue)


@dataclass
class Clocked:
    """In place of `RouteMessenger`: a message takes alpha and beta a byte, from when both sides are ready.

    Args:
        wires: by sender and receiver, of the whole group.
        places: of those that take part.
        now: the time of this rank, in a list that parts of the group share.
    """

    wires: dict[tuple[int, int], Wire]
    places: list[int]
    rank: int
    alpha: float
    beta: float
    now: list[float]
    workspace: Workspace = field(default_factory=Workspace)

    @property
    def size(self) -> int:
        return len(self.places)

    def among(self, ranks: range) -> Clocked:
        places = [self.places[rank] for rank in ranks]
        rank = list(ranks).index(self.rank)
        return Clocked(self.wires, places, rank, self.alpha, self.beta, self.now)

    def send(self, to: int, x: Tensor) -> None:
        self.now[0] = self._sent(to, x, self.now[0])

    def receive(self, source: int, out: Tensor) -> Tensor:
        self.now[0] = max(self.now[0], self._received(source, out, self.now[0]))
        return out

    def exchange(self, to: int, x: Tensor, source: int, out: Tensor) -> Tensor:
        began = self.now[0]
        self._wire(self.rank, to).messages.put((began, x.clone()))
        arrived = self._received(source, out, began)
        left = self._wire(self.rank, to).arrivals.get(timeout=60.0)
        self.now[0] = max(arrived, left)
        return out

    def _sent(self, to: int, x: Tensor, began: float) -> float:
        wire = self._wire(self.rank, to)
        wire.messages.put((began, x.clone()))
        return wire.arrivals.get(timeout=60.0)

    def _received(self, source: int, out: Tensor, ready: float) -> float:
        wire = self._wire(source, self.rank)
        began, x = wire.messages.get(timeout=60.0)
        out.copy_(x.view_as(out))
        done = max(began, ready) + self.alpha + self.beta * x.nbytes
        wire.arrivals.put(done)
        return done

    def _wire(self, source: int, to: int) -> Wire:
        return self.wires[self.places[source], self.places[to]]


def waited(hops: MessageRoute, op: str, world: int, alpha: float, beta: float) -> float:
    """The time of the slowest rank."""
    wires = {(a, b): Wire() for a in range(world) for b in range(world)}
    clocks = [[0.0] for _ in range(world)]

    def one(rank: int) -> None:
        mail: Any = Clocked(wires, list(range(world)), rank, alpha, beta, clocks[rank])
        if op == "all_reduce":
            hops.all_reduce(mail, torch.zeros(N))
        elif op == "broadcast":
            hops.broadcast(mail, torch.zeros(N), 0)
        else:
            getattr(hops, op)(mail, torch.zeros(world, N))

    threads = [threading.Thread(target=one, args=(rank,), daemon=True) for rank in range(world)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(timeout=60.0)
    assert not any(thread.is_alive() for thread in threads)
    return max(clock[0] for clock in clocks)


@pytest.mark.capability("G9", "G13")
@pytest.mark.parametrize("op", ROUTED_OPS)
@pytest.mark.parametrize("route", HOPS)
def test_the_closed_form_is_what_the_slowest_rank_waits_for(route: str, op: str) -> None:
    wrong = []
    for world in WORLDS:
        if route == "grid" and num_grid_columns(world) == 1:
            continue  # a ring
        num_bytes = 4 * N * (world if op == "reduce_scatter" else 1)
        way = critical_path_cost(route, num_bytes, world, op=op)
        found = waited(HOPS[route], op, world, 1.0, 0.0), waited(HOPS[route], op, world, 0.0, 1.0)
        if found != pytest.approx((way.rounds, way.sent_bytes)):
            wrong.append((world, found, (way.rounds, way.sent_bytes)))
    assert wrong == []
