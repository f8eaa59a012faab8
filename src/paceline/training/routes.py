"""From a route to the wire of a group. One table from words to constructors."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING

import torch

from paceline.comm import HierarchicalWire, PlainWire, Wire
from paceline.errors import StrategyError
from paceline.mesh import Group, Levels, span_nodes

if TYPE_CHECKING:
    from paceline.training.arrange import Setting


def _native(setting: Setting, group: Group) -> Wire:
    return PlainWire(setting.net, group)


def _hierarchical(setting: Setting, group: Group) -> Wire:
    """Collective over the world. A group on one node, or with one rank on each, has one level: native."""
    if setting.device.type != "cpu":
        raise StrategyError(
            f"route=hierarchical is built for processors, and this rank trains on {setting.device.type}",
            next_step="leave it out: NCCL sums inside nodes first by itself",
        )
    parts = span_nodes(group.ranks, _nodes(setting))
    if len(parts) == 1 or len(parts) == group.size:
        if group.size > 1:
            where = "lies on one node" if len(parts) == 1 else "has one rank on every node"
            setting.warn(
                f"route=hierarchical: the group '{group.name}' {where}, so its sum has one level, as native"
            )
        return _native(setting, group)
    wire = HierarchicalWire(setting.net, group, Levels.build(group, parts))
    setting.closers.append(wire.close)
    return wire


def _nodes(setting: Setting) -> list[int]:
    """The node of every rank of the job, as the launchers numbered them."""
    mine = torch.tensor([setting.cluster.node_rank])
    found = setting.net.all_gather(mine, setting.mesh.world, equal=True).wait()
    return [int(node) for node in found]


ROUTES: Mapping[str, Callable[[Setting, Group], Wire]] = {"native": _native, "hierarchical": _hierarchical}
