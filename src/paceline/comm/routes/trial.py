"""Try the routes of a group on its links, in the first moments of a session or for a link profile.

Invariant: a time is that of the slowest rank, and every rank has the same times. A route that is far from the
best is not tried on larger buffers, and a size that takes long is the last, so that a trial stays short.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial

import torch

from paceline.comm.collectives import Collective
from paceline.comm.link_profile import Line, Point, fit_line
from paceline.comm.net import Net
from paceline.comm.routes.by_messages import MessageCollective
from paceline.comm.routes.forecast import Forecast
from paceline.comm.routes.grid import Grid, columns_of
from paceline.comm.routes.hierarchical import HierarchicalCollective
from paceline.comm.routes.hops import Hops
from paceline.comm.routes.host_meeting import meet_on_host, this_host
from paceline.comm.routes.longest_way import longest_way
from paceline.comm.routes.native import NativeCollective
from paceline.comm.routes.recursive_doubling import RecursiveDoubling
from paceline.comm.routes.ring import Ring
from paceline.comm.routes.shared_memory import SharedMemoryCollective
from paceline.comm.routes.tree import Tree
from paceline.comm.text import gather_texts
from paceline.mesh import Group, Levels, span_nodes, twin_group

SIZES = (1 << 10, 1 << 14, 1 << 16, 1 << 18, 1 << 20, 1 << 22)
_REPEATS = 5
_ENOUGH_SECONDS = 0.1  # a size that takes this long is the last
_HOPELESS = 3.0  # times the best: not tried on larger buffers


@dataclass
class Candidates:
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


def candidates(net: Net, group: Group) -> Candidates:
    """Make them; collective over the group, on processors."""
    found = Candidates({"native": NativeCollective(net, group)})
    messages: dict[str, Hops] = {"tree": Tree(), "recursive-doubling": RecursiveDoubling()}
    if columns_of(group.size) > 1:
        messages["grid"] = Grid()
    ring = MessageCollective(net, twin_group(group, "messages"), Ring())
    found.closers.append(ring.close)
    found.paths["ring"] = ring
    found.paths |= {word: ring.along(hops) for word, hops in messages.items()}
    _add_hierarchical(found, net, group)
    return found


def _add_hierarchical(found: Candidates, net: Net, group: Group) -> None:
    hosts = gather_texts(this_host(), group, net)
    names = list(dict.fromkeys(hosts))
    node_of = dict(zip(group.ranks, (names.index(host) for host in hosts), strict=True))
    parts = span_nodes(group.ranks, [node_of.get(rank, -1) for rank in range(max(group.ranks) + 1)])
    here = {len(part) for part in parts}
    if len(parts) == 1 or here == {1} or len(here) > 1:
        return
    levels = Levels.build(group, parts)
    ways = [_in_memory(found, net, level) for level in (levels.scatter, levels.gather)]
    between = NativeCollective(net, levels.between)
    path = HierarchicalCollective(net, group, levels, between, (ways[0], ways[1]))
    found.closers.append(path.close)
    found.paths["hierarchical"] = path
    found.ranks_per_host = here.pop()


def _in_memory(found: Candidates, net: Net, level: Group) -> Collective:
    links = meet_on_host(level, net)
    if links is None:
        return NativeCollective(net, level)
    path = SharedMemoryCollective(net, level, links)
    found.closers.append(path.close)
    return path


def try_routes(found: Candidates, net: Net, group: Group, sizes: Sequence[int] = SIZES) -> Forecast:
    """Measure an all_reduce by every route over sizes; collective, equal on every rank.

    Args:
        sizes: bytes of float32 tensors, ascending.
    """
    forms = {word: partial(longest_way, word, world=group.size) for word in found.paths}
    points: dict[str, list[Point]] = {word: [] for word in found.paths}
    left: Mapping[str, Collective] = found.paths
    for size in sizes:
        times = {word: _seconds(path, net, group, size) for word, path in left.items()}
        for word, seconds in times.items():
            way = forms[word](num_bytes=size, ranks_per_host=found.ranks_per_host)
            points[word].append(Point(way.sent_bytes, way.rounds, seconds))
        best = min(times.values())
        left = {word: path for word, path in left.items() if times[word] <= _HOPELESS * best}
        if best > _ENOUGH_SECONDS:
            break
    return Forecast(group.size, found.ranks_per_host, _lines(points))


def _lines(points: Mapping[str, Sequence[Point]]) -> dict[str, Line]:
    return {word: fit_line(own) for word, own in points.items()}


def _seconds(path: Collective, net: Net, group: Group, num_bytes: int) -> float:
    """The median of some repeats of the slowest rank, fewer where one takes long; the first is a warm-up
    where it is short.
    """
    key = f"trial {num_bytes}"
    x = path.buffer(max(1, num_bytes // 4), torch.zeros(1), key)
    found: list[float] = []
    for repeat in range(_REPEATS + 1):
        net.barrier(group)
        began = time.perf_counter()
        path.all_reduce(x, key).wait(exposed=False)
        slowest = torch.tensor([time.perf_counter() - began], dtype=torch.float64)
        seconds = float(net.all_reduce(slowest, group, "max").wait(exposed=False))
        if repeat or seconds > _ENOUGH_SECONDS:
            found.append(seconds)
        if sum(found) > _ENOUGH_SECONDS:
            break
    return statistics.median(found)
