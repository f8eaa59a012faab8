"""A replica that is slow gets fewer shards, and the answer stays that of one process."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest

from paceline.data import LockstepWork, MicroBatchWork
from paceline.errors import RecipeError
from paceline.job.cluster import Cluster
from paceline.recipe import Recipe, Strategy
from paceline.testing import run_ranks
from paceline.testing.parity import Trajectory, build_test_session, make_task, run_oracle, trajectory_of
from tests.parity.virtual_clock import Clock, own_clock

STEPS = 28
TURN = 15  # the step in which the other rank becomes the slow one


def digits(strategy: str, **changes: Any) -> Recipe:
    settings: dict[str, Any] = {
        "task": "digits",
        "options": {"model": "convnet", "channels": 2, "dropout": 0.1},
        "steps": STEPS,
        "batch": {"size": 22, "shards": 8},
        "optimizer": {"name": "adamw", "lr": 1e-3, "clip_norm": 0.5},
        "strategy": Strategy.parse(strategy),
    }
    return Recipe(**(settings | changes))


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


@pytest.mark.capability("A13")
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
