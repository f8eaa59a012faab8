"""Codecs, wires and reducers keep their contracts."""

from collections.abc import Sequence
from typing import ClassVar

import pytest
from torch import nn

from paceline.comm import (
    AgreedNorm,
    BucketReducer,
    Codec,
    CodedWire,
    Int8,
    Net,
    PlainWire,
    Reducer,
    ShardedReducer,
    SharedMemoryWire,
    Wire,
    meet_on_host,
)
from paceline.layout.zero import cut_rows
from paceline.mesh import Group, Mesh
from paceline.slot import Slot
from paceline.testing.contracts import CodecContract, ReducerContract, WireContract

INT8_ERROR = 1 / 254


@pytest.mark.capability("H8")
class TestInt8(CodecContract):
    relative_error = INT8_ERROR

    def codec(self) -> Codec:
        return Int8()


@pytest.mark.capability("G14")
class TestPlainWire(WireContract):
    def wire(self, net: Net, group: Group) -> Wire:
        return PlainWire(net, group)


@pytest.mark.capability("H8")
class TestInt8Wire(WireContract):
    relative_error = INT8_ERROR
    feeds_back = True

    def wire(self, net: Net, group: Group) -> Wire:
        return CodedWire(net, group, Int8())


class TestBucketReducer(ReducerContract):
    degrees: ClassVar = {"replica": 3}

    def reducer(self, parameters: Sequence[nn.Parameter], mesh: Mesh, net: Net) -> Reducer:
        return BucketReducer(parameters, PlainWire(net, mesh.replica), 64)


@pytest.mark.capability("H8")
class TestCodedBucketReducer(ReducerContract):
    relative_error = INT8_ERROR

    def reducer(self, parameters: Sequence[nn.Parameter], mesh: Mesh, net: Net) -> Reducer:
        return BucketReducer(parameters, CodedWire(net, mesh.replica, Int8()), 64)


def sharded(parameters: Sequence[nn.Parameter], mesh: Mesh, net: Net, shard: Wire, replica: Wire) -> Reducer:
    slots = {Slot.whole(str(i), p): p for i, p in enumerate(parameters)}
    cuts = cut_rows(slots, mesh.axes["shard"].size)
    return AgreedNorm(ShardedReducer(parameters, cuts, shard, replica, 64), mesh.inside, net)


@pytest.mark.capability("A11")
class TestShardedReducer(ReducerContract):
    degrees: ClassVar = {"replica": 2, "shard": 2}

    def reducer(self, parameters: Sequence[nn.Parameter], mesh: Mesh, net: Net) -> Reducer:
        wires = PlainWire(net, mesh.axes["shard"]), PlainWire(net, mesh.replica)
        return sharded(parameters, mesh, net, *wires)


@pytest.mark.capability("H8")
class TestCodedShardedReducer(ReducerContract):
    degrees: ClassVar = {"replica": 2, "shard": 2}
    relative_error = 2 * INT8_ERROR

    def reducer(self, parameters: Sequence[nn.Parameter], mesh: Mesh, net: Net) -> Reducer:
        wires = (CodedWire(net, group, Int8()) for group in (mesh.axes["shard"], mesh.replica))
        return sharded(parameters, mesh, net, *wires)


def shared(net: Net, group: Group) -> SharedMemoryWire:
    links = meet_on_host(group, net)
    assert links is not None
    return SharedMemoryWire(net, group, links)


@pytest.mark.capability("G1", "G14")
class TestSharedMemoryWire(WireContract):
    def wire(self, net: Net, group: Group) -> Wire:
        return shared(net, group)


class TestSharedMemoryBucketReducer(ReducerContract):
    degrees: ClassVar = {"replica": 3}

    def reducer(self, parameters: Sequence[nn.Parameter], mesh: Mesh, net: Net) -> Reducer:
        return BucketReducer(parameters, shared(net, mesh.replica), 64)


@pytest.mark.capability("A11")
class TestSharedMemoryShardedReducer(ReducerContract):
    degrees: ClassVar = {"replica": 2, "shard": 2}

    def reducer(self, parameters: Sequence[nn.Parameter], mesh: Mesh, net: Net) -> Reducer:
        wires = shared(net, mesh.axes["shard"]), shared(net, mesh.replica)
        return sharded(parameters, mesh, net, *wires)
