"""Codecs, collectives and reducers keep their contracts."""

from collections.abc import Mapping
from typing import ClassVar

import pytest
from torch import Tensor

from paceline.comm import CodedCollective, Collective, GradientReduction, NativeCollective, Net
from paceline.comm.codecs.int8_int4_int2 import BlockIntCodec
from paceline.comm.codecs.top_k import TopKCodec, make_keep_count
from paceline.comm.reduction import ScatterPaths, ScatterReducer
from paceline.comm.reduction.bucket_buffers import PartsBySlot
from paceline.comm.routes import MessageCollective, SharedMemoryCollective, connect_single_host_group
from paceline.comm.routes.tree_route import TreeRoute
from paceline.job.mesh import Mesh, RankGroup, duplicate_group
from paceline.state.slot import TensorSlot
from paceline.testing.contracts import CollectiveContract, ReducerContract

INT8_ERROR = 1 / 254
TOP_K_ERROR = 1.0  # what is not kept is lost
SHARE = 0.5


def coded(net: Net, group: RankGroup) -> CodedCollective:
    return CodedCollective(NativeCollective(net, group), BlockIntCodec(8))


def sparse(net: Net, group: RankGroup) -> CodedCollective:
    return CodedCollective(NativeCollective(net, group), TopKCodec(make_keep_count(SHARE)))


def shared(net: Net, group: RankGroup) -> Collective:
    if group.size == 1:
        return NativeCollective(net, group)
    links = connect_single_host_group(group, net)
    assert links is not None
    return SharedMemoryCollective(net, group, links)


def tree(net: Net, group: RankGroup) -> MessageCollective:
    return MessageCollective(net, duplicate_group(group, "tree"), TreeRoute())


def coded_tree(net: Net, group: RankGroup) -> CodedCollective:
    return CodedCollective(tree(net, group), BlockIntCodec(8))


# The native route


@pytest.mark.capability("G14")
class TestNativeCollective(CollectiveContract):
    collective = staticmethod(NativeCollective)


@pytest.mark.capability("H8")
class TestInt8Collective(CollectiveContract):
    relative_error = INT8_ERROR
    uses_error_feedback = True
    collective = staticmethod(coded)


@pytest.mark.capability("H8")
class TestTopKCollective(CollectiveContract):
    relative_error = TOP_K_ERROR
    uses_error_feedback = True
    collective = staticmethod(sparse)


@pytest.mark.soak
class TestReducer(ReducerContract):
    degrees: ClassVar = {"replica": 3}
    collective = staticmethod(NativeCollective)


@pytest.mark.soak
@pytest.mark.capability("H8")
class TestCodedReducer(ReducerContract):
    relative_error = INT8_ERROR
    collective = staticmethod(coded)


@pytest.mark.soak
@pytest.mark.capability("A11")
class TestReducerOfShards(ReducerContract):
    degrees: ClassVar = {"replica": 2, "shard": 2}
    collective = staticmethod(NativeCollective)


@pytest.mark.capability("H8")
class TestCodedReducerOfShards(ReducerContract):
    degrees: ClassVar = {"replica": 2, "shard": 2}
    relative_error = 2 * INT8_ERROR
    collective = staticmethod(coded)


# Through memory


@pytest.mark.capability("G1", "G14")
class TestSharedMemoryCollective(CollectiveContract):
    collective = staticmethod(shared)


@pytest.mark.soak
class TestSharedMemoryReducer(ReducerContract):
    degrees: ClassVar = {"replica": 3}
    collective = staticmethod(shared)


@pytest.mark.capability("A11")
class TestScatterer(ReducerContract):
    """Gradients that leave with every micro-batch, over messages, with replicas."""

    degrees: ClassVar = {"replica": 2, "shard": 2}
    collective = staticmethod(NativeCollective)

    def reducer(
        self, tensors: Mapping[TensorSlot, Tensor], parts: PartsBySlot, mesh: Mesh, net: Net
    ) -> GradientReduction:
        shard = mesh.axes["shard"]
        apart = self.collective(net, duplicate_group(shard, "scatter"))
        return ScatterReducer(
            tensors, parts, ScatterPaths(apart, self.collective(net, mesh.replica), shard, net), 64
        )


@pytest.mark.capability("A11")
class TestSharedMemoryScatterer(TestScatterer):
    degrees: ClassVar = {"shard": 3}
    collective = staticmethod(shared)


@pytest.mark.soak
@pytest.mark.capability("A11")
class TestSharedMemoryReducerOfShards(ReducerContract):
    degrees: ClassVar = {"replica": 2, "shard": 2}
    collective = staticmethod(shared)


# Along a tree


class TestTreeCollective(CollectiveContract):
    worlds: ClassVar = (2, 3, 5)
    collective = staticmethod(tree)


@pytest.mark.soak
@pytest.mark.capability("H8")
class TestInt8Tree(CollectiveContract):
    worlds: ClassVar = (3, 2)
    relative_error = INT8_ERROR
    uses_error_feedback = True
    collective = staticmethod(coded_tree)


@pytest.mark.soak
class TestTreeReducer(ReducerContract):
    degrees: ClassVar = {"replica": 3}
    collective = staticmethod(tree)


@pytest.mark.soak
@pytest.mark.capability("A11")
class TestTreeReducerOfShards(ReducerContract):
    degrees: ClassVar = {"replica": 2, "shard": 2}
    collective = staticmethod(tree)


@pytest.mark.capability("H8")
class TestCodedTreeReducerOfShards(ReducerContract):
    degrees: ClassVar = {"replica": 2, "shard": 2}
    relative_error = 2 * INT8_ERROR
    collective = staticmethod(coded_tree)
