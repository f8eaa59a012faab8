"""A rank that is missing or gone: the others say so by name, before the deadline of the run."""

import os
import signal
import time
from collections.abc import Callable

import pytest
import torch

from paceline.comm import Net
from paceline.errors import DeadlineError
from paceline.job.mesh import Mesh, RankGroup
from paceline.testing import RanksFailed, run_ranks
from tests.marks import soak_param

OPS: dict[str, Callable[[Net, RankGroup], object]] = {
    "all_reduce": lambda net, group: net.all_reduce(torch.ones(1000), group).wait(),
    "all_gather": lambda net, group: net.all_gather(torch.ones(1000), group).wait(),
    "reduce_scatter": lambda net, group: net.reduce_scatter(torch.ones(6, 2), group).wait(),
    "barrier": lambda net, group: net.barrier(group),
}


def failing(function: Callable[..., object], world: int, *args: object, **limits: float) -> RanksFailed:
    with pytest.raises(RanksFailed) as caught:
        run_ranks(function, world, *args, **limits)
    return caught.value


@pytest.mark.parametrize("op", [soak_param(op) if op in ("barrier", "all_gather") else op for op in OPS])
def test_a_rank_that_does_not_call_is_missed_by_operation_rank_and_step(op: str) -> None:
    def skip_on_rank_one(cluster, call: Callable[[Net, RankGroup], object]) -> None:
        group = Mesh.build(cluster, {"replica": 2}).replica
        net = Net(deadline_seconds=0.5)
        net.step = 41
        if group.rank == 1:
            time.sleep(600.0)
        call(net, group)

    failures = failing(skip_on_rank_one, 2, OPS[op], deadline=60.0)
    text = failures.of(0).details
    assert DeadlineError.__name__ in text
    assert f"{op} did not finish within 0.5 s" in text
    assert "rank 0" in text
    assert "step 41" in text
    assert failures.of(1).kind == "stopped"  # and the one that hangs is shown where it hangs
    assert "time.sleep(600.0)" in failures.of(1).details or "skip_on_rank_one" in failures.of(1).headline


@pytest.mark.parametrize("net_seconds, group_seconds", [(2.0, 2.0), (0.3, 60.0)])
def test_our_own_deadline_comes_before_that_of_the_group(net_seconds: float, group_seconds: float) -> None:
    """The backend has one as well, and its error names no rank."""

    def wait_for_nobody(cluster) -> None:
        world = Mesh.build(cluster, {"replica": 2}).world  # the ranks have met, which may take longer
        cluster.connected.groups.seconds = group_seconds
        group = world.subgroup("replica", (0, 1))
        if group.rank == 1:
            time.sleep(600.0)
        Net(deadline_seconds=net_seconds).all_reduce(torch.ones(4), group).wait()

    failure = failing(wait_for_nobody, 2, deadline=60.0).of(0)
    assert failure.kind == "connection"
    assert DeadlineError.__name__ in failure.details


@pytest.mark.parametrize("death", ["killed", "exited"])
def test_a_dead_peer_is_noticed_at_once_and_not_at_the_deadline(death: str) -> None:
    def die_on_rank_two(cluster) -> None:
        group = Mesh.build(cluster, {"replica": 3}).replica
        net = Net(deadline_seconds=60.0)
        for net.step in range(100):
            if (group.rank, net.step) == (2, 3):
                os.kill(os.getpid(), signal.SIGKILL) if death == "killed" else os._exit(7)
            net.all_reduce(torch.ones(100_000), group).wait()

    failures = failing(die_on_rank_two, 3, deadline=55.0)
    assert failures.failures[0].global_rank == 2
    for rank in (0, 1):
        text = failures.of(rank).details
        assert failures.of(rank).kind == "connection"
        assert "CommunicationError: all_reduce failed" in text
        assert f"rank {rank}, all_reduce over group 'replica' (0, 1, 2), step 3" in text
