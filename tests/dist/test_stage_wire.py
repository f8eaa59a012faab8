"""Stages send each other tensors over a backend that knows no tags, each way over a group of its own."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from paceline.cluster import Cluster
from paceline.comm import Handle, Net
from paceline.layout.pipeline import StageWire
from paceline.mesh import Group, Mesh, twin_group
from paceline.testing import run_ranks


class Untagged(Net):
    """As NCCL sends: in the order of the calls, whatever their tags."""

    def __init__(self) -> None:
        super().__init__()
        self.ways: list[tuple[str, int]] = []

    def send(self, x: Tensor, group: Group, to: int, tag: int = 0) -> Handle:
        self.ways.append((group.name, to))
        return super().send(x, group, to)

    def receive(self, x: Tensor, group: Group, source: int, tag: int = 0) -> Handle:
        return super().receive(x, group, source)


def exchange(cluster: Cluster) -> tuple[list[Any], set[tuple[str, int]]]:
    net, ahead = Untagged(), Mesh.build(cluster, {"pipeline": 2}).axes["pipeline"]
    wire, other = StageWire(ahead, net, torch.device("cpu"), twin_group(ahead, "back")), 1 - ahead.rank
    wire.send(other, [torch.full((2,), -1.0)], key=3)
    net.barrier(ahead)
    wire.abort()
    found: list[Any] = []
    for key in (3, 4):
        wire.send(other, [torch.full((key,), float(ahead.rank)), torch.ones(0)], 0.5, key=key)
    for key in (4, 3):
        tensors, note = wire.receive(other, key=key)
        found.append(([t.tolist() for t in tensors], note))
    wire.flush()
    net.barrier(ahead)
    return found, set(net.ways)


@pytest.mark.capability("D1")
def test_what_an_aborted_attempt_left_is_never_taken_for_something_new() -> None:
    for rank, (found, ways) in enumerate(run_ranks(exchange, 2)):
        other = float(1 - rank)
        assert found == [([[other] * 4, []], 0.5), ([[other] * 3, []], 0.5)]
        assert ways == {("pipeline" if rank == 0 else "pipeline-back", 1 - rank)}
