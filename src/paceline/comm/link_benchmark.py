"""Measure alpha and beta of every pair of ranks and of the world's all-reduce, on the CPU backend.

Invariant: only one pair sends at a time, so pairs do not disturb each other; every wait has the deadline of
the group. It measures what Gloo gives to a tensor, not what the wire could carry, and no GPU.
"""

from __future__ import annotations

import itertools
import statistics
import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from paceline.comm.cost import cost
from paceline.comm.link_profile import Line, LinkProfile, Pair, Point, fit_line
from paceline.comm.net import Net
from paceline.comm.routes.forecast import Forecast
from paceline.comm.routes.trial import candidates, try_routes
from paceline.mesh import Group

_SIZES = (64, 1024, 8192, 65536, 262144, 1 << 20, 4 << 20, 16 << 20)
_ENOUGH_SECONDS = 0.15  # a size that takes this long is the last: the bandwidth shows
_REPEATS = 7
_TIMED_SECONDS = 0.25  # of one size
_ANSWER = 1


def measure_links(net: Net, group: Group, host: str) -> LinkProfile:
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
    pairs = tuple(Pair(a, b, found[a, b]) for a, b in sorted(found))
    return LinkProfile(tuple(hosts), pairs, world, _measure_routes(net, group).lines)


def _measure_routes(net: Net, group: Group) -> Forecast:
    """An all_reduce by every route that messages can take."""
    routes = candidates(net, group)
    try:
        return try_routes(routes, net, group, _SIZES)
    finally:
        routes.close()


def _measure_pair(source: int, target: int, net: Net, group: Group) -> Line | None:
    """The line from `source` to `target`, known to the source only.

    The time of one way is that of the way there with the answer, less half of a round trip of nothing.
    """
    net.barrier(group)
    if group.rank == target:
        _answer(source, group)
    if group.rank != source:
        return None
    empty = _seconds(partial(_round_trip, target, torch.zeros(1), group))
    points = []
    for size in _SIZES:
        seconds = _seconds(partial(_round_trip, target, torch.zeros(size // 4), group))
        points.append(Point(float(size), 1, max(seconds - empty / 2, seconds / 2)))
        if seconds > _ENOUGH_SECONDS:
            break
    _send(torch.zeros(1, dtype=torch.int64), target, group)
    return fit_line(points)


def _answer(source: int, group: Group) -> None:
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
        dist.send(torch.zeros(1), group.ranks[source], group.handle, tag=_ANSWER)


def _round_trip(target: int, data: Tensor, group: Group) -> float:
    """Seconds of the data there and of one number back.

    Gloo sends when it knows that the receiver has a buffer, so both buffers are announced before the clock
    starts: what is timed is the link, not this handshake.
    """
    answer = dist.irecv(torch.zeros(1), group.ranks[target], group.handle, tag=_ANSWER)
    assert answer is not None
    _send(torch.tensor([data.numel()]), target, group)
    _receive(torch.zeros(1), target, group)
    began = time.perf_counter()
    _send(data, target, group)
    answer.wait()
    return time.perf_counter() - began


def _send(x: Tensor, to: int, group: Group) -> None:
    dist.send(x, group.ranks[to], group.handle)


def _receive(x: Tensor, source: int, group: Group) -> None:
    dist.recv(x, group.ranks[source], group.handle)


def _seconds(once: Callable[[], float]) -> float:
    """The median of some repeats, fewer where one takes long; the first is a warm-up."""
    once()
    found: list[float] = []
    while len(found) < _REPEATS and sum(found) < _TIMED_SECONDS:
        found.append(once())
    return statistics.median(found)


def measure_all_reduce(net: Net, group: Group) -> Line:
    """Sums of a group over sizes, by the native route; collective, equal on every rank."""
    points = []
    for size in _SIZES:
        seconds = _time_all_reduce(net, group, torch.zeros(max(group.size, size // 4)))
        asked = cost("all_reduce", 4 * max(group.size, size // 4), group.size)
        points.append(Point(asked.sent_bytes, asked.rounds, seconds))
        if seconds > _ENOUGH_SECONDS:
            break
    return fit_line(points)


def _time_all_reduce(net: Net, group: Group, x: Tensor) -> float:
    """The median over repeats of the slowest rank; all ranks repeat equally often."""
    found: list[float] = []
    for repeat in range(_REPEATS + 1):
        net.barrier(group)
        began = time.perf_counter()
        net.all_reduce(x, group).wait()
        slowest = torch.tensor([time.perf_counter() - began], dtype=torch.float64)
        seconds = float(net.all_reduce(slowest, group, "max").wait())
        if repeat:
            found.append(seconds)
        if sum(found) > _TIMED_SECONDS:
            break
    return statistics.median(found)


def bandwidths(point: Point, world: int) -> tuple[float, float]:
    """Bits per second of an all-reduce: "algbw" counts the tensor, "busbw" what a rank sends.

    Source: NVIDIA nccl-tests, doc/PERFORMANCE.md, for the two names.
    """
    tensor_bytes = point.sent_bytes * world / (2 * (world - 1))
    return 8 * tensor_bytes / point.seconds, 8 * point.sent_bytes / point.seconds


def render(profile: LinkProfile) -> Sequence[str]:
    """The tables for people."""
    lines = [f"{'from':<12}{'to':<12}{'alpha':>12}{'bandwidth':>16}{'residual':>10}"]
    for pair in profile.pairs:
        names = (f"{rank} {profile.hosts[rank]}" for rank in (pair.source, pair.target))
        lines.append("".join(f"{name:<12}" for name in names) + _spell(pair.line))
    lines += [f"{'all-reduce, a round':<24}{_spell(profile.all_reduce)}", ""]
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
        lines.append(f"{route:<24}{_spell(line)}   ms: {times}")
    return lines


def _spell(line: Line) -> str:
    rate = f"{line.bits_per_second / 1e6:.1f} Mbit/s"
    return f"{line.alpha_seconds * 1e3:>9.3f} ms{rate:>16}{line.residual:>10.1%}"
