"""Replicas that train alone, and of which the slow has less to do: what is exact, in real jobs."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import Any

import pytest

from paceline.data import LockstepWork
from paceline.errors import CommunicationError
from paceline.job.cluster import Cluster
from paceline.recipe import Recipe, Strategy
from paceline.sync.work_assignment import SpeedAssignment
from paceline.testing import run_ranks
from paceline.testing.contracts import RuleContract
from paceline.testing.parity import Trajectory, build_test_session, make_task, run_oracle, whole_trajectory
from tests.parity.test_work_assignment import Slow
from tests.parity.virtual_clock import own_clock

pytestmark = pytest.mark.timeout(240)
STEPS, TURN = 28, 13


def digits(strategy: str, **changes: Any) -> Recipe:
    settings: dict[str, Any] = {
        "task": "digits",
        "options": {"model": "mlp", "hidden": [32]},
        "steps": STEPS,
        "batch": {"size": 48, "shards": 12},
        "optimizer": {"name": "sgd", "lr": 0.1, "momentum": 0.5},
        "strategy": Strategy.parse(strategy),
    }
    return Recipe(**(settings | changes))


def slowed(cluster: Cluster, strategy: str, factor: float = 5.0, **changes: Any) -> dict[str, Any]:
    """First rank 1 is slow, then rank 0, by a clock of their own."""
    recipe = digits(strategy, **changes)
    task = make_task(recipe)
    data = Slow(task.data, own_clock())
    data.seconds = 0.002 * (factor if cluster.global_rank == 1 else 1.0)
    session = build_test_session(cluster, recipe, lambda: replace(task, data=data))
    losses = []
    for stats in session.rounds():
        losses.append(stats.loss)
        if stats.step >= TURN:
            data.seconds = 0.002 * (factor if cluster.global_rank == 0 else 1.0)
    notes = [*session.events.take()]
    end = whole_trajectory(losses, session)
    session.close()
    return {
        "shares": [(record["step"], record["shares"]) for name, record in notes if name == "shares"],
        "samples": [record for name, record in notes if name == "samples"][-1:],
        "end": end,
    }


def require_followed(found: list[dict[str, Any]], samples: int) -> None:
    """First rank 1 has fewest shards, in the end rank 0; all say the same; no sample is lost."""
    for rank in found:
        assert rank["shares"] == found[0]["shares"]
        assert rank["samples"] == [{"step": STEPS, "taken": samples, "applied": samples, "dropped": 0}]
        assert rank["end"].distance(found[0]["end"]) == 0.0
    (first, before), *_, (last, after) = found[0]["shares"]
    assert first <= TURN < last
    assert before[1] < 12 // len(before) and after[0] < 12 // len(after)
    assert all(sum(shares) == 12 for _, shares in found[0]["shares"])


@pytest.mark.capability("I2", "A13", clause="a rank that is slow has less to do, without a server")
@pytest.mark.parametrize("sync", ["hogwild:2", "gossip:2"])
@pytest.mark.parametrize("optimizer", ["sgd", "adamw"])
def test_shares_follow_the_speed_on_all_ranks_alike(sync: str, optimizer: str) -> None:
    run = partial(slowed, strategy=f"sync={sync} balance=speed", optimizer={"name": optimizer, "lr": 1e-3})
    require_followed(run_ranks(run, 3), STEPS * 48)


@pytest.mark.capability("I2", "A13", clause="the gradient of the whole batch, without a server")
def test_two_that_wait_for_each_other_are_every_step_whatever_their_shares() -> None:
    """The gradient is that of the whole batch: SGD with momentum over unequal shares that change."""
    found = run_ranks(slowed, 2, "sync=gossip:0 balance=speed")
    require_followed(found, STEPS * 48)
    assert found[0]["end"].distance(run_oracle(digits("replicas=1"), STEPS)) < 1e-5


def unweighted(cluster: Cluster) -> dict[str, Any]:
    setattr(SpeedAssignment, "weight", 1.0)  # noqa: B010
    return slowed(cluster, "sync=gossip:0 balance=speed")


def test_with_another_weight_they_would_not_be() -> None:
    """The twin."""
    found = run_ranks(unweighted, 2)
    assert found[0]["end"].distance(run_oracle(digits("replicas=1"), STEPS)) > 1e-3


class Greedy(LockstepWork):
    """The fault: rank 0 runs the first shard of rank 1 too."""

    def _block(self) -> range:
        block = super()._block()
        return range(block.start, block.stop + (self.replica_rank == 0))


def greedy(cluster: Cluster) -> None:
    session = build_test_session(cluster, digits("sync=gossip:0 balance=speed"))
    work = session.feed.work
    assert isinstance(work, LockstepWork)
    work = Greedy(work.order, work.shards, work.seed, work.replica_rank, 2)
    session.parts.feed = replace(session.feed, work=work)
    with pytest.raises(CommunicationError, match=r"the ranks ran \d+ samples, not 48"):
        list(session.rounds())
    session.close()


def test_a_shard_that_is_run_twice_is_an_error_at_the_end_of_the_round() -> None:
    run_ranks(greedy, 2)


@pytest.mark.capability("I2", "A13", clause="equal speeds are equal parts")
def test_at_one_speed_the_bits_are_those_of_even_shares() -> None:
    def run(cluster: Cluster, balance: str) -> tuple[Trajectory, list[Any]]:
        found = slowed(cluster, f"sync=gossip:0 balance={balance}", factor=1.0)
        return found["end"], found["shares"]

    for even, dealt in zip(run_ranks(run, 2, "even"), run_ranks(run, 2, "speed"), strict=True):
        assert dealt[1] == [] and dealt[0].distance(even[0]) == 0.0


@pytest.mark.capability("I2", "Z1")
class TestGossipBySpeed(RuleContract):
    strategy, num_ranks = "replicas=2 sync=gossip:0 balance=speed", 2
    deterministic = False  # shares follow real seconds, and with them the order of additions
