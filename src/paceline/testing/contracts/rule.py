"""What every rule keeps, exact or approximate: checked from a strategy's text, on real data."""

from __future__ import annotations

from abc import ABC
from typing import Any

import pytest
import torch

from paceline.cluster import Cluster
from paceline.recipe import Recipe, Strategy
from paceline.testing.contracts.layout import whole
from paceline.testing.interrupt import train_interrupted
from paceline.testing.parity import Trajectory, session_of
from paceline.testing.ranks import run_ranks
from paceline.training import evaluate


class RuleContract(ABC):
    """A rule on the scikit-learn digits.

    Attributes:
        strategy: its text.
        num_ranks: how many processes it takes.
        deterministic: whether a run computes the same bits twice; not so where arrival decides.
        interrupts: the step whose backward pass is interrupted on every rank that runs one.
    """

    strategy: str
    num_ranks: int
    deterministic: bool = True
    interrupts: int = 4
    steps = 10

    def recipe(self, **changes: Any) -> Recipe:
        """A short run under the strategy."""
        settings: dict[str, Any] = {
            "task": "digits",
            "options": {"model": "mlp", "hidden": [32]},
            "steps": self.steps,
            "batch": {"size": 48, "shards": 6},
            "optimizer": {"name": "adamw", "lr": 2e-3},
            "strategy": Strategy.parse(self.strategy),
        }
        return Recipe(**(settings | changes))

    @pytest.fixture(scope="class")
    @classmethod
    def plain(cls) -> list[Trajectory]:
        """Where every rank of the plain run ends, run once for all tests; none where runs differ."""
        recipe = cls().recipe()

        def train(cluster: Cluster) -> Trajectory:
            session = session_of(cluster, recipe)
            return whole([stats.loss for stats in session.rounds()], session)

        return run_ranks(train, cls.num_ranks) if cls.deterministic else []

    def test_it_learns_and_ends_at_the_last_step_with_all_ranks_equal(self) -> None:
        def train(cluster: Cluster) -> tuple[int, float, float, Trajectory]:
            session = session_of(cluster, self.recipe(steps=40))
            before = evaluate(session)
            losses = [stats.loss for stats in session.rounds()]
            after = evaluate(session)
            assert before is not None and after is not None
            return session.state.step, before.loss, after.loss, whole(losses, session)

        ranks = run_ranks(train, self.num_ranks)
        for step, before, after, end in ranks:
            assert step == 40
            assert after < 0.8 * before
            assert end.distance(ranks[0][3]) == 0.0

    def test_after_every_round_all_ranks_agree(self) -> None:
        """Steps, stats and parameters, at every point at which the state may be saved."""

        def train(cluster: Cluster) -> list[tuple[int, float, torch.Tensor]]:
            session = session_of(cluster, self.recipe())
            found = []
            for stats in session.rounds():
                whole = session.snapshot().tensors()
                names = sorted(name for name in whole if name.startswith("model/"))
                flat = torch.cat([whole[name].detach().reshape(-1).clone() for name in names])
                found.append((session.state.step, stats.loss, flat))
            return found

        ranks = run_ranks(train, self.num_ranks)
        for rounds in zip(*ranks, strict=True):
            step, loss, flat = rounds[0]
            assert all(other[:2] == (step, loss) and torch.equal(other[2], flat) for other in rounds)

    def test_a_step_that_is_aborted_can_be_done_again(self, plain: list[Trajectory]) -> None:
        def disturbed(cluster: Cluster) -> Trajectory:
            session = session_of(cluster, self.recipe())
            return whole(train_interrupted(session, self.interrupts, 1), session)

        ends = run_ranks(disturbed, self.num_ranks)
        assert all(end.distance(ends[0]) == 0.0 for end in ends)
        if self.deterministic:
            assert ends[0].losses == plain[0].losses
            assert ends[0].distance(plain[0]) == 0.0

    def test_a_snapshot_between_two_rounds_goes_on(self, plain: list[Trajectory]) -> None:
        def stopped(cluster: Cluster) -> Trajectory:
            first = session_of(cluster, self.recipe())
            losses = [stats.loss for _, stats in zip(range(1), first.rounds(), strict=False)]
            found = first.snapshot()
            kept = {name: t.detach().clone() for name, t in found.tensors().items()}
            second = session_of(cluster, self.recipe())
            second.restore(kept, found.scalars())
            return whole(losses + [stats.loss for stats in second.rounds()], second)

        ends = run_ranks(stopped, self.num_ranks)
        if self.deterministic:
            assert ends[0].losses == plain[0].losses
            assert ends[0].distance(plain[0]) == 0.0
