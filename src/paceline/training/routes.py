"""From the word of a route to a wire, the path of uncoded sums: one table of collective constructors."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch

from paceline.cluster import Cluster
from paceline.comm import HierarchicalWire, Net, PlainWire, SharedMemoryWire, Wire, meet_on_host
from paceline.errors import StrategyError
from paceline.mesh import Group, Levels, span_nodes


@dataclass(frozen=True)
class Site:
    """Where a wire is laid.

    Args:
        world: all ranks.
        device: where gradients lie.
        warn: is told of a route that is another one here.
        closers: what a session calls when it is closed.
    """

    cluster: Cluster
    world: Group
    net: Net
    device: torch.device
    warn: Callable[[str], None]
    closers: list[Callable[[], None]]


def _native(group: Group, site: Site) -> Wire:
    return PlainWire(site.net, group)


def _shared_memory(group: Group, site: Site) -> Wire:
    wire = _shared_or_native(group, site)
    if isinstance(wire, PlainWire):
        why = "this job computes on GPUs" if site.device.type != "cpu" else "its ranks run on several hosts"
        raise StrategyError(
            f"route=shared-memory cannot sum over group '{group.name}' {group.ranks}: {why}",
            next_step="choose route=auto, which takes memory where it can, or route=native",
        )
    return wire


def _shared_or_native(group: Group, site: Site) -> Wire:
    links = meet_on_host(group, site.net) if site.device.type == "cpu" else None
    if links is None:
        return PlainWire(site.net, group)
    wire = SharedMemoryWire(site.net, group, links)
    site.closers.append(wire.close)
    return wire


def _hierarchical(group: Group, site: Site) -> Wire:
    """Collective over the world. A group on one node, or with one rank on each, has one level: native."""
    if site.device.type != "cpu":
        raise StrategyError(
            f"route=hierarchical is built for processors, and this rank trains on {site.device.type}",
            next_step="leave it out: NCCL sums inside nodes first by itself",
        )
    parts = span_nodes(group.ranks, _nodes(site))
    if len(parts) in (1, group.size):
        where = "lies on one node" if len(parts) == 1 else "has one rank on every node"
        site.warn(
            f"route=hierarchical: the group '{group.name}' {where}, so its sum has one level, as native"
        )
        return PlainWire(site.net, group)
    wire = HierarchicalWire(site.net, group, Levels.build(group, parts))
    site.closers.append(wire.close)
    return wire


def _nodes(site: Site) -> list[int]:
    """The node of every rank of the job, as the launchers numbered them."""
    mine = torch.tensor([site.cluster.node_rank])
    found = site.net.all_gather(mine, site.world, equal=True).wait()
    return [int(node) for node in found]


ROUTES: Mapping[str, Callable[[Group, Site], Wire]] = {
    "auto": _shared_or_native,
    "native": _native,
    "shared-memory": _shared_memory,
    "hierarchical": _hierarchical,
}
