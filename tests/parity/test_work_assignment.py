"""`balance=speed`: a slow replica gets fewer shards and is named; the answer stays that of one process."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
from torch import nn

from paceline.data import LockstepWork, MicroBatchWork
from paceline.errors import CommunicationError, RecipeError
from paceline.job.cluster import Cluster
from paceline.recipe import Recipe
from paceline.sync.work_assignment import SpeedAssignment
from paceline.testing import run_ranks
from paceline.testing.contracts import RuleContract
from paceline.testing.parity import (
    Trajectory,
    build_test_session,
    make_task,
    run_oracle,
    trajectory_of,
    whole_trajectory,
)
from tests.parity.virtual_clock import Clock, own_clock
from tests.recipes import recipe_of

STEPS = 28
TURN = 15  # the step in which the other rank becomes the slow one


digits = partial(
    recipe_of,
    task="digits",
    options={"model": "convnet", "channels": 2, "dropout": 0.1},
    steps=STEPS,
    batch={"size": 22, "shards": 8},
    optimizer={"name": "adamw", "lr": 1e-3, "clip_norm": 0.5},
)


class Slow:
    """Samples that take their time on a rank while it is slow."""

    def __init__(self, data: Any, clock: Clock) -> None:
        self.data, self.seconds, self.clock = data, 0.0, clock

    def __len__(self) -> int:
        return len(self.data)

    def __getitem__(self, index: int) -> Any:
        self.clock.spend(self.seconds)
        return self.data[index]


def slowed(cluster: Cluster, steps: int = STEPS, deal: Any = None) -> tuple[Trajectory, list[Any]]:
    """First rank 1 is slow, then rank 0."""
    recipe = digits("replicas=2 balance=speed", steps=steps)
    task = make_task(recipe)
    data = Slow(task.data, own_clock())
    data.seconds = 0.01 if cluster.global_rank == 1 else 0.002
    session = build_test_session(cluster, recipe, lambda: replace(task, data=data))
    if deal is not None:
        session.rule._assign_shares = deal
    losses = []
    for stats in session.rounds():
        losses.append(stats.loss)
        if stats.step == TURN:
            data.seconds = 0.01 if cluster.global_rank == 0 else 0.002
    found = [(record["step"], record["shares"]) for name, record in session.events.take() if name == "shares"]
    return trajectory_of(losses, session), found


@pytest.mark.capability("A13", clause="the shares and the answer, not the time of a step")
def test_shares_follow_the_speed_and_the_answer_does_not() -> None:
    """Eight shards of unequal size, batch statistics, dropout, a clip; the slow rank changes in mid-run."""
    ends = run_ranks(slowed, 2)
    (right,) = run_ranks(lambda cluster: run_oracle(digits("replicas=1"), STEPS), 1)
    for end, shares in ends:
        assert end.distance(right) <= 2e-5
        assert max(abs(a - b) for a, b in zip(end.losses, right.losses, strict=True)) <= 1e-5
        assert shares == ends[0][1]
    (first, before), *_, (last, after) = ends[0][1]
    assert first <= TURN < last
    assert before[0] > 4 > before[1] and after[0] < 4 < after[1]
    assert all(sum(shares) == 8 for _, shares in ends[0][1])


class Greedy(LockstepWork):
    """The fault: rank 0 runs the last shard of rank 1 too."""

    def _block(self) -> range:
        block = super()._block()
        moved = self.shares is not None and self.shares != (4, 4) and self.replica_rank == 0
        return range(block.start, block.stop + 1) if moved else block


def greedy(work: Any, shares: Sequence[int]) -> MicroBatchWork:
    return Greedy(work.order, work.shards, work.seed, work.replica_rank, 2).dealt(shares)


def test_a_shard_that_is_run_twice_would_be_noticed() -> None:
    found = run_ranks(slowed, 2, 12, greedy)[0][0]
    (right,) = run_ranks(lambda cluster: run_oracle(digits("replicas=1"), 12), 1)
    assert found.distance(right) > 1e-3


def test_it_is_refused_where_bits_must_not_depend_on_ranks() -> None:
    with pytest.raises(RecipeError, match="expected balance=even with reproducible"):
        digits("replicas=2 balance=speed", reproducible=True)


STEPS_ALONE, TURN_ALONE = 28, 13


digits_alone = partial(
    recipe_of,
    task="digits",
    options={"model": "mlp", "hidden": [32]},
    steps=STEPS_ALONE,
    batch={"size": 48, "shards": 12},
    optimizer={"name": "sgd", "lr": 0.1, "momentum": 0.5},
)


def slowed_alone(cluster: Cluster, strategy: str, factor: float = 5.0, **changes: Any) -> dict[str, Any]:
    """First rank 1 is slow, then rank 0, by a clock of their own."""
    recipe = digits_alone(strategy, **changes)
    task = make_task(recipe)
    data = Slow(task.data, own_clock())
    data.seconds = 0.002 * (factor if cluster.global_rank == 1 else 1.0)
    session = build_test_session(cluster, recipe, lambda: replace(task, data=data))
    losses = []
    for stats in session.rounds():
        losses.append(stats.loss)
        if stats.step >= TURN_ALONE:
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
        assert rank["samples"] == [{"step": STEPS_ALONE, "taken": samples, "applied": samples, "dropped": 0}]
        assert rank["end"].distance(found[0]["end"]) == 0.0
    (first, before), *_, (last, after) = found[0]["shares"]
    assert first <= TURN_ALONE < last
    assert before[1] < 12 // len(before) and after[0] < 12 // len(after)
    assert all(sum(shares) == 12 for _, shares in found[0]["shares"])


@pytest.mark.capability("I2", "A13", clause="a rank that is slow has less to do, without a server")
@pytest.mark.parametrize("sync", ["hogwild:2", "gossip:2"])
@pytest.mark.parametrize("optimizer", ["sgd", "adamw"])
def test_shares_follow_the_speed_on_all_ranks_alike(sync: str, optimizer: str) -> None:
    run = partial(
        slowed_alone, strategy=f"sync={sync} balance=speed", optimizer={"name": optimizer, "lr": 1e-3}
    )
    require_followed(run_ranks(run, 3), STEPS_ALONE * 48)


@pytest.mark.capability("I2", "A13", clause="the gradient of the whole batch, without a server")
def test_two_that_wait_for_each_other_are_every_step_whatever_their_shares() -> None:
    """The gradient is that of the whole batch: SGD with momentum over unequal shares that change."""
    found = run_ranks(slowed_alone, 2, "sync=gossip:0 balance=speed")
    require_followed(found, STEPS_ALONE * 48)
    assert found[0]["end"].distance(run_oracle(digits_alone("replicas=1"), STEPS_ALONE)) < 1e-5


def unweighted(cluster: Cluster) -> dict[str, Any]:
    setattr(SpeedAssignment, "weight", 1.0)  # noqa: B010
    return slowed_alone(cluster, "sync=gossip:0 balance=speed")


def test_with_another_weight_they_would_not_be() -> None:
    """The twin."""
    found = run_ranks(unweighted, 2)
    assert found[0]["end"].distance(run_oracle(digits_alone("replicas=1"), STEPS_ALONE)) > 1e-3


class GreedyAlone(LockstepWork):
    """The fault: rank 0 runs the first shard of rank 1 too."""

    def _block(self) -> range:
        block = super()._block()
        return range(block.start, block.stop + (self.replica_rank == 0))


def greedy_alone(cluster: Cluster) -> None:
    session = build_test_session(cluster, digits_alone("sync=gossip:0 balance=speed"))
    work = session.feed.work
    assert isinstance(work, LockstepWork)
    work = GreedyAlone(work.order, work.shards, work.seed, work.replica_rank, 2)
    session.parts.feed = replace(session.feed, work=work)
    with pytest.raises(CommunicationError, match=r"the ranks ran \d+ samples, not 48"):
        list(session.rounds())
    session.close()


def test_a_shard_that_is_run_twice_is_an_error_at_the_end_of_the_round() -> None:
    run_ranks(greedy_alone, 2)


@pytest.mark.capability("I2", "A13", clause="equal speeds are equal parts")
def test_at_one_speed_the_bits_are_those_of_even_shares() -> None:
    def run(cluster: Cluster, balance: str) -> tuple[Trajectory, list[Any]]:
        found = slowed_alone(cluster, f"sync=gossip:0 balance={balance}", factor=1.0)
        return found["end"], found["shares"]

    for even, dealt in zip(run_ranks(run, 2, "even"), run_ranks(run, 2, "speed"), strict=True):
        assert dealt[1] == [] and dealt[0].distance(even[0]) == 0.0


@pytest.mark.capability("I2", "Z1")
class TestGossipBySpeed(RuleContract):
    strategy, num_ranks = "replicas=2 sync=gossip:0 balance=speed", 2
    deterministic = False  # shares follow real seconds, and with them the order of additions


SECONDS, USUAL = 0.03, 0.01  # a sample that is read slowly, and a micro-batch that is computed as ever
BEGINS = {"data": 9, "compute": 25, "nothing": 37}


def watched(strategy: str, steps: int) -> Recipe:
    return digits(strategy, steps=steps, health={"straggler_factor": 4.0})


def told(cluster: Cluster) -> list[tuple[str, Mapping[str, Any]]]:
    """Rank 1 reads slowly for a while, then rank 2 computes slowly, and shares follow."""
    recipe = watched("replicas=3 balance=speed", 41)
    task = make_task(recipe)
    clock, pause = own_clock(), [0.0]
    data = Slow(task.data, clock)
    session = build_test_session(cluster, recipe, lambda: replace(task, data=data))

    def compute(module: nn.Module, inputs: Any) -> None:
        clock.spend(USUAL + pause[0])

    session.runner.sharded_model.model.register_forward_pre_hook(compute)
    for stats in session.rounds():
        begun = [name for name, step in BEGINS.items() if stats.step + 1 >= step]
        now = begun[-1] if begun else "nothing"
        data.seconds = SECONDS * (now == "data" and cluster.global_rank == 1)
        pause[0] = 4 * SECONDS * (now == "compute" and cluster.global_rank == 2)
    notes = session.events.take()
    session.close()
    return notes


@pytest.mark.capability("I8", "I9", clause="a factor of four on a clock of its own; its share shrinks")
def test_the_slow_rank_is_named_with_its_cause_and_the_gain_is_told() -> None:
    first, *others = run_ranks(told, 3)
    assert all([name for name, _ in one] == [name for name, _ in first] for one in others)
    named = [record for name, record in first if name == "straggler"]
    assert [(one["rank"], one["cause"]) for one in named] == [(1, "data"), (2, "compute")]
    begins = [BEGINS["data"], BEGINS["compute"]]
    assert all(one["step"] - begin <= 10 for one, begin in zip(named, begins, strict=True))
    gains = [record for name, record in first if name == "gain"]
    assert gains and all(record["before"] > 0 and record["after"] > 0 for record in gains)
    shares = [(record["step"], record["shares"]) for name, record in first if name == "shares"]
    assert any(9 < step <= 25 and dealt[1] < max(dealt) for step, dealt in shares), shares


def test_another_rule_does_not_know_it() -> None:
    with pytest.raises(RecipeError, match="straggler_factor"):
        watched("servers=1 sync=server-async", 4)
