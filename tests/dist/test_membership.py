"""Members of a job leave, die and join; the others go on in the same processes."""

from __future__ import annotations

import os
import signal
import time
from typing import Any

import pytest
import torch
import torch.distributed as dist

from paceline.comm import Net
from paceline.errors import CommunicationError, DeadlineError
from paceline.job.cluster import Cluster
from paceline.job.epochs import choose_members
from paceline.job.mesh import Mesh
from paceline.testing import run_ranks

LONG = 120.0


def total(cluster: Cluster, axis: str = "replica", **degrees: int) -> float:
    """The sum of 10 to the power of each process's number, over an axis of a mesh."""
    mesh = Mesh.build(cluster, degrees or {"replica": cluster.world_size})
    mine = torch.tensor([10.0**cluster.connected.number], dtype=torch.float64)
    return float(Net(LONG).all_reduce(mine, mesh.axes[axis]).wait())


@pytest.mark.parametrize(
    ("members", "present", "joining", "lost", "expected"),
    [
        ((0, 1, 2), {0, 1, 2}, [], set(), [0, 1, 2]),
        ((0, 1, 2), {0, 2}, [], {1}, [0, 2]),
        ((0, 2), {0, 2}, [7, 5], set(), [0, 2, 5, 7]),
        ((0, 2), {2}, [5, 5], {0}, [2, 5]),
        ((0, 5), {0, 5}, [5, 6], {6}, [0, 5]),
    ],
)
def test_those_that_go_on_keep_their_order_and_new_ones_come_after_them(
    members: tuple[int, ...], present: set[int], joining: list[int], lost: set[int], expected: list[int]
) -> None:
    assert choose_members(members, present, joining, lost) == expected


@pytest.mark.capability("Z1")
@pytest.mark.parametrize("leaver", [0, 1, 3])
def test_a_rank_leaves_and_the_others_make_new_groups_in_the_same_processes(leaver: int) -> None:
    """Also rank 0: the store is the launcher's. Groups of one axis are of three, then of two ranks."""

    def go_on(cluster: Cluster) -> list[Any]:
        found = [total(cluster, "shard", replica=2, shard=2)]
        if cluster.global_rank == leaver:
            cluster.disconnect()
            return found
        after = cluster.renew(LONG)
        found += [total(after), (after.global_rank, after.world_size, after.local_rank, after.num_nodes)]
        everywhere = torch.ones(1)
        dist.all_reduce(everywhere)  # torch's own default group is that of the new membership
        found += [everywhere.item(), after.connected.epoch, os.getpid()]
        after.disconnect()
        return found

    results = run_ranks(go_on, 4)
    stayed = [number for number in range(4) if number != leaver]
    assert [found[0] for found in results] == [11, 11, 1100, 1100]
    for rank, number in enumerate(stayed):
        numbers = sum(10**one for one in stayed)
        assert results[number][1:5] == [numbers, (rank, 3, rank, 1), 3.0, 1]


@pytest.mark.capability("Z1")
def test_a_killed_rank_is_noticed_by_all_in_the_middle_of_a_collective_and_the_others_go_on() -> None:
    """Ranks 1 and 2 wait for each other in an axis that the dead rank is not in: the abort wakes them."""

    def go_on(cluster: Cluster) -> list[Any]:
        net, mesh = Net(LONG), Mesh.build(cluster, {"replica": 3})
        net.all_reduce(torch.ones(4), mesh.replica).wait()
        if cluster.global_rank == 0:
            os.kill(os.getpid(), signal.SIGKILL)
        with pytest.raises(CommunicationError):
            for _ in range(1000):
                net.all_reduce(torch.ones(4), mesh.replica).wait()
        after = cluster.renew(LONG)
        found = [total(after), after.global_rank]
        after.disconnect()
        return found

    assert run_ranks(go_on, 3, may_die=(0,)) == [None, [110, 0], [110, 1]]


def test_an_abort_ends_a_wait_on_both_sides_at_once() -> None:
    """Rank 1 never calls, and its abort is what rank 0 hears; no deadline is near."""

    def stuck(cluster: Cluster) -> bool:
        group = Mesh.build(cluster, {"replica": 2}).replica
        if cluster.global_rank == 1:
            time.sleep(0.2)
            cluster.abort()
            return True
        with pytest.raises(CommunicationError) as caught:
            Net(LONG).all_reduce(torch.ones(4), group).wait()
        return not isinstance(caught.value, DeadlineError)

    assert run_ranks(stuck, 2) == [True, True]


@pytest.mark.capability("Z1")
def test_a_process_joins_and_is_the_last_rank() -> None:
    def take_in(cluster: Cluster) -> list[Any]:
        if cluster.global_rank == 2:
            cluster.disconnect()  # and comes again, as a process that has not been there
            after = cluster.join("cpu", LONG)
        else:
            after = cluster.renew(LONG)  # without the one that has left
            assert after.world_size == 2
            while 2 not in asked(after):
                time.sleep(0.01)
            after = after.renew(LONG)
        found = [total(after), after.global_rank, after.connected.members]
        after.disconnect()
        return found

    assert run_ranks(take_in, 3) == [[111, rank, (0, 1, 2)] for rank in range(3)]


def test_who_is_silent_until_the_deadline_is_left_out_and_told_so() -> None:
    def sleep(cluster: Cluster) -> Any:
        if cluster.global_rank == 1:
            while not cluster.connected.store.check(["others went on"]):
                time.sleep(0.01)
            with pytest.raises(CommunicationError) as caught:
                cluster.renew(LONG)
            return caught.value.what
        after = cluster.renew(0.3)
        after.connected.store.set("others went on", "1")
        found = after.world_size
        after.disconnect()
        return found

    first, second = run_ranks(sleep, 2)
    assert first == 1 and "have continued without this one" in second


def test_a_rank_that_ends_while_a_group_is_made_is_named_at_once() -> None:
    def make(cluster: Cluster) -> str:
        if cluster.global_rank == 2:
            os.kill(os.getpid(), signal.SIGKILL)
        with pytest.raises(CommunicationError) as caught:
            cluster.connected.groups.make("shard", (0, 1, 2))
        return caught.value.what

    found = run_ranks(make, 3, may_die=(2,))
    assert found[0] == found[1] == "rank 2 left while the group 'shard' of ranks (0, 1, 2) was created"


def test_a_rank_that_does_not_come_while_a_group_is_made_is_named_at_the_deadline() -> None:
    def make(cluster: Cluster) -> str:
        if cluster.global_rank == 1:
            return ""
        cluster.connected.groups.seconds = 0.5  # the ranks have met by now, which may take longer
        with pytest.raises(DeadlineError) as caught:
            cluster.connected.groups.make("shard", (0, 1))
        return caught.value.what

    assert run_ranks(make, 2)[0] == (
        "rank 1 did not come in time while the group 'shard' of ranks (0, 1) was created"
    )


def test_nobody_else_takes_part_in_making_a_group() -> None:
    """The ranks of the other group make theirs only when this one has been used."""

    def make(cluster: Cluster) -> float:
        store, rank = cluster.connected.store, cluster.global_rank
        mine = (0, 1) if rank < 2 else (2, 3)
        if rank in (2, 3):
            store.wait_for_keys(["the first group is done"], LONG)
        handle = cluster.connected.groups.make("shard", mine).handle
        found = torch.tensor([10.0**rank])
        handle.allreduce(found).wait()
        if rank == 0:
            store.set("the first group is done", "1")
        return found.item()

    assert run_ranks(make, 4) == [11, 11, 1100, 1100]


def asked(cluster: Cluster) -> list[int]:
    """Who has asked to join."""
    store = cluster.connected.store
    return (
        [int(one) for one in store.get("joining").decode().split(",") if one]
        if store.check(["joining"])
        else []
    )
