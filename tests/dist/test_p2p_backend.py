"""Stages send each other tensors over a backend that knows no tags, each way over a group of its own."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from paceline.comm import Handle, Net
from paceline.job.cluster import Cluster
from paceline.job.mesh import Mesh, RankGroup, duplicate_group
from paceline.parallel.pipeline import NetTransport
from paceline.testing import run_ranks


class Untagged(Net):
    """As NCCL sends: in the order of the calls, whatever their tags."""

    def __init__(self) -> None:
        super().__init__()
        self.ways: list[tuple[str, int]] = []

    def send(self, x: Tensor, group: RankGroup, to: int, tag: int = 0) -> Handle:
        self.ways.append((group.name, to))
        return super().send(x, group, to)

    def receive(self, x: Tensor, group: RankGroup, source: int, tag: int = 0) -> Handle:
        return super().receive(x, group, source)


def exchange(cluster: Cluster) -> tuple[list[Any], set[tuple[str, int]]]:
    net, ahead = Untagged(), Mesh.build(cluster, {"pipeline": 2}).axes["pipeline"]
    wire, other = (
        NetTransport(ahead, net, torch.device("cpu"), duplicate_group(ahead, "back")),
        1 - ahead.rank,
    )
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


MESSAGES: list[list[Tensor]] = [
    [torch.arange(12.0).view(3, 4)],
    [torch.arange(12.0).view(3, 4) + 1],  # as long as the one before
    [torch.arange(6.0)],  # shorter
    [torch.arange(500.0), torch.tensor(7), torch.ones(0), torch.tensor([True, False, True])],
    [torch.arange(400.0).to(torch.bfloat16), torch.arange(3.0).to(torch.complex128).conj()],
    [torch.full((k % 3, 2), float(k)) for k in range(30)],  # a description of more than 64 words
    [torch.arange(30_000.0).view(2, -1).T],  # more than one part may have
    [torch.arange(12.0).view(3, 4)],
]
# Of each, the first time. The last is as long as the first, and empty ones go unsent.
PARTS = [2, 1, 1, 4, 1, 22, 2, 2]


def converse(cluster: Cluster) -> tuple[list[list[Tensor]], list[float], int]:
    """What came of the messages of the other rank, three times over, and how many calls sent ours."""
    net, group = Untagged(), Mesh.build(cluster, {"pipeline": 2}).axes["pipeline"]
    wire, other = NetTransport(group, net, torch.device("cpu")), 1 - group.rank
    found, notes = [], []
    for times in range(3):
        for number, tensors in enumerate(MESSAGES):
            wire.send(other, tensors, times + 0.25, key=number)
        for number in reversed(range(len(MESSAGES))):
            tensors, note = wire.receive(other, key=number)
            found.append([t.clone() for t in tensors])
            notes.append(note)
    wire.flush()
    net.barrier(group)
    return found, notes, len(net.ways)


@pytest.mark.capability("D1")
def test_messages_of_any_length_arrive_whole_whatever_came_before() -> None:
    for found, notes, calls in run_ranks(converse, 2):
        assert notes == [0.25] * 8 + [1.25] * 8 + [2.25] * 8
        for tensors, sent in zip(found, [*reversed(MESSAGES)] * 3, strict=True):
            assert [(t.dtype, t.shape) for t in tensors] == [(t.dtype, t.shape) for t in sent]
            assert all(torch.equal(a, b) for a, b in zip(tensors, sent, strict=True))
        assert calls == sum(PARTS) + 2 * sum([1, *PARTS[1:]])
