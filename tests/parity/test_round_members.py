"""Replicas that train alone between meetings leave a round and join the next one: the deltas that count are
those of the members, as in a plain loop in one process."""

from __future__ import annotations

import os
import signal
from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch import Tensor

from paceline.errors import CommunicationError
from paceline.job.cluster import Cluster
from paceline.session.membership_change import change_members, join_as_member, prepare_new_member
from paceline.session.session import Session
from paceline.sync import DiLoCo
from paceline.testing import run_ranks
from tests.parity.local_sgd_reference import LocalPlan, Meeting, train_local
from tests.parity.test_local_sgd import (
    RULES,
    SHARDS,
    SIZE,
    STEPS,
    adamw,
    model,
    own_recipe,
    own_task,
    samples,
    session,
)

ROUND = 3  # steps; the run has rounds of 3, 3 and 2 steps
TWO: Meeting = [(0, 0, 2), (1, 1, 2)]
THREE: Meeting = [(0, 0, 3), (1, 1, 3), (2, 2, 3)]


def until(one: Session, step: int = STEPS) -> None:
    for _ in one.rounds():
        if one.state.step >= step:
            return


def end_of(one: Session) -> dict[str, Tensor]:
    found = {n.removeprefix("model/"): t.clone() for n, t in one.state.tensors().items() if "model/" in n}
    one.close()
    one.cluster.disconnect()
    return found


def expected(sync: str, meetings: list[Meeting], replicas: int) -> dict[str, Tensor]:
    plan = LocalPlan(replicas, ROUND, SIZE, SHARDS, STEPS, *RULES[sync])
    return train_local(model(), samples(), plan, adamw, meetings)


def largest_difference(found: dict[str, Tensor], right: dict[str, Tensor]) -> float:
    return max(float((found[n] - t).abs().max()) for n, t in right.items())


def killed(cluster: Cluster, sync: str, number: int) -> Any:
    """One replica is killed in the second step of the second round."""
    one = session(cluster, sync, "adamw")
    until(one, ROUND)
    if cluster.global_rank == number:
        steps = iter(range(SHARDS))
        parameter = next(iter(one.runner.sharded_model.model.parameters()))
        parameter.register_hook(lambda gradient: next(steps, None) or os.kill(os.getpid(), signal.SIGKILL))
    with pytest.raises(CommunicationError):
        until(one)
    change_members(one, 60.0, admits=False)
    until(one)
    return end_of(one)


@pytest.mark.capability("N8", clause="under local SGD and DiLoCo the peer leaves the round")
@pytest.mark.parametrize(("sync", "number"), [("local:3", 0), ("diloco:3", 1), ("diloco:3", 2)])
def test_a_round_ends_without_the_replica_that_was_killed_in_it(sync: str, number: int) -> None:
    options: dict[str, Any] = {"group_deadline": 60.0, "may_die": (number,)}
    found = [one for one in run_ranks(killed, 3, sync, number, **options) if one is not None]
    left = [one for one in THREE if one[0] != number]
    later = [(name, share, 2) for share, (name, *_) in enumerate(left)]
    right = expected(sync, [THREE, left, later], 3)
    assert [largest_difference(one, right) < 1e-12 for one in found] == [True, True]
    whole = expected(sync, [THREE, THREE, later], 3)
    assert largest_difference(found[0], whole) > 1e-6, "its delta would be seen"


def ahead(cluster: Cluster) -> Any:
    """Rank 2 leaves after a round and rank 1 notices it at once, while rank 0 trains the next round."""
    one = session(cluster, "diloco:3", "adamw")
    until(one, ROUND)
    if cluster.global_rank == 2:
        one.close()
        one.cluster.disconnect()
        return None
    if cluster.global_rank == 0:
        with pytest.raises(CommunicationError):
            until(one)
    change_members(one, 60.0, admits=False)
    until(one)
    return end_of(one)


@pytest.mark.capability("N8", clause="under local SGD and DiLoCo the peer leaves the round")
def test_a_replica_that_has_not_begun_the_round_keeps_its_old_share() -> None:
    found = run_ranks(ahead, 3, group_deadline=60.0)
    right = expected("diloco:3", [THREE, THREE[:2], TWO], 3)
    assert [largest_difference(one, right) < 1e-12 for one in found[:2]] == [True, True]


def behind(cluster: Cluster) -> Any:
    """The sum of the second round ends on rank 0, and rank 1 sees it fail."""
    one = session(cluster, "diloco:3", "adamw")
    until(one, ROUND)
    if cluster.global_rank == 1:
        assert isinstance(one.rule, DiLoCo)
        finish = one.rule.reducer.finish

        def fail() -> Any:
            finish()
            raise CommunicationError("the connection was lost", next_step="nothing")

        with patch.object(one.rule.reducer, "finish", fail), pytest.raises(CommunicationError):
            until(one)
    else:
        until(one, 2 * ROUND)
    change_members(one, 60.0, admits=False)
    assert one.state.step == 2 * ROUND
    until(one)
    return end_of(one)


@pytest.mark.capability("N8", clause="under local SGD and DiLoCo the peer leaves the round")
def test_a_replica_that_missed_the_end_of_a_round_takes_the_state_of_another() -> None:
    found = run_ranks(behind, 2, group_deadline=60.0)
    # Replica 9 stands for replica 1 with the optimizer of replica 0.
    right = expected("diloco:3", [TWO, TWO, [(0, 0, 2), (9, 1, 2)]], 2)
    assert [largest_difference(one, right) < 1e-12 for one in found] == [True, True]


def joins(cluster: Cluster) -> Any:
    """Rank 2 is no member at first, and joins after the first round."""
    if cluster.global_rank == 2:
        cluster.disconnect()
        recipe = own_recipe("diloco:3")
        one = prepare_new_member(recipe, own_task("adamw"), torch.device("cpu"), lambda text: None)
        join_as_member(one, cluster)
    else:
        one = session(cluster.renew(60.0), "diloco:3", "adamw")
        until(one, ROUND)
        while not one.cluster.connected.store.check(["joining"]):
            pass
        change_members(one, 60.0)
    assert one.state.step == ROUND
    until(one)
    return end_of(one)


@pytest.mark.capability("N8", clause="under local SGD and DiLoCo the peer leaves the round")
def test_a_replica_that_joins_takes_its_share_of_the_next_round() -> None:
    found = run_ranks(joins, 3, group_deadline=60.0)
    right = expected("diloco:3", [TWO, THREE, THREE], 2)
    assert [largest_difference(one, right) < 1e-12 for one in found] == [True] * 3
