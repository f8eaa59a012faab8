"""Codecs, collectives and reducers keep their contracts."""

from collections.abc import Mapping
from typing import ClassVar

import pytest
from torch import Tensor

from paceline.comm import CodedCollective, Collective, NativeCollective, Net, Reduction
from paceline.comm.codecs.scaled import Scaled
from paceline.comm.codecs.sparse import TopK, num_kept
from paceline.comm.reduction import Scatterer, Ways
from paceline.comm.reduction.part_buffer import Parts
from paceline.comm.routes import MessageCollective, SharedMemoryCollective, meet_on_host
from paceline.comm.routes.tree import Tree
from paceline.mesh import Group, Mesh, twin_group
from paceline.slot import Slot
from paceline.testing.contracts import CollectiveContract, ReducerContract

INT8_ERROR = 1 / 254
TOP_K_ERROR = 1.0  # what is not kept is lost
SHARE = "0.5"


# The native route


@pytest.mark.capability("G14")
class TestNativeCollective(CollectiveContract):
    def collective(self, net: Net, group: Group) -> Collective:
        return NativeCollective(net, group)


@pytest.mark.capability("H8")
class TestInt8Collective(CollectiveContract):
    relative_error = INT8_ERROR
    feeds_back = True

    def collective(self, net: Net, group: Group) -> Collective:
        return CodedCollective(NativeCollective(net, group), Scaled(8))


@pytest.mark.capability("H8")
class TestTopKCollective(CollectiveContract):
    relative_error = TOP_K_ERROR
    feeds_back = True

    def collective(self, net: Net, group: Group) -> Collective:
        return CodedCollective(NativeCollective(net, group), TopK(num_kept(SHARE)))


class TestReducer(ReducerContract):
    degrees: ClassVar = {"replica": 3}

    def collective(self, net: Net, group: Group) -> Collective:
        return NativeCollective(net, group)


@pytest.mark.capability("H8")
class TestCodedReducer(ReducerContract):
    relative_error = INT8_ERROR

    def collective(self, net: Net, group: Group) -> Collective:
        return CodedCollective(NativeCollective(net, group), Scaled(8))


@pytest.mark.capability("A11")
class TestReducerOfShards(ReducerContract):
    degrees: ClassVar = {"replica": 2, "shard": 2}

    def collective(self, net: Net, group: Group) -> Collective:
        return NativeCollective(net, group)


@pytest.mark.capability("H8")
class TestCodedReducerOfShards(ReducerContract):
    degrees: ClassVar = {"replica": 2, "shard": 2}
    relative_error = 2 * INT8_ERROR

    def collective(self, net: Net, group: Group) -> Collective:
        return CodedCollective(NativeCollective(net, group), Scaled(8))


# Through memory


def shared(net: Net, group: Group) -> Collective:
    if group.size == 1:
        return NativeCollective(net, group)
    links = meet_on_host(group, net)
    assert links is not None
    return SharedMemoryCollective(net, group, links)


@pytest.mark.capability("G1", "G14")
class TestSharedMemoryCollective(CollectiveContract):
    def collective(self, net: Net, group: Group) -> Collective:
        return shared(net, group)


class TestSharedMemoryReducer(ReducerContract):
    degrees: ClassVar = {"replica": 3}

    def collective(self, net: Net, group: Group) -> Collective:
        return shared(net, group)


@pytest.mark.capability("A11")
class TestScatterer(ReducerContract):
    """Gradients that leave with every micro-batch, over messages, with replicas."""

    degrees: ClassVar = {"replica": 2, "shard": 2}

    def collective(self, net: Net, group: Group) -> Collective:
        return NativeCollective(net, group)

    def reducer(self, tensors: Mapping[Slot, Tensor], parts: Parts, mesh: Mesh, net: Net) -> Reduction:
        shard = mesh.axes["shard"]
        apart = self.collective(net, twin_group(shard, "scatter"))
        return Scatterer(tensors, parts, Ways(apart, self.collective(net, mesh.replica), shard, net), 64)


@pytest.mark.capability("A11")
class TestSharedMemoryScatterer(TestScatterer):
    degrees: ClassVar = {"shard": 3}

    def collective(self, net: Net, group: Group) -> Collective:
        return shared(net, group)


@pytest.mark.capability("A11")
class TestSharedMemoryReducerOfShards(ReducerContract):
    degrees: ClassVar = {"replica": 2, "shard": 2}

    def collective(self, net: Net, group: Group) -> Collective:
        return shared(net, group)


# Along a tree


def tree(net: Net, group: Group) -> MessageCollective:
    return MessageCollective(net, twin_group(group, "tree"), Tree())


class TestTreeCollective(CollectiveContract):
    worlds: ClassVar = (2, 3, 5)

    def collective(self, net: Net, group: Group) -> Collective:
        return tree(net, group)


@pytest.mark.capability("H8")
class TestInt8Tree(CollectiveContract):
    worlds: ClassVar = (3, 2)
    relative_error = INT8_ERROR
    feeds_back = True

    def collective(self, net: Net, group: Group) -> Collective:
        return CodedCollective(tree(net, group), Scaled(8))


class TestTreeReducer(ReducerContract):
    degrees: ClassVar = {"replica": 3}

    def collective(self, net: Net, group: Group) -> Collective:
        return tree(net, group)


@pytest.mark.capability("A11")
class TestTreeReducerOfShards(ReducerContract):
    degrees: ClassVar = {"replica": 2, "shard": 2}

    def collective(self, net: Net, group: Group) -> Collective:
        return tree(net, group)


@pytest.mark.capability("H8")
class TestCodedTreeReducerOfShards(ReducerContract):
    degrees: ClassVar = {"replica": 2, "shard": 2}
    relative_error = 2 * INT8_ERROR

    def collective(self, net: Net, group: Group) -> Collective:
        return CodedCollective(tree(net, group), Scaled(8))
