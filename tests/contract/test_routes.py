"""The collectives of routes keep the contract, alone, with a codec and under the reducers."""

from typing import ClassVar

import pytest

from paceline.comm import Codec, CodedCollective, Collective, NativeCollective, Net
from paceline.comm.codecs.int8_int4_int2 import BlockIntCodec
from paceline.comm.codecs.sign import SignCodec
from paceline.comm.codecs.top_k import TopKCodec, make_keep_count
from paceline.comm.routes import HierarchicalCollective
from paceline.job.mesh import NodeLevels, RankGroup, group_ranks_by_node
from paceline.testing.contracts import CollectiveContract, ReducerContract

INT8_ERROR = 1 / 254
SIGN_ERROR = 2.0
TOP_K_ERROR = 1.0  # what is not kept is lost


def two_nodes(net: Net, group: RankGroup, codec: Codec | None = None) -> Collective:
    """The first half of the ranks on one node, the second half on another; a codec works between them."""
    if group.size == 1:
        return NativeCollective(net, group)
    half = group.size // 2
    parts = group_ranks_by_node(group.ranks, [int(rank >= half) for rank in range(group.size)])
    return on_nodes(net, group, parts, codec)


def on_nodes(net: Net, group: RankGroup, parts: list[tuple[int, ...]], codec: Codec | None) -> Collective:
    levels = NodeLevels.build(group, parts)
    between = NativeCollective(net, levels.between)
    coded = between if codec is None else CodedCollective(between, codec)
    return HierarchicalCollective(net, group, levels, coded)


@pytest.mark.capability("G8")
class TestHierarchicalCollective(CollectiveContract):
    """Two nodes of two, and two of three."""

    worlds: ClassVar = (4, 6)

    def collective(self, net: Net, group: RankGroup) -> Collective:
        return two_nodes(net, group)


@pytest.mark.capability("G8")
class TestHierarchicalCollectiveDealtOut(CollectiveContract):
    """Ranks are dealt to three nodes in turn, as some schedulers place them."""

    worlds: ClassVar = (6,)

    def collective(self, net: Net, group: RankGroup) -> Collective:
        return on_nodes(
            net, group, group_ranks_by_node(group.ranks, [rank % 3 for rank in range(group.size)]), None
        )


@pytest.mark.capability("G8", "H8")
class TestInt8BetweenNodes(CollectiveContract):
    """Two nodes of two, and two of three."""

    worlds: ClassVar = (4, 6)
    relative_error = INT8_ERROR
    uses_error_feedback = True

    def collective(self, net: Net, group: RankGroup) -> Collective:
        return two_nodes(net, group, BlockIntCodec(8))


@pytest.mark.capability("G8", "H8")
class TestInt8BetweenNodesDealtOut(CollectiveContract):
    """Ranks are dealt to three nodes in turn, as some schedulers place them."""

    worlds: ClassVar = (6,)
    relative_error = INT8_ERROR
    uses_error_feedback = True

    def collective(self, net: Net, group: RankGroup) -> Collective:
        return on_nodes(
            net,
            group,
            group_ranks_by_node(group.ranks, [rank % 3 for rank in range(group.size)]),
            BlockIntCodec(8),
        )


@pytest.mark.capability("G8", "H8")
class TestTopKBetweenNodes(CollectiveContract):
    worlds: ClassVar = (4,)
    relative_error = TOP_K_ERROR
    uses_error_feedback = True

    def collective(self, net: Net, group: RankGroup) -> Collective:
        return two_nodes(net, group, TopKCodec(make_keep_count(0.5)))


@pytest.mark.capability("G8")
class TestHierarchicalReducer(ReducerContract):
    degrees: ClassVar = {"replica": 4}

    def collective(self, net: Net, group: RankGroup) -> Collective:
        return two_nodes(net, group)


@pytest.mark.capability("G8")
class TestHierarchicalReducerOfShards(ReducerContract):
    """One replica over two nodes."""

    degrees: ClassVar = {"shard": 4}

    def collective(self, net: Net, group: RankGroup) -> Collective:
        return two_nodes(net, group)


@pytest.mark.capability("G8", "H8")
class TestReducerCodedBetweenNodes(ReducerContract):
    degrees: ClassVar = {"replica": 4}
    relative_error = INT8_ERROR

    def collective(self, net: Net, group: RankGroup) -> Collective:
        return two_nodes(net, group, BlockIntCodec(8))


@pytest.mark.capability("G8", "H8")
class TestReducerOfSignsBetweenNodes(ReducerContract):
    """A zero that fills up a slice is coded as something, and nothing of it may stay."""

    degrees: ClassVar = {"replica": 4}
    relative_error = SIGN_ERROR

    def collective(self, net: Net, group: RankGroup) -> Collective:
        return two_nodes(net, group, SignCodec())


@pytest.mark.capability("G8", "H8")
class TestReducerOfShardsCodedBetweenNodes(ReducerContract):
    """One replica over two nodes."""

    degrees: ClassVar = {"shard": 4}
    relative_error = INT8_ERROR

    def collective(self, net: Net, group: RankGroup) -> Collective:
        return two_nodes(net, group, BlockIntCodec(8))
