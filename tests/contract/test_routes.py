"""The collectives of routes keep the contract, alone, with a codec and under the reducers."""

from functools import partial
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


def three_nodes(net: Net, group: RankGroup, codec: Codec | None = None) -> Collective:
    """Ranks are dealt to three nodes in turn, as some schedulers place them."""
    parts = group_ranks_by_node(group.ranks, [rank % 3 for rank in range(group.size)])
    return on_nodes(net, group, parts, codec)


def on_nodes(net: Net, group: RankGroup, parts: list[tuple[int, ...]], codec: Codec | None) -> Collective:
    levels = NodeLevels.build(group, parts)
    between = NativeCollective(net, levels.between)
    coded = between if codec is None else CodedCollective(between, codec)
    return HierarchicalCollective(net, group, levels, coded)


@pytest.mark.soak
@pytest.mark.capability("G8")
class TestHierarchicalCollective(CollectiveContract):
    """Two nodes of two, and two of three."""

    worlds: ClassVar = (4, 6)
    collective = staticmethod(two_nodes)


@pytest.mark.capability("G8")
class TestHierarchicalCollectiveDealtOut(CollectiveContract):
    worlds: ClassVar = (6,)
    collective = staticmethod(three_nodes)


@pytest.mark.capability("G8", "H8")
class TestInt8BetweenNodes(CollectiveContract):
    """Two nodes of two, and two of three."""

    worlds: ClassVar = (4, 6)
    relative_error = INT8_ERROR
    uses_error_feedback = True
    collective = staticmethod(partial(two_nodes, codec=BlockIntCodec(8)))


@pytest.mark.soak
@pytest.mark.capability("G8", "H8")
class TestInt8BetweenNodesDealtOut(CollectiveContract):
    worlds: ClassVar = (6,)
    relative_error = INT8_ERROR
    uses_error_feedback = True
    collective = staticmethod(partial(three_nodes, codec=BlockIntCodec(8)))


@pytest.mark.soak
@pytest.mark.capability("G8", "H8")
class TestTopKBetweenNodes(CollectiveContract):
    worlds: ClassVar = (4,)
    relative_error = TOP_K_ERROR
    uses_error_feedback = True
    collective = staticmethod(partial(two_nodes, codec=TopKCodec(make_keep_count(0.5))))


@pytest.mark.soak
@pytest.mark.capability("G8")
class TestHierarchicalReducer(ReducerContract):
    degrees: ClassVar = {"replica": 4}
    collective = staticmethod(two_nodes)


@pytest.mark.capability("G8")
class TestHierarchicalReducerOfShards(ReducerContract):
    """One replica over two nodes."""

    degrees: ClassVar = {"shard": 4}
    collective = staticmethod(two_nodes)


@pytest.mark.soak
@pytest.mark.capability("G8", "H8")
class TestReducerCodedBetweenNodes(ReducerContract):
    degrees: ClassVar = {"replica": 4}
    relative_error = INT8_ERROR
    collective = staticmethod(partial(two_nodes, codec=BlockIntCodec(8)))


@pytest.mark.capability("G8", "H8")
class TestReducerOfSignsBetweenNodes(ReducerContract):
    """A zero that fills up a slice is coded as something, and nothing of it may stay."""

    degrees: ClassVar = {"replica": 4}
    relative_error = SIGN_ERROR
    collective = staticmethod(partial(two_nodes, codec=SignCodec()))


@pytest.mark.capability("G8", "H8")
class TestReducerOfShardsCodedBetweenNodes(ReducerContract):
    """One replica over two nodes."""

    degrees: ClassVar = {"shard": 4}
    relative_error = INT8_ERROR
    collective = staticmethod(partial(two_nodes, codec=BlockIntCodec(8)))
