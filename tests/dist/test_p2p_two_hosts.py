"""Stages on two hosts: messages lie in memory between those of one host, and a backend carries the others."""

from __future__ import annotations

import os
import signal
from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch import Tensor

from paceline.comm import Handle, Net
from paceline.comm.routes import HostMessenger, connect_ranks_of_host, connect_single_host_group, host_links
from paceline.errors import CommunicationError, DeadlineError
from paceline.job.cluster import Cluster
from paceline.job.mesh import Mesh, RankGroup, duplicate_group
from paceline.parallel.pipeline import HostMemoryTransport, MultiHostTransport, NetTransport
from paceline.testing import run_ranks

STAGES, ON_A_HOST = 4, 2
SIZES = (3, 5000, 40_000, 0)  # values; the third takes more than one part by a backend


class Heard(Net):
    """Notes to whom the backend carries something."""

    def __init__(self) -> None:
        super().__init__(60.0)
        self.carried, self.num_sent = set[int](), 0

    def send(self, x: Tensor, group: RankGroup, to: int, tag: int = 0) -> Handle:
        self.carried.add(to)
        self.num_sent += 1
        return super().send(x, group, to, tag)


class Careless(MultiHostTransport):
    """Gives up what lies in memory only: the mutation."""

    def abort(self) -> None:
        self._near.abort()


def start(
    cluster: Cluster, net: Net, kind: type[MultiHostTransport] = MultiHostTransport
) -> tuple[MultiHostTransport, HostMemoryTransport, RankGroup]:
    """Ranks 0 and 1 are on one host, 2 and 3 on another."""
    whole = Mesh.build(cluster, {"pipeline": STAGES}).axes["pipeline"]
    group = duplicate_group(whole, kind.__name__)  # nothing is on its way that another wire has left
    with patch.object(host_links, "host_id", lambda: f"host {group.rank // ON_A_HOST}"):
        links = connect_ranks_of_host(group, net)
        assert links is not None and connect_single_host_group(group, net) is None
    near = HostMemoryTransport(HostMessenger(net, group, links))
    return kind(near, NetTransport(group, net, torch.device("cpu"))), near, group


def values(source: int, to: int, number: int) -> Tensor:
    """What one stage sends another."""
    return torch.arange(SIZES[number] + 0.0) + 1000 * source + 100 * to


def converse(cluster: Cluster) -> dict[str, Any]:
    """Each sends to all before any is asked for, and asks in another order; then one attempt is given up."""
    net = Heard()
    wire, near, group = start(cluster, net)
    others, found = [k for k in range(STAGES) if k != group.rank], dict[str, Any](arrived=[])
    for _ in range(2):
        wire.await_messages({other: len(SIZES) for other in others})
        for other in others:
            for number in range(len(SIZES)):
                wire.send(other, [values(group.rank, other, number)], number + 0.5, key=number)
        for other in reversed(others):
            for number in reversed(range(len(SIZES))):
                (x,), note = wire.receive(other, key=number)
                found["arrived"].append(
                    note == number + 0.5 and torch.equal(x, values(other, group.rank, number))
                )
        wire.flush()
    found["sent"] = wire.num_sent - net.num_sent  # which a full pipeline lets go of by number
    found |= {"carried": net.carried, "near": near.stages, "given up": given_up(wire, others, net, group)}
    near.close()
    return found


def given_up(wire: MultiHostTransport, others: list[int], net: Net, group: RankGroup) -> list[float]:
    """What arrives from the others after an attempt whose messages nobody has taken."""
    for other in others:
        wire.send(other, [torch.full((3,), -1.0)], key=1)
    net.barrier(group)
    wire.abort()
    for other in others:
        wire.send(other, [torch.full((3,), 1.0)], key=1)
    found = [float(wire.receive(other, key=1)[0][0][0]) for other in others]
    net.barrier(group)
    return found


def careless(cluster: Cluster) -> list[float]:
    net = Net(60.0)
    wire, near, group = start(cluster, net, Careless)
    found = given_up(wire, [k for k in range(STAGES) if k != group.rank], net, group)
    near.close()
    return found


@pytest.mark.capability("D1", "G14")
def test_messages_inside_a_host_lie_in_memory_and_the_others_go_by_the_backend() -> None:
    """The twin gives an attempt up in memory only: what it left is taken for something new."""

    def talk(cluster: Cluster) -> dict[str, Any]:
        return converse(cluster) | {"careless": careless(cluster)}

    for rank, found in enumerate(run_ranks(talk, STAGES)):
        beside = rank ^ 1
        assert len(found["arrived"]) == 2 * 3 * len(SIZES) and all(found["arrived"])
        assert found["near"] == {beside} and found["sent"] == 2 * len(SIZES)
        assert found["carried"] == {*range(STAGES)} - {rank, beside}
        assert found["given up"] == [1.0] * 3
        assert sorted(found["careless"]) == [-1.0, -1.0, 1.0]


def waiting(cluster: Cluster) -> list[str]:
    """What those say that wait for stage 1: 0 in memory and 3 by the backend, 0 and 2 once it is killed."""
    net = Net(60.0)
    wire, near, group = start(cluster, net)
    net.step, said = 7, list[str]()
    if group.rank == 1:
        for other in (0, 2):
            wire.receive(other)
        os.kill(os.getpid(), signal.SIGKILL)
    if group.rank in (0, 3):
        net.deadline_seconds = 0.5
        with pytest.raises(DeadlineError) as late:
            wire.receive(1)
        net.deadline_seconds = 60.0
        said.append(str(late.value))
    if group.rank == 3:
        wire.send(2, [torch.ones(3)])
        wire.flush()
    if group.rank == 2:
        wire.receive(3)
    if group.rank in (0, 2):
        wire.send(1, [torch.ones(3)])
        with pytest.raises(CommunicationError) as lost:
            wire.receive(1)
        said.append(str(lost.value))
    near.close()
    return said


@pytest.mark.capability("D1")
def test_a_late_and_a_lost_stage_are_named_in_memory_and_by_the_backend() -> None:
    beside, _, across, beyond = run_ranks(waiting, STAGES, may_die=[1])
    assert "ranks [1] sent no message within 0.5 s" in beside[0]
    assert "receive from rank 1 did not finish within 0.5 s" in beyond[0]
    assert "rank 1 is gone" in beside[1]
    assert "receive from rank 1 failed" in across[0]
    for text in (*beside, *across, *beyond):
        assert "group 'pipeline-MultiHostTransport' (0, 1, 2, 3), step 7" in text
