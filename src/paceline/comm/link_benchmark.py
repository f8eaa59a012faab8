"""Try the routes of a group on its links, in the first moments of a session or for a link profile.

Invariant: a time is that of the slowest rank, and every rank has the same times. Routes take turns, so that
what else the machine does meets all of them. Short sums are timed several in a row: where ranks outnumber
cores, one of them takes some milliseconds more or less, as their threads happen to be woken. A route that is
far from the best on a large buffer is not tried on larger ones, and a size that takes long is the last, so
that a trial stays short.

Measure alpha and beta of every pair of ranks and of the world's all-reduce, on the CPU backend.

Invariant: only one pair sends at a time, so pairs do not disturb each other; every wait has the deadline of
the group. It measures what Gloo gives to a tensor, not what the wire could carry, and no GPU.
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
_ROUTE_BUDGET_SECONDS = 0.8  # of all routes: no further repeat of a size after it
_BACK_TO_BACK_SUMS = 4
_BACK_TO_BACK_SECONDS = 0.01  # sums in a row are timed up to the size whose best route takes as long
_LAST_ROUTE_SIZE_SECONDS = 0.15  # a size whose best route takes this long is the last
_WARM_UP_SECONDS = 0.1  # a first sum that is not longer is a warm-up
_MAX_SLOWDOWN = 2.0  # times the best: not tried on larger buffers
_CHEAP_TRIAL_SECONDS = (
    0.05  # what takes no longer is tried all the same: its bytes may be cheap behind its rounds
)
_LARGE_BYTES = (
    1 << 18
)  # of smaller buffers a time is mostly that of the rounds, and says nothing of larger ones


@dataclass
class RouteCandidates:
    """The routes that a group can have.

    Args:
        paths: by word, native first.
        ranks_per_host: of the hierarchical route; 1 where hosts have one rank, or unequally many.
        closers: end their threads.
    """

    paths: dict[str, NativeCollective | MessageCollective | HierarchicalCollective]
    ranks_per_host: int = 1
    closers: list[Callable[[], None]] = field(default_factory=list)

    def close(self) -> None:
        """End what they run on; nothing is under way."""
        while self.closers:
            self.closers.pop()()


def build_route_candidates(net: Net, group: RankGroup) -> RouteCandidates:
    """Make them; collective over the group, on processors."""
    found = RouteCandidates({"native": NativeCollective(net, group)})
    messages: dict[str, MessageRoute] = {"tree": TreeRoute(), "recursive-doubling": RecursiveDoublingRoute()}
    if num_grid_columns(group.size) > 1:
        messages["grid"] = GridRoute()
    ring = MessageCollective(net, duplicate_group(group, "messages"), RingRoute())
    found.closers.append(ring.close)
    found.paths["ring"] = ring
    found.paths |= {word: ring.with_route(hops) for word, hops in messages.items()}
    _add_hierarchical(found, net, group)
    return found


def _add_hierarchical(found: RouteCandidates, net: Net, group: RankGroup) -> None:
    hosts = all_gather_texts(host_id(), group, net)
    names = list(dict.fromkeys(hosts))
    node_of = dict(zip(group.ranks, (names.index(host) for host in hosts), strict=True))
    parts = group_ranks_by_node(group.ranks, [node_of.get(rank, -1) for rank in range(max(group.ranks) + 1)])
    here = {len(part) for part in parts}
    if len(parts) == 1 or here == {1} or len(here) > 1:
        return
    levels = NodeLevels.build(group, parts)
    ways = [_shared_memory_or_native(found, net, level) for level in (levels.scatter, levels.gather)]
    between = NativeCollective(net, levels.between)
    path = HierarchicalCollective(net, group, levels, between, (ways[0], ways[1]))
    found.closers.append(path.close)
    found.paths["hierarchical"] = path
    found.ranks_per_host = here.pop()


def _shared_memory_or_native(found: RouteCandidates, net: Net, level: RankGroup) -> Collective:
    links = connect_single_host_group(level, net)
    if links is None:
        return NativeCollective(net, level)
    path = SharedMemoryCollective(net, level, links)
    found.closers.append(path.close)
    return path


def measure_routes(
    found: RouteCandidates, net: Net, group: RankGroup, sizes: Sequence[int] = ROUTE_TRIAL_SIZES
) -> RouteForecast:
    """Measure an all_reduce by every route over sizes; collective, equal on every rank.

    Args:
        sizes: bytes of float32 tensors, ascending.
    """
    forms = {word: partial(critical_path_cost, word, world=group.size) for word in found.paths}
    points: dict[str, list[LinkSample]] = {word: [] for word in found.paths}
    left: Mapping[str, Collective] = found.paths
    times: Mapping[str, float] = {"": 0.0}
    for size in sizes:
        times = _median_route_seconds(left, net, group, size, num_sums_per_timing(times))
        for word, seconds in times.items():
            way = forms[word](num_bytes=size, ranks_per_host=found.ranks_per_host)
            points[word].append(LinkSample(way.sent_bytes, way.rounds, seconds))
        left = {word: left[word] for word in routes_worth_trying(times, size)}
        if min(times.values()) > _LAST_ROUTE_SIZE_SECONDS:
            break
    return RouteForecast(group.size, found.ranks_per_host, _fit_route_models(points))


def routes_worth_trying(times: Mapping[str, float], num_bytes: int) -> list[str]:
    """The routes to try on larger buffers: the first, to which others are compared, all near the best, and
    what costs little.

    Args:
        times: of a buffer of `num_bytes` by route.
    """
    first, most = next(iter(times)), max(_CHEAP_TRIAL_SECONDS, _MAX_SLOWDOWN * min(times.values()))
    return [word for word, took in times.items() if word == first or num_bytes < _LARGE_BYTES or took <= most]


def _fit_route_models(points: Mapping[str, Sequence[LinkSample]]) -> dict[str, LinkModel]:
    return {word: fit_link_model(own) for word, own in points.items()}


def num_sums_per_timing(times: Mapping[str, float]) -> int:
    """How many sums are timed together, by what one took by each route, of a buffer that is not larger."""
    return _BACK_TO_BACK_SUMS if min(times.values()) < _BACK_TO_BACK_SECONDS else 1


def _median_route_seconds(
    paths: Mapping[str, Collective], net: Net, group: RankGroup, num_bytes: int, num_sums: int
) -> dict[str, float]:
    """Of some repeats by each route, fewer where they take long."""
    key = f"trial {num_bytes}"
    buffers = {word: path.buffer(max(1, num_bytes // 4), torch.zeros(1), key) for word, path in paths.items()}
    found: dict[str, list[float]] = {word: [] for word in paths}
    for repeat in range(_ROUTE_REPEATS + 1):
        for word, path in paths.items():
            seconds = time_sums(path, net, group, buffers[word], key, num_sums)
            if repeat or seconds > _WARM_UP_SECONDS:
                found[word].append(seconds)
        if all(found.values()) and num_sums * sum(map(sum, found.values())) > _ROUTE_BUDGET_SECONDS:
            break
    return {word: statistics.median(times) for word, times in found.items()}


def time_sums(path: Collective, net: Net, group: RankGroup, x: Tensor, key: str, num_sums: int) -> float:
    """Seconds of one of `num_sums` sums, one after another, of the slowest rank; collective."""
    net.barrier(group)
    began = time.perf_counter()
    for _ in range(num_sums):
        path.all_reduce(x, key).wait(exposed=False)
    slowest = torch.tensor([time.perf_counter() - began], dtype=torch.float64)
    return float(net.all_reduce(slowest, group, "max").wait(exposed=False)) / num_sums


_MESSAGE_SIZES = (64, 1024, 8192, 65536, 262144, 1 << 20, 4 << 20, 16 << 20)
_LAST_SIZE_SECONDS = 0.15  # a size that takes this long is the last: the bandwidth shows
_NUM_REPEATS = 7
_SIZE_BUDGET_SECONDS = 0.25  # of one size
_REPLY_TAG = 1


def measure_links(net: Net, group: RankGroup, host: str) -> LinkProfile:
    """Measure; collective.

    Args:
        net: for the all-reduce; its ledger counts it. What pairs send is not counted.
        group: the world, at least two ranks.
        host: this rank's name for its host.
    Returns:
        The profile, equal on every rank.
    """
    hosts: list[str] = [""] * group.size
    dist.all_gather_object(hosts, host, group.handle)
    ordered = itertools.permutations(range(group.size), 2)
    lines = [(pair, _measure_pair(*pair, net, group)) for pair in ordered]
    world = measure_all_reduce(net, group)
    mine = {pair: line for pair, line in lines if line is not None}
    gathered: list[Any] = [None] * group.size
    dist.all_gather_object(gathered, mine, group.handle)
    found = {pair: line for part in gathered for pair, line in part.items()}
    pairs = tuple(RankPair(a, b, found[a, b]) for a, b in sorted(found))
    return LinkProfile(tuple(hosts), pairs, world, _forecast_routes(net, group).lines)


def _forecast_routes(net: Net, group: RankGroup) -> RouteForecast:
    """An all_reduce by every route that messages can take."""
    routes = build_route_candidates(net, group)
    try:
        return measure_routes(routes, net, group, _MESSAGE_SIZES)
    finally:
        routes.close()


def _measure_pair(source: int, target: int, net: Net, group: RankGroup) -> LinkModel | None:
    """The line from `source` to `target`, known to the source only.

    The time of one way is that of the way there with the answer, less half of a round trip of nothing.
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
    """Receive what the source announces, answer with one number, until it announces nothing."""
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
    """Seconds of the data there and of one number back.

    Gloo sends when it knows that the receiver has a buffer, so both buffers are announced before the clock
    starts: what is timed is the link, not this handshake.
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
    """The median of some repeats, fewer where one takes long; the first is a warm-up."""
    once()
    found: list[float] = []
    while len(found) < _NUM_REPEATS and sum(found) < _SIZE_BUDGET_SECONDS:
        found.append(once())
    return statistics.median(found)


def measure_all_reduce(net: Net, group: RankGroup) -> LinkModel:
    """Sums of a group over sizes, by the native route; collective, equal on every rank."""
    points = []
    for size in _MESSAGE_SIZES:
        seconds = _time_all_reduce(net, group, torch.zeros(max(group.size, size // 4)))
        asked = native_cost("all_reduce", 4 * max(group.size, size // 4), group.size)
        points.append(LinkSample(asked.sent_bytes, asked.rounds, seconds))
        if seconds > _LAST_SIZE_SECONDS:
            break
    return fit_link_model(points)


def _time_all_reduce(net: Net, group: RankGroup, x: Tensor) -> float:
    """The median over repeats of the slowest rank; all ranks repeat equally often."""
    found: list[float] = []
    for repeat in range(_NUM_REPEATS + 1):
        net.barrier(group)
        began = time.perf_counter()
        net.all_reduce(x, group).wait()
        slowest = torch.tensor([time.perf_counter() - began], dtype=torch.float64)
        seconds = float(net.all_reduce(slowest, group, "max").wait())
        if repeat:
            found.append(seconds)
        if sum(found) > _SIZE_BUDGET_SECONDS:
            break
    return statistics.median(found)


def bandwidths(point: LinkSample, world: int) -> tuple[float, float]:
    """Bits per second of an all-reduce: "algbw" counts the tensor, "busbw" what a rank sends.

    Source: NVIDIA nccl-tests, doc/PERFORMANCE.md, for the two names.
    """
    tensor_bytes = point.sent_bytes * world / (2 * (world - 1))
    return 8 * tensor_bytes / point.seconds, 8 * point.sent_bytes / point.seconds


def render_link_profile(profile: LinkProfile) -> Sequence[str]:
    """The tables for people."""
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
    """Alpha and beta of every route, over its longest way, and what was measured."""
    lines = ["", f"{'all-reduce by':<24}{'alpha':>12}{'bandwidth':>16}{'residual':>10}"]
    for route, line in profile.routes.items():
        times = ", ".join(f"{point.seconds * 1e3:.3g}" for point in line.points)
        lines.append(f"{route:<24}{_format_link(line)}   ms: {times}")
    return lines


def _format_link(line: LinkModel) -> str:
    rate = f"{line.bits_per_second / 1e6:.1f} Mbit/s"
    return f"{line.alpha_seconds * 1e3:>9.3f} ms{rate:>16}{line.residual:>10.1%}"
