"""Measurements of links: the routes of a group, and alpha and beta of every pair of ranks. CPU only.

Routes are measured at the start of a session, or for a link profile. Invariant: a time is that of the slowest
rank, and every rank has the same times. Routes take turns, so that other load of the machine affects all of
them. Short sums are timed several in a row: where ranks outnumber cores, one of them takes some milliseconds
more or less, depending on how their threads happen to be woken. A route that is far from the best on a large
buffer is not measured on larger ones, and a size that takes long is the last, so that the measurement stays
short.

Of pairs only one sends at a time, so pairs do not disturb each other; every wait has the deadline of the
group. The result is the speed of Gloo for a tensor, not that of the wire, nor of a GPU.
"""

from __future__ import annotations

import itertools
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from paceline.comm.collective_cost import native_cost
from paceline.comm.collectives.collective_protocol import Collective
from paceline.comm.group_collectives import all_gather_texts
from paceline.comm.link_profile import LinkModel, LinkProfile, LinkSample, RankPair, fit_link_model
from paceline.comm.net import Net
from paceline.comm.routes.grid_route import GridRoute, num_grid_columns
from paceline.comm.routes.hierarchical import HierarchicalCollective
from paceline.comm.routes.host_links import connect_single_host_group, host_id
from paceline.comm.routes.message_route import MessageCollective, MessageRoute
from paceline.comm.routes.native import NativeCollective
from paceline.comm.routes.recursive_doubling import RecursiveDoublingRoute
from paceline.comm.routes.ring_route import RingRoute
from paceline.comm.routes.route_by_size import RouteForecast, critical_path_cost
from paceline.comm.routes.shared_memory import SharedMemoryCollective
from paceline.comm.routes.tree_route import TreeRoute
from paceline.job.mesh import NodeLevels, RankGroup, duplicate_group, group_ranks_by_node

ROUTE_TRIAL_SIZES = (1 << 10, 1 << 14, 1 << 16, 1 << 18, 1 << 20, 1 << 22, 1 << 24, 1 << 26)
_ROUTE_REPEATS = 11
# Seconds of all routes, after which a size is not repeated.
_ROUTE_BUDGET_SECONDS = 0.8
_BACK_TO_BACK_SUMS = 4
# Sums are timed in a row up to the size whose best route takes this long.
_BACK_TO_BACK_SECONDS = 0.01
# A size whose best route takes this long is the last.
_LAST_ROUTE_SIZE_SECONDS = 0.15
# A first sum that takes no longer is a warm-up; a longer one counts.
_WARM_UP_SECONDS = 0.1
# Times the best: slower routes are not measured on larger buffers.
_MAX_SLOWDOWN = 2.0
# A route that takes no longer is measured all the same: its bytes may be cheap and its rounds slow.
_CHEAP_TRIAL_SECONDS = 0.05
# The time of smaller buffers is mostly that of the rounds, and says nothing about larger ones.
_LARGE_BYTES = 1 << 18


@dataclass
class RouteCandidates:
    """The routes that a group can use.

    Args:
        paths: collectives by word, native first.
        ranks_per_host: for the hierarchical route; 1 if hosts have one rank, or different numbers.
        closers: functions that end their threads.
    """

    paths: dict[str, NativeCollective | MessageCollective | HierarchicalCollective]
    ranks_per_host: int = 1
    closers: list[Callable[[], None]] = field(default_factory=list)

    def close(self) -> None:
        """End the threads; nothing is in flight."""
        while self.closers:
            self.closers.pop()()


def build_route_candidates(net: Net, group: RankGroup) -> RouteCandidates:
    """Build all routes of a group of CPU ranks; collective over the group."""
    candidates = RouteCandidates({"native": NativeCollective(net, group)})
    messages: dict[str, MessageRoute] = {"tree": TreeRoute(), "recursive-doubling": RecursiveDoublingRoute()}
    if num_grid_columns(group.size) > 1:
        messages["grid"] = GridRoute()
    ring = MessageCollective(net, duplicate_group(group, "messages"), RingRoute())
    candidates.closers.append(ring.close)
    candidates.paths["ring"] = ring
    candidates.paths |= {word: ring.with_route(hops) for word, hops in messages.items()}
    _add_hierarchical(candidates, net, group)
    return candidates


def _add_hierarchical(candidates: RouteCandidates, net: Net, group: RankGroup) -> None:
    hosts = all_gather_texts(host_id(), group, net)
    names = list(dict.fromkeys(hosts))
    node_of = dict(zip(group.ranks, (names.index(host) for host in hosts), strict=True))
    ranks_by_host = group_ranks_by_node(
        group.ranks, [node_of.get(rank, -1) for rank in range(max(group.ranks) + 1)]
    )
    group_sizes = {len(ranks) for ranks in ranks_by_host}
    # Two levels need several hosts, with the same number of ranks above one on each.
    if len(ranks_by_host) == 1 or group_sizes == {1} or len(group_sizes) > 1:
        return
    levels = NodeLevels.build(group, ranks_by_host)
    inside = [_shared_memory_or_native(candidates, net, level) for level in (levels.scatter, levels.gather)]
    between = NativeCollective(net, levels.between)
    path = HierarchicalCollective(net, group, levels, between, (inside[0], inside[1]))
    candidates.closers.append(path.close)
    candidates.paths["hierarchical"] = path
    candidates.ranks_per_host = group_sizes.pop()


def _shared_memory_or_native(candidates: RouteCandidates, net: Net, level: RankGroup) -> Collective:
    links = connect_single_host_group(level, net)
    if links is None:
        return NativeCollective(net, level)
    path = SharedMemoryCollective(net, level, links)
    candidates.closers.append(path.close)
    return path


def measure_routes(
    candidates: RouteCandidates, net: Net, group: RankGroup, sizes: Sequence[int] = ROUTE_TRIAL_SIZES
) -> RouteForecast:
    """Measure an all_reduce on every route over sizes; collective, equal on every rank.

    Args:
        sizes: bytes of float32 tensors, ascending.
    """
    forms = {word: partial(critical_path_cost, word, world=group.size) for word in candidates.paths}
    points: dict[str, list[LinkSample]] = {word: [] for word in candidates.paths}
    remaining: Mapping[str, Collective] = candidates.paths
    times: Mapping[str, float] = {"": 0.0}
    for size in sizes:
        times = _median_route_seconds(remaining, net, group, size, num_sums_per_timing(times))
        for word, seconds in times.items():
            cost = forms[word](num_bytes=size, ranks_per_host=candidates.ranks_per_host)
            points[word].append(LinkSample(cost.sent_bytes, cost.rounds, seconds))
        remaining = {word: remaining[word] for word in routes_worth_trying(times, size)}
        if min(times.values()) > _LAST_ROUTE_SIZE_SECONDS:
            break
    return RouteForecast(group.size, candidates.ranks_per_host, _fit_route_models(points))


def routes_worth_trying(times: Mapping[str, float], num_bytes: int) -> list[str]:
    """Return the routes to measure on larger buffers: the first, to which others are compared, and all fast
    or cheap ones.

    Args:
        times: times of a buffer of `num_bytes` by route.
    """
    first, max_seconds = next(iter(times)), max(_CHEAP_TRIAL_SECONDS, _MAX_SLOWDOWN * min(times.values()))
    return [
        word
        for word, seconds in times.items()
        if word == first or num_bytes < _LARGE_BYTES or seconds <= max_seconds
    ]


def _fit_route_models(points: Mapping[str, Sequence[LinkSample]]) -> dict[str, LinkModel]:
    return {word: fit_link_model(route_points) for word, route_points in points.items()}


def num_sums_per_timing(times: Mapping[str, float]) -> int:
    """Return how many sums to time together, from the times of one sum by route, of a buffer that is not
    larger.
    """
    return _BACK_TO_BACK_SUMS if min(times.values()) < _BACK_TO_BACK_SECONDS else 1


def _median_route_seconds(
    paths: Mapping[str, Collective], net: Net, group: RankGroup, num_bytes: int, num_sums: int
) -> dict[str, float]:
    """Return the median of some repeats on each route, fewer if they take long."""
    key = f"trial {num_bytes}"
    buffers = {word: path.buffer(max(1, num_bytes // 4), torch.zeros(1), key) for word, path in paths.items()}
    seconds_by_route: dict[str, list[float]] = {word: [] for word in paths}
    for repeat in range(_ROUTE_REPEATS + 1):
        for word, path in paths.items():
            seconds = time_sums(path, net, group, buffers[word], key, num_sums)
            if repeat or seconds > _WARM_UP_SECONDS:
                seconds_by_route[word].append(seconds)
        if (
            all(seconds_by_route.values())
            and num_sums * sum(map(sum, seconds_by_route.values())) > _ROUTE_BUDGET_SECONDS
        ):
            break
    return {word: statistics.median(times) for word, times in seconds_by_route.items()}


def time_sums(path: Collective, net: Net, group: RankGroup, x: Tensor, key: str, num_sums: int) -> float:
    """Return the seconds of one of `num_sums` sums, one after another, on the slowest rank; collective."""
    net.barrier(group)
    began = time.perf_counter()
    for _ in range(num_sums):
        path.all_reduce(x, key).wait(exposed=False)
    slowest = torch.tensor([time.perf_counter() - began], dtype=torch.float64)
    return float(net.all_reduce(slowest, group, "max").wait(exposed=False)) / num_sums


_MESSAGE_SIZES = (64, 1024, 8192, 65536, 262144, 1 << 20, 4 << 20, 16 << 20)
# A size that takes this long is the last: it shows the bandwidth.
_LAST_SIZE_SECONDS = 0.15
_NUM_REPEATS = 7
# Seconds of the repeats of one size.
_SIZE_BUDGET_SECONDS = 0.25
_REPLY_TAG = 1


def measure_links(net: Net, group: RankGroup, host: str) -> LinkProfile:
    """Measure all links of a job; collective.

    Args:
        net: for the all-reduce; its ledger counts it. Messages of pairs are not counted.
        group: the world, at least two ranks.
        host: this rank's name for its host.
    Returns:
        The profile, equal on every rank.
    """
    hosts: list[str] = [""] * group.size
    dist.all_gather_object(hosts, host, group.handle)
    ordered = itertools.permutations(range(group.size), 2)
    measured = [(pair, _measure_pair(*pair, net, group)) for pair in ordered]
    world = measure_all_reduce(net, group)
    local_models = {pair: model for pair, model in measured if model is not None}
    gathered: list[Any] = [None] * group.size
    dist.all_gather_object(gathered, local_models, group.handle)
    models = {pair: model for rank_models in gathered for pair, model in rank_models.items()}
    pairs = tuple(RankPair(a, b, models[a, b]) for a, b in sorted(models))
    return LinkProfile(tuple(hosts), pairs, world, _forecast_routes(net, group).lines)


def _forecast_routes(net: Net, group: RankGroup) -> RouteForecast:
    """Measure an all_reduce on every route."""
    routes = build_route_candidates(net, group)
    try:
        return measure_routes(routes, net, group, _MESSAGE_SIZES)
    finally:
        routes.close()


def _measure_pair(source: int, target: int, net: Net, group: RankGroup) -> LinkModel | None:
    """Measure the link from `source` to `target`; the model is known to the source only.

    The time of one way is that of a message and its reply, less half of a round trip of an empty message.
    """
    net.barrier(group)
    if group.rank == target:
        _reply_until_done(source, group)
    if group.rank != source:
        return None
    empty = _median_seconds(partial(_round_trip, target, torch.zeros(1), group))
    points = []
    for size in _MESSAGE_SIZES:
        seconds = _median_seconds(partial(_round_trip, target, torch.zeros(size // 4), group))
        points.append(LinkSample(float(size), 1, max(seconds - empty / 2, seconds / 2)))
        if seconds > _LAST_SIZE_SECONDS:
            break
    _send(torch.zeros(1, dtype=torch.int64), target, group)
    return fit_link_model(points)


def _reply_until_done(source: int, group: RankGroup) -> None:
    """Receive messages that the source announces, and reply with one number, until it announces an empty
    one.
    """
    size = torch.zeros(1, dtype=torch.int64)
    buffers: dict[int, Tensor] = {}
    while True:
        _receive(size, source, group)
        length = int(size)
        if length == 0:
            return
        incoming = dist.irecv(
            buffers.setdefault(length, torch.empty(length)), group.ranks[source], group.handle
        )
        _send(torch.zeros(1), source, group)
        assert incoming is not None
        incoming.wait()
        dist.send(torch.zeros(1), group.ranks[source], group.handle, tag=_REPLY_TAG)


def _round_trip(target: int, data: Tensor, group: RankGroup) -> float:
    """Return the seconds of the data there and of one number back.

    Gloo sends after the receiver has announced a buffer, so both buffers are announced before the clock
    starts: the measurement is that of the link, not of this handshake.
    """
    answer = dist.irecv(torch.zeros(1), group.ranks[target], group.handle, tag=_REPLY_TAG)
    assert answer is not None
    _send(torch.tensor([data.numel()]), target, group)
    _receive(torch.zeros(1), target, group)
    began = time.perf_counter()
    _send(data, target, group)
    answer.wait()
    return time.perf_counter() - began


def _send(x: Tensor, to: int, group: RankGroup) -> None:
    dist.send(x, group.ranks[to], group.handle)


def _receive(x: Tensor, source: int, group: RankGroup) -> None:
    dist.recv(x, group.ranks[source], group.handle)


def _median_seconds(once: Callable[[], float]) -> float:
    """Return the median of some repeats, fewer if one takes long; the first is a warm-up."""
    once()
    seconds: list[float] = []
    while len(seconds) < _NUM_REPEATS and sum(seconds) < _SIZE_BUDGET_SECONDS:
        seconds.append(once())
    return statistics.median(seconds)


def measure_all_reduce(net: Net, group: RankGroup) -> LinkModel:
    """Measure sums of a group over sizes, on the native route; collective, equal on every rank."""
    points = []
    for size in _MESSAGE_SIZES:
        seconds = _time_all_reduce(net, group, torch.zeros(max(group.size, size // 4)))
        cost = native_cost("all_reduce", 4 * max(group.size, size // 4), group.size)
        points.append(LinkSample(cost.sent_bytes, cost.rounds, seconds))
        if seconds > _LAST_SIZE_SECONDS:
            break
    return fit_link_model(points)


def _time_all_reduce(net: Net, group: RankGroup, x: Tensor) -> float:
    """Return the median over repeats of the slowest rank; all ranks repeat equally often."""
    timings: list[float] = []
    for repeat in range(_NUM_REPEATS + 1):
        net.barrier(group)
        began = time.perf_counter()
        net.all_reduce(x, group).wait()
        slowest = torch.tensor([time.perf_counter() - began], dtype=torch.float64)
        # The maximum also keeps the ranks together: all leave the loop after the same repeat.
        seconds = float(net.all_reduce(slowest, group, "max").wait())
        if repeat:
            timings.append(seconds)
        if sum(timings) > _SIZE_BUDGET_SECONDS:
            break
    return statistics.median(timings)


def bandwidths(point: LinkSample, world: int) -> tuple[float, float]:
    """Return bits per second of an all-reduce: "algbw" counts the tensor, "busbw" what a rank sends.

    Source: NVIDIA nccl-tests, doc/PERFORMANCE.md, for the two names.
    """
    tensor_bytes = point.sent_bytes * world / (2 * (world - 1))
    return 8 * tensor_bytes / point.seconds, 8 * point.sent_bytes / point.seconds


def render_link_profile(profile: LinkProfile) -> Sequence[str]:
    """Return the lines of a table for people."""
    lines = [f"{'from':<12}{'to':<12}{'alpha':>12}{'bandwidth':>16}{'residual':>10}"]
    for pair in profile.pairs:
        names = (f"{rank} {profile.hosts[rank]}" for rank in (pair.source, pair.target))
        lines.append("".join(f"{name:<12}" for name in names) + _format_link(pair.line))
    lines += [f"{'all-reduce, a round':<24}{_format_link(profile.all_reduce)}", ""]
    lines.append(f"{'all-reduce of':<16}{'time':>12}{'algbw':>16}{'busbw':>16}")
    world = len(profile.hosts)
    for point in profile.all_reduce.points:
        size = point.sent_bytes * world / (2 * (world - 1))
        algbw, busbw = bandwidths(point, world)
        times = f"{point.seconds * 1e3:>9.3f} ms{algbw / 1e6:>9.1f} Mbit/s{busbw / 1e6:>9.1f} Mbit/s"
        lines.append(f"{size:>10,.0f} bytes{times}")
    return [*lines, *_render_routes(profile)]


def _render_routes(profile: LinkProfile) -> Sequence[str]:
    """Return lines with alpha and beta of every route, over its critical path, and the measured times."""
    lines = ["", f"{'all-reduce by':<24}{'alpha':>12}{'bandwidth':>16}{'residual':>10}"]
    for route, line in profile.routes.items():
        times = ", ".join(f"{point.seconds * 1e3:.3g}" for point in line.points)
        lines.append(f"{route:<24}{_format_link(line)}   ms: {times}")
    return lines


def _format_link(line: LinkModel) -> str:
    rate = f"{line.bits_per_second / 1e6:.1f} Mbit/s"
    return f"{line.alpha_seconds * 1e3:>9.3f} ms{rate:>16}{line.residual:>10.1%}"
