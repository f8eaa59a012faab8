"""Which route is best for a size follows from what was measured, and equal findings give equal choices."""

from __future__ import annotations

import pytest

from paceline.comm.cost import Cost
from paceline.comm.link_profile import Line, LinkProfile, Point, fit_line
from paceline.comm.routes.forecast import (
    SIZES,
    Choice,
    Forecast,
    choose,
    choose_all,
    evened,
    explain,
    say_others,
)
from paceline.comm.routes.longest_way import longest_way
from paceline.comm.routes.trial import num_in_a_row, worth_trying

ROUTES = ("native", "ring", "tree", "recursive-doubling", "grid")
MEASURED = (1 << 10, 1 << 14, 1 << 18, 1 << 22)


def forecast(alphas: dict[str, float], betas: dict[str, float], world: int = 4) -> Forecast:
    """Links on which routes take so many seconds a round and a byte."""
    lines = {}
    for route, alpha in alphas.items():
        ways = [longest_way(route, size, world) for size in MEASURED]
        points = [Point(w.sent_bytes, w.rounds, w.rounds * alpha + w.sent_bytes * betas[route]) for w in ways]
        lines[route] = fit_line(points)
    return Forecast(world, 1, lines)


def alike(alpha: float, beta: float, world: int = 4) -> Forecast:
    return forecast(dict.fromkeys(ROUTES, alpha), dict.fromkeys(ROUTES, beta), world)


@pytest.mark.capability("G9", "G13")
@pytest.mark.parametrize("world", [2, 3, 4, 6, 8])
def test_small_buffers_take_few_rounds_and_large_ones_few_bytes(world: int) -> None:
    found = choose(alike(1e-3, 8e-8, world))  # 1 ms and 100 Mbit/s
    rounds = {route: longest_way(route, 256, world).rounds for route in ROUTES}
    fewest = min(rounds.values())
    assert rounds[found.route(256)] == fewest or 1.1 * fewest >= rounds["native"]
    assert found.route(64 << 20) in ("native", "ring", "grid")
    if world in (4, 8):
        assert found.route(256) == "recursive-doubling" and len(found.routes) > 1


@pytest.mark.capability("G9")
def test_every_choice_is_within_the_bound_of_the_best(subtests: pytest.Subtests) -> None:
    for alpha, beta in ((5e-5, 8e-9), (5e-4, 8e-8), (1e-2, 8e-7)):
        known = alike(alpha, beta)
        found = choose(known)
        for size in SIZES:
            with subtests.test(alpha=alpha, size=size):
                taken = known.seconds(found.route(size), size)
                assert taken <= 1.1 * min(known.seconds(route, size) for route in ROUTES) * (1 + 1e-9)


@pytest.mark.capability("G9")
def test_the_first_route_stays_where_nothing_is_gained() -> None:
    near = forecast({"native": 1e-3, "ring": 0.97e-3}, {"native": 8e-8, "ring": 7.8e-8})
    assert choose(near) == Choice((), "native")
    far = forecast({"native": 1e-3, "ring": 0.5e-3}, {"native": 8e-8, "ring": 4e-8})
    assert choose(far) == Choice((), "ring")


@pytest.mark.capability("G9")
def test_other_collectives_go_by_what_alpha_and_beta_of_the_sums_foretell() -> None:
    known = alike(1e-3, 8e-8, 8)
    found = choose_all(known)
    assert [*found] == ["all_reduce", "reduce_scatter", "all_gather", "broadcast"]
    assert found["all_gather"].route(256) == "recursive-doubling"  # 3 rounds, where a ring has 7
    assert found["all_gather"].above == found["reduce_scatter"].above == "native"
    assert found["broadcast"] == found["reduce_scatter"] == Choice((), "native")  # 3 rounds, and 1
    said = say_others(known, found, "native")
    limit = found["all_gather"].limits[-1][0]
    assert said.startswith("all_gather recursive-doubling up to ") and said.count("foretold") == 1
    assert explain(known, limit, "all_gather") in said
    assert say_others(known, choose_all(alike(0.0, 8e-8, 8)), "native") == ""


@pytest.mark.capability("G9")
def test_what_was_not_measured_has_to_promise_more(subtests: pytest.Subtests) -> None:
    """Where sums go by another route, the other collectives may stay on the first one."""
    for gain, route in ((1.3, "native"), (1.6, "ring")):
        with subtests.test(gain=gain):
            betas = {"native": 8e-8, "ring": 8e-8 / gain}
            found = choose_all(forecast({"native": 1e-3, "ring": 1e-3 / gain}, betas))
            assert found["all_reduce"].routes == ["ring"]
            assert found["all_gather"].routes == [route]


@pytest.mark.capability("G9")
def test_a_slow_uplink_that_was_measured_sends_large_buffers_another_way() -> None:
    """Two racks: the ring crosses the uplink once, doubling with every rank of a rack at a time."""
    betas = {"native": 8e-8, "ring": 8e-8, "tree": 8e-8, "recursive-doubling": 3.2e-7}
    found = choose(forecast(dict.fromkeys(betas, 1e-3), betas))
    assert found.route(1 << 10) == "recursive-doubling" and found.route(1 << 24) == "native"
    limits = [most for most, _ in found.limits]
    assert limits == sorted(limits) and str(found).endswith("native above")


@pytest.mark.capability("G9")
def test_a_route_that_was_given_up_is_not_chosen_for_larger_buffers() -> None:
    """Two noisy points that fall would make it free there."""
    line = alike(1e-3, 8e-8).lines["native"]
    falls = Line(1e-2, 0.0, 0.1, (Point(1536.0, 6, 2e-2), Point(24576.0, 6, 1e-2)))
    found = choose(Forecast(4, 1, {"native": line, "ring": falls}))
    assert found == Choice((), "native")


@pytest.mark.capability("G13")
def test_a_time_between_two_sizes_is_on_the_line_between_them() -> None:
    points = (Point(1000.0, 6, 1e-3), Point(2000.0, 6, 3e-3), Point(4000.0, 6, 3e-3))
    known = Forecast(4, 1, {"native": Line(0.0, 0.0, 0.0, points)})
    at = {size: known.seconds("native", size * 2 // 3) for size in (500, 1500, 3000)}
    assert at[500] == 1e-3 and at[1500] == pytest.approx(2e-3, rel=1e-2)
    assert at[3000] == 3e-3  # a later size that took no longer
    one = Forecast(4, 1, {"native": Line(1e-3, 1e-6, 0.0, points[:1])})
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
        points = [Point(float(b), 6, t * (factor if b == size else 1)) for b, t in true.items()]
        times = [point.seconds for point in evened(points)]
        assert times == sorted(times) and all(t <= p.seconds for t, p in zip(times, points, strict=True))
        known = Forecast(4, 1, {"native": fit_line(points)})
        with subtests.test(size=size, factor=factor):
            told, right = known.seconds("native", 1 << 26), 2e-3 + 1e-8 * 1.5 * (1 << 26)
            assert 0.45 * right < told < 2.2 * right


@pytest.mark.capability("G13")
def test_sizes_that_take_as_long_have_the_median_of_their_times_and_not_the_least() -> None:
    times = (7.67e-3, 9.27e-3, 6.47e-3, 6.69e-3, 2e-2)
    points = [Point(1000.0 * 4**k, 6, seconds) for k, seconds in enumerate(times)]
    assert [point.seconds for point in evened(points)] == [6.69e-3] * 4 + [2e-2]
    assert evened(points[::-1]) == evened(points)
    rising = [Point(1000.0 * k, 6, 1e-3 * k) for k in (1, 2, 3)]
    assert evened(rising) == rising


@pytest.mark.capability("G13")
def test_a_byte_of_a_route_that_was_given_up_costs_what_it_costs_the_first() -> None:
    """The ring was tried on small buffers only, of which its messages hide the bytes."""
    known = alike(1e-3, 8e-8)
    native = known.lines["native"]
    flat = tuple(Point(p.sent_bytes, p.rounds, 2e-2) for p in native.points[:2])
    told = Forecast(4, 1, {"native": native, "ring": fit_line(flat)})
    for size in (1 << 18, 1 << 22, 1 << 24):
        more = 1.5 * (size - MEASURED[1]) * 8e-8
        assert told.seconds("ring", size) == pytest.approx(2e-2 + more, rel=0.1)
    assert told.seconds("ring", MEASURED[1]) == 2e-2


@pytest.mark.capability("G13")
def test_short_sums_are_timed_several_in_a_row() -> None:
    assert num_in_a_row({"native": 0.02, "tree": 0.002}) == 4
    assert num_in_a_row({"native": 0.02, "tree": 0.011}) == 1


@pytest.mark.capability("G13")
def test_beyond_the_largest_buffer_a_time_grows_with_the_bytes() -> None:
    for alpha, beta in ((1e-3, 8e-8), (1e-2, 8e-9)):
        known = alike(alpha, beta)
        for route in ROUTES:
            way = longest_way(route, 1 << 26, 4)
            right = way.rounds * alpha + way.sent_bytes * beta
            assert known.seconds(route, 1 << 26) == pytest.approx(right, rel=1e-3)


@pytest.mark.capability("G9")
def test_the_first_route_is_tried_throughout_and_others_are_given_up_on_large_buffers_only() -> None:
    times = {"native": 9.0, "ring": 4.0, "tree": 1.0, "grid": 1.9}
    assert worth_trying(times, 1 << 10) == [*times]
    assert worth_trying(times, 1 << 18) == ["native", "tree", "grid"]
    milliseconds = {word: seconds / 1e3 for word, seconds in times.items()}
    assert worth_trying(milliseconds, 1 << 18) == [*times]  # it costs little to know


@pytest.mark.capability("G13")
def test_the_longest_way_is_that_of_the_papers() -> None:
    n = 1200
    assert longest_way("ring", n, 4) == Cost(1800.0, 1800.0, 6) == longest_way("native", n, 4)
    assert longest_way("tree", n, 4) == Cost(4.0 * n, 4.0 * n, 4)
    assert longest_way("recursive-doubling", n, 4) == Cost(2.0 * n, 2.0 * n, 2)
    assert longest_way("recursive-doubling", n, 5) == Cost(4.0 * n, 4.0 * n, 4)
    assert longest_way("grid", n, 4) == Cost(1.0 * n + 0.5 * n, 1.5 * n, 4)
    assert longest_way("hierarchical", n, 4, 2).sent_bytes == n  # of two hosts, each sends all of it once
    assert longest_way("tree", n, 1) == Cost(0.0, 0.0, 0)


def test_a_choice_says_its_limits_and_the_best_route_first() -> None:
    choice = Choice(((1 << 16, "tree"), (1 << 20, "ring")), "native")
    assert str(choice) == "tree up to 64 KiB, ring up to 1 MiB, native above"
    assert [choice.route(size) for size in (1, 1 << 16, (1 << 16) + 1, 1 << 20, 1 << 21)] == [
        "tree",
        "tree",
        "ring",
        "ring",
        "native",
    ]
    assert explain(alike(1e-3, 8e-8), 256).startswith("recursive-doubling 2.16 ms, grid 4.12 ms")


def test_a_profile_carries_the_routes(tmp_path) -> None:
    known = alike(1e-3, 8e-8)
    profile = LinkProfile(("h0", "h1"), (), known.lines["native"], known.lines)
    profile.save(tmp_path / "links.json")
    assert LinkProfile.load(tmp_path / "links.json") == profile
