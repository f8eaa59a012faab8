"""The routes: how the collective of a group is made, and where on its path a codec sits."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch

from paceline.cluster import Cluster
from paceline.comm import Collective, NativeCollective, Net
from paceline.comm.collectives import Exchanging
from paceline.comm.routes import (
    HierarchicalCollective,
    MessageCollective,
    SharedMemoryCollective,
    meet_on_host,
)
from paceline.comm.routes.forecast import Forecast
from paceline.comm.routes.grid import Grid
from paceline.comm.routes.hops import Hops
from paceline.comm.routes.recursive_doubling import RecursiveDoubling
from paceline.comm.routes.ring import Ring
from paceline.comm.routes.tree import Tree
from paceline.errors import StrategyError
from paceline.levels import Levels, span_nodes
from paceline.mesh import Group, twin_group


@dataclass(frozen=True)
class Site:
    """Where a collective is made.

    Args:
        world: all ranks.
        device: where gradients lie.
        warn: is told of a route that is another one here.
        closers: what a session calls when it is closed.
        coded: puts a codec on a path; the path itself where values travel as they are.
        is_coded: whether it does.
        is_ordered: sums have one order, so nothing is left to what is measured.
        told: is told of what was chosen, for the run folder.
        largest_bytes: of a buffer of gradients.
        link_profile: a file that says what links are like; None: they are measured.
        forecasts: what was measured before, by ranks.
    """

    cluster: Cluster
    world: Group
    net: Net
    device: torch.device
    warn: Callable[[str], None]
    closers: list[Callable[[], None]]
    coded: Callable[[Exchanging], Collective]
    is_coded: bool
    is_ordered: bool = False
    told: Callable[[str, Mapping[str, Any]], None] = lambda name, record: None
    largest_bytes: int = 1 << 24
    link_profile: str | None = None
    forecasts: dict[tuple[int, ...], Forecast] = field(default_factory=dict)


def native(group: Group, site: Site) -> Collective:
    """The collectives of the backend."""
    return site.coded(NativeCollective(site.net, group))


def shared_memory(group: Group, site: Site) -> Collective:
    """The memory of one host.

    Raises:
        StrategyError: the group has none in common.
    """
    found = shared_or_native(group, site)
    if isinstance(found, NativeCollective):
        why = "this job computes on GPUs" if site.device.type != "cpu" else "its ranks run on several hosts"
        raise StrategyError(
            f"route=shared-memory cannot sum over group '{group.name}' {group.ranks}: {why}",
            next_step="choose route=auto, which takes memory where it can, or route=native",
        )
    return found


def shared_or_native(group: Group, site: Site) -> Collective:
    """Memory where all ranks of the group are on one host, and nothing is coded."""
    if site.is_coded:
        return native(group, site)
    return in_memory(group, site) or NativeCollective(site.net, group)


def in_memory(group: Group, site: Site) -> SharedMemoryCollective | None:
    """The memory of the host on which all ranks of a group run; None: they run on several, or on GPUs."""
    links = meet_on_host(group, site.net) if site.device.type == "cpu" else None
    if links is None:
        return None
    found = SharedMemoryCollective(site.net, group, links)
    site.closers.append(found.close)
    return found


def hierarchical(group: Group, site: Site) -> Collective:
    """Inside nodes first; collective over the world.

    A group on one node, or with one rank on each, has one level: native.
    """
    _require_processors(site, "hierarchical", "NCCL sums inside nodes first by itself")
    parts = span_nodes(group.ranks, _nodes(site))
    if len(parts) in (1, group.size):
        where = "lies on one node" if len(parts) == 1 else "has one rank on every node"
        site.warn(
            f"route=hierarchical: the group '{group.name}' {where}, so its sum has one level, as native"
        )
        return native(group, site)
    levels = Levels.build(group, parts)
    scatter, gather = (in_memory(level, site) for level in (levels.scatter, levels.gather))
    inside = None if scatter is None or gather is None else (scatter, gather)
    found = HierarchicalCollective(site.net, group, levels, native(levels.between, site), inside)
    site.closers.append(found.close)
    return found


def ring(group: Group, site: Site) -> Collective:
    """Messages round a ring."""
    return _by_messages(group, site, "ring", Ring())


def tree(group: Group, site: Site) -> Collective:
    """Messages up and down a tree."""
    return _by_messages(group, site, "tree", Tree())


def recursive_doubling(group: Group, site: Site) -> Collective:
    """Messages between ranks whose numbers differ in one bit."""
    return _by_messages(group, site, "recursive-doubling", RecursiveDoubling())


def grid(group: Group, site: Site) -> Collective:
    """Messages along the rows and columns of a grid."""
    return _by_messages(group, site, "grid", Grid())


def _by_messages(group: Group, site: Site, word: str, hops: Hops) -> Collective:
    _require_processors(site, word, "NCCL has rings and trees of its own")
    found = MessageCollective(site.net, twin_group(group, word), hops)
    site.closers.append(found.close)
    return site.coded(found)


def _require_processors(site: Site, word: str, instead: str) -> None:
    if site.device.type != "cpu":
        raise StrategyError(
            f"route={word} is built for processors, and this rank trains on {site.device.type}",
            next_step=f"leave it out: {instead}",
        )


def _nodes(site: Site) -> list[int]:
    """The node of every rank of the job, as the launchers numbered them."""
    mine = torch.tensor([site.cluster.node_rank])
    found = site.net.all_gather(mine, site.world, equal=True).wait()
    return [int(node) for node in found]
