"""The routes: how the collective of a group is made, and where on its path a codec sits."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch

from paceline.comm.collectives.collective_protocol import AllToAllCollective, Collective
from paceline.comm.net import Net
from paceline.comm.routes.grid_route import GridRoute
from paceline.comm.routes.hierarchical import HierarchicalCollective
from paceline.comm.routes.host_links import connect_single_host_group
from paceline.comm.routes.message_route import MessageCollective, MessageRoute
from paceline.comm.routes.native import NativeCollective
from paceline.comm.routes.recursive_doubling import RecursiveDoublingRoute
from paceline.comm.routes.ring_route import RingRoute
from paceline.comm.routes.route_by_size import RouteForecast
from paceline.comm.routes.shared_memory import SharedMemoryCollective
from paceline.comm.routes.tree_route import TreeRoute
from paceline.errors import StrategyError
from paceline.job.cluster import Cluster
from paceline.job.mesh import NodeLevels, RankGroup, duplicate_group, group_ranks_by_node


@dataclass(frozen=True)
class RouteContext:
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
        route_forecasts: what was measured before, by ranks.
    """

    cluster: Cluster
    world: RankGroup
    net: Net
    device: torch.device
    warn: Callable[[str], None]
    closers: list[Callable[[], None]]
    coded: Callable[[AllToAllCollective], Collective]
    is_coded: bool
    is_ordered: bool = False
    told: Callable[[str, Mapping[str, Any]], None] = lambda name, record: None
    largest_bytes: int = 1 << 24
    link_profile: str | None = None
    route_forecasts: dict[tuple[int, ...], RouteForecast] = field(default_factory=dict)


def build_native(group: RankGroup, site: RouteContext) -> Collective:
    """The collectives of the backend."""
    return site.coded(NativeCollective(site.net, group))


def build_shared_memory(group: RankGroup, site: RouteContext) -> Collective:
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


def shared_or_native(group: RankGroup, site: RouteContext) -> Collective:
    """Memory where all ranks of the group are on one host, and nothing is coded."""
    if site.is_coded:
        return build_native(group, site)
    return host_memory_or_none(group, site) or NativeCollective(site.net, group)


def host_memory_or_none(group: RankGroup, site: RouteContext) -> SharedMemoryCollective | None:
    """The memory of the host on which all ranks of a group run; None: they run on several, or on GPUs."""
    links = connect_single_host_group(group, site.net) if site.device.type == "cpu" else None
    if links is None:
        return None
    found = SharedMemoryCollective(site.net, group, links)
    site.closers.append(found.close)
    return found


def build_hierarchical(group: RankGroup, site: RouteContext) -> Collective:
    """Inside nodes first; collective over the world.

    A group on one node, or with one rank on each, has one level: native.
    """
    _require_cpu(site, "hierarchical", "NCCL sums inside nodes first by itself")
    parts = group_ranks_by_node(group.ranks, _node_of_ranks(site))
    if len(parts) in (1, group.size):
        where = "lies on one node" if len(parts) == 1 else "has one rank on every node"
        site.warn(
            f"route=hierarchical: the group '{group.name}' {where}, so its sum has one level, as native"
        )
        return build_native(group, site)
    levels = NodeLevels.build(group, parts)
    scatter, gather = (host_memory_or_none(level, site) for level in (levels.scatter, levels.gather))
    inside = None if scatter is None or gather is None else (scatter, gather)
    found = HierarchicalCollective(site.net, group, levels, build_native(levels.between, site), inside)
    site.closers.append(found.close)
    return found


def build_ring(group: RankGroup, site: RouteContext) -> Collective:
    """Messages round a ring."""
    return _build_message_route(group, site, "ring", RingRoute())


def build_tree(group: RankGroup, site: RouteContext) -> Collective:
    """Messages up and down a tree."""
    return _build_message_route(group, site, "tree", TreeRoute())


def build_recursive_doubling(group: RankGroup, site: RouteContext) -> Collective:
    """Messages between ranks whose numbers differ in one bit."""
    return _build_message_route(group, site, "recursive-doubling", RecursiveDoublingRoute())


def build_grid(group: RankGroup, site: RouteContext) -> Collective:
    """Messages along the rows and columns of a grid."""
    return _build_message_route(group, site, "grid", GridRoute())


def _build_message_route(group: RankGroup, site: RouteContext, word: str, hops: MessageRoute) -> Collective:
    _require_cpu(site, word, "NCCL has rings and trees of its own")
    found = MessageCollective(site.net, duplicate_group(group, word), hops)
    site.closers.append(found.close)
    return site.coded(found)


def _require_cpu(site: RouteContext, word: str, instead: str) -> None:
    if site.device.type != "cpu":
        raise StrategyError(
            f"route={word} is built for processors, and this rank trains on {site.device.type}",
            next_step=f"leave it out: {instead}",
        )


def _node_of_ranks(site: RouteContext) -> list[int]:
    """The node of every rank of the job, as the launchers numbered them."""
    mine = torch.tensor([site.cluster.node_rank])
    found = site.net.all_gather(mine, site.world, equal=True).wait()
    return [int(node) for node in found]
