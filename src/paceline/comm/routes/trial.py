"""Try the routes of a group on its links, in the first moments of a session or for a link profile.

Invariant: a time is that of the slowest rank, and every rank has the same times. Routes take turns, so that
what else the machine does meets all of them. Short sums are timed several in a row: where ranks outnumber
cores, one of them takes some milliseconds more or less, as their threads happen to be woken. A route that is
far from the best on a large buffer is not tried on larger ones, and a size that takes long is the last, so
that a trial stays short.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial

import torch
from torch import Tensor

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
from paceline.levels import Levels, span_nodes
from paceline.mesh import Group, twin_group

SIZES = (1 << 10, 1 << 14, 1 << 16, 1 << 18, 1 << 20, 1 << 22, 1 << 24, 1 << 26)
_REPEATS = 11
_SIZE_SECONDS = 0.8  # of all routes: no further repeat of a size after it
_IN_A_ROW = 4
_ROW_SECONDS = 0.01  # sums in a row are timed up to the size whose best route takes as long
_ENOUGH_SECONDS = 0.15  # a size whose best route takes this long is the last
_SHORT_SECONDS = 0.1  # a first sum that is not longer is a warm-up
_HOPELESS = 2.0  # times the best: not tried on larger buffers
_CHEAP_SECONDS = 0.05  # what takes no longer is tried all the same: its bytes may be cheap behind its rounds
_LARGE_BYTES = (
    1 << 18
)  # of smaller buffers a time is mostly that of the rounds, and says nothing of larger ones


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
    times: Mapping[str, float] = {"": 0.0}
    for size in sizes:
        times = _medians(left, net, group, size, num_in_a_row(times))
        for word, seconds in times.items():
            way = forms[word](num_bytes=size, ranks_per_host=found.ranks_per_host)
            points[word].append(Point(way.sent_bytes, way.rounds, seconds))
        left = {word: left[word] for word in worth_trying(times, size)}
        if min(times.values()) > _ENOUGH_SECONDS:
            break
    return Forecast(group.size, found.ranks_per_host, _lines(points))


def worth_trying(times: Mapping[str, float], num_bytes: int) -> list[str]:
    """The routes to try on larger buffers: the first, to which others are compared, all near the best, and
    what costs little.

    Args:
        times: of a buffer of `num_bytes` by route.
    """
    first, most = next(iter(times)), max(_CHEAP_SECONDS, _HOPELESS * min(times.values()))
    return [word for word, took in times.items() if word == first or num_bytes < _LARGE_BYTES or took <= most]


def _lines(points: Mapping[str, Sequence[Point]]) -> dict[str, Line]:
    return {word: fit_line(own) for word, own in points.items()}


def num_in_a_row(times: Mapping[str, float]) -> int:
    """How many sums are timed together, by what one took by each route, of a buffer that is not larger."""
    return _IN_A_ROW if min(times.values()) < _ROW_SECONDS else 1


def _medians(
    paths: Mapping[str, Collective], net: Net, group: Group, num_bytes: int, num_sums: int
) -> dict[str, float]:
    """Of some repeats by each route, fewer where they take long."""
    key = f"trial {num_bytes}"
    buffers = {word: path.buffer(max(1, num_bytes // 4), torch.zeros(1), key) for word, path in paths.items()}
    found: dict[str, list[float]] = {word: [] for word in paths}
    for repeat in range(_REPEATS + 1):
        for word, path in paths.items():
            seconds = seconds_of_sums(path, net, group, buffers[word], key, num_sums)
            if repeat or seconds > _SHORT_SECONDS:
                found[word].append(seconds)
        if all(found.values()) and num_sums * sum(map(sum, found.values())) > _SIZE_SECONDS:
            break
    return {word: statistics.median(times) for word, times in found.items()}


def seconds_of_sums(path: Collective, net: Net, group: Group, x: Tensor, key: str, num_sums: int) -> float:
    """Seconds of one of `num_sums` sums, one after another, of the slowest rank; collective."""
    net.barrier(group)
    began = time.perf_counter()
    for _ in range(num_sums):
        path.all_reduce(x, key).wait(exposed=False)
    slowest = torch.tensor([time.perf_counter() - began], dtype=torch.float64)
    return float(net.all_reduce(slowest, group, "max").wait(exposed=False)) / num_sums
