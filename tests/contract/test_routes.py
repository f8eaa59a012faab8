"""The wires of routes keep the contract, alone and under the reducers."""

from collections.abc import Sequence
from typing import ClassVar

import pytest
from torch import nn

from paceline.comm import (
    AgreedNorm,
    BucketReducer,
    HierarchicalWire,
    Net,
    PlainWire,
    Reducer,
    ShardedReducer,
    Wire,
)
from paceline.layout.zero import cut_rows
from paceline.mesh import Group, Levels, Mesh, span_nodes
from paceline.slot import Slot
from paceline.testing.contracts import ReducerContract, WireContract


def two_nodes(net: Net, group: Group) -> HierarchicalWire:
    """The first half of the ranks on one node, the second half on another."""
    half = group.size // 2
    parts = span_nodes(group.ranks, [int(rank >= half) for rank in range(group.size)])
    return HierarchicalWire(net, group, Levels.build(group, parts))


@pytest.mark.capability("G8")
class TestHierarchicalWire(WireContract):
    """Two nodes of two, and two of three."""

    worlds: ClassVar = (4, 6)

    def wire(self, net: Net, group: Group) -> Wire:
        return two_nodes(net, group)


@pytest.mark.capability("G8")
class TestHierarchicalWireDealtOut(WireContract):
    """Ranks are dealt to three nodes in turn, as some schedulers place them."""

    worlds: ClassVar = (6,)

    def wire(self, net: Net, group: Group) -> Wire:
        parts = span_nodes(group.ranks, [rank % 3 for rank in range(group.size)])
        return HierarchicalWire(net, group, Levels.build(group, parts))


@pytest.mark.capability("G8")
class TestHierarchicalBuckets(ReducerContract):
    degrees: ClassVar = {"replica": 4}

    def reducer(self, parameters: Sequence[nn.Parameter], mesh: Mesh, net: Net) -> Reducer:
        return BucketReducer(parameters, two_nodes(net, mesh.replica), 64)


@pytest.mark.capability("G8")
class TestHierarchicalShards(ReducerContract):
    """One replica over two nodes."""

    degrees: ClassVar = {"shard": 4}

    def reducer(self, parameters: Sequence[nn.Parameter], mesh: Mesh, net: Net) -> Reducer:
        slots = {Slot.whole(str(i), p): p for i, p in enumerate(parameters)}
        cuts = cut_rows(slots, 4)
        wires = two_nodes(net, mesh.axes["shard"]), PlainWire(net, mesh.replica)
        return AgreedNorm(ShardedReducer(parameters, cuts, *wires, 64), mesh.inside, net)
