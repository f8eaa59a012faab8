"""Process groups of a session end after it, and none ends that another rank still uses."""

from __future__ import annotations

import gc
import time
from pathlib import Path
from typing import Any, cast

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import TensorDataset

from paceline.comm import Net
from paceline.errors import CommunicationError
from paceline.job.cluster import Cluster
from paceline.job.membership import GroupLease, MembershipGroups
from paceline.job.mesh import Mesh, duplicate_group
from paceline.job.process_group import OwnedProcessGroup
from paceline.job.torch_store import Store
from paceline.recipe import Recipe
from paceline.session import build_session
from paceline.task import Loss, Task
from paceline.testing import run_ranks
from paceline.testing.parity import CPU
from tests.marks import soak_param

LONG = 120.0
SESSIONS = 6
GRID = {"replica": 2, "shard": 2}


def squared_error(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Loss:
    x, y = batch
    return Loss((model(x) - y).square().sum(), len(x))


def train(cluster: Cluster, words: str) -> bytes:
    """The bits of the whole model after three steps of a session of its own."""
    torch.manual_seed(3)
    x = torch.randn(48, 6, generator=torch.Generator().manual_seed(1))
    task = Task(nn.Sequential(nn.Linear(6, 8), nn.Linear(8, 2)), TensorDataset(x, x[:, :2]), squared_error)
    recipe = Recipe(
        task="given",
        steps=3,
        strategy=words,
        batch={"size": 12, "shards": 4},
        optimizer={"name": "adamw", "lr": 0.01},
        runtime={"device": "cpu", "deadline_seconds": LONG},
    )
    session = build_session(recipe, task, cluster, CPU, warn=lambda _: None)
    list(session.rounds())
    tensors = session.snapshot().tensors()
    bits = b"".join(x.numpy().tobytes() for name, x in sorted(tensors.items()) if name.startswith("model/"))
    session.close()
    return bits


def count_threads() -> int:
    """Of this process."""
    return len([*Path("/proc/self/task").iterdir()])


@pytest.mark.timeout(400)
@pytest.mark.capability("N5", clause="sessions that follow each other leave no process groups")
@pytest.mark.parametrize(
    "words",
    [
        soak_param("replicas=2 shard=2 zero=2"),
        "replicas=2 shard=2 zero=1 sync=local:2",
        soak_param("replicas=2 pipeline=2"),
    ],
)
def test_sessions_that_follow_each_other_have_as_many_threads_as_one(words: str) -> None:
    """The groups of one are ended when the next begins. Every session has the bits of the first."""

    def sessions(cluster: Cluster) -> tuple[set[bytes], int, int]:
        found = {train(cluster, words)}
        one = count_threads()
        for _ in range(SESSIONS):
            found.add(train(cluster, words))
        gc.collect()
        expires = time.monotonic() + LONG
        while count_threads() > one and time.monotonic() < expires:
            time.sleep(0.05)
        return found, one, count_threads()

    for bits, one, many in run_ranks(sessions, 4, deadline=360.0):
        assert len(bits) == 1
        assert many <= one, "sessions leave threads"


@pytest.mark.timeout(240)
def test_a_group_goes_on_until_all_its_ranks_have_given_it_back() -> None:
    """Rank 0 sends, gives its groups back and makes others; what it has sent arrives at rank 1 afterwards."""

    def late(cluster: Cluster) -> float:
        store, net = cluster.connected.store, Net(LONG)
        mesh = Mesh.build(cluster, {"replica": 2})
        own, found = duplicate_group(mesh.replica, "own"), torch.zeros(1)
        if cluster.global_rank == 0:
            sent = net.send(torch.tensor([7.0]), own, to=1)  # on its way as long as this is held
            mesh.give_back()
        for _ in range(2):
            Mesh.build(cluster, {"replica": 2})
        store.set(f"others are made/{cluster.global_rank}", "1")
        store.wait_for_keys([f"others are made/{rank}" for rank in (0, 1)], LONG)
        if cluster.global_rank == 1:
            net.receive(found, own, source=0).wait()
            mesh.give_back()
            store.set("it has come", "1")
        else:
            store.wait_for_keys(["it has come"], LONG)
            sent.wait()
        return found.item()

    assert run_ranks(late, 2) == [0.0, 7.0]


class Silent:
    """A store behind a link that is gone: whoever asks it waits for an answer."""

    def __getattr__(self, name: str) -> Any:
        raise AssertionError(f"{name} would wait")


def test_who_gives_groups_back_asks_nobody() -> None:
    """A session is closed where its job has failed, too."""
    groups = MembershipGroups(cast(Store, Silent()), "epoch 0", (0, 1), 0, CPU, LONG)
    lease = GroupLease(groups, "lease 1")
    lease.created.append(OwnedProcessGroup("a group"))
    lease.give_back()
    with pytest.raises(AssertionError, match="set would wait"):
        groups.lease()


@pytest.mark.timeout(240)
def test_what_uses_a_group_that_has_ended_is_told_so() -> None:
    """It is no copy, as on a group of one rank: that would be a silent other answer."""

    def stray(cluster: Cluster) -> list[Any]:
        mesh, net = Mesh.build(cluster, GRID), Net(LONG)
        found = [net.all_reduce(torch.ones(1), mesh.axes["shard"]).wait().item()]
        mesh.give_back()
        Mesh.build(cluster, GRID)
        net.barrier(mesh.world)  # the group of all stays; all have begun their next lease
        Mesh.build(cluster, GRID).give_back()
        mesh.give_back()  # a second time, and late
        Mesh.build(cluster, GRID)
        with pytest.raises(CommunicationError, match="has ended with the session"):
            net.all_reduce(torch.ones(1), mesh.axes["shard"])
        return found

    assert run_ranks(stray, 4) == [[2.0]] * 4
