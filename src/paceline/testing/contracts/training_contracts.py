"""The contracts of layouts and sync rules: trained from the text of a strategy, on the scikit-learn digits.

A layout is compared with the single-process oracle; a rule, exact or approximate, has to learn, to keep all
ranks equal between rounds, and to survive an aborted step and a snapshot.
"""

from __future__ import annotations

from abc import ABC
from collections.abc import Mapping
from typing import Any, ClassVar

import pytest
import torch

from paceline.job.cluster import Cluster
from paceline.recipe.recipe import Recipe
from paceline.recipe.strategy import Strategy
from paceline.session.evaluation import evaluate
from paceline.testing.parity import (
    CPU,
    Trajectory,
    build_test_session,
    make_task,
    run_oracle,
    train_interrupted,
    whole_trajectory,
)
from paceline.testing.rank_processes import run_ranks
from paceline.verification.verification_report import VerificationReport
from paceline.verification.verify_on_rank import compare_with_oracle


class _TrainingContract(ABC):
    """The settings and the undisturbed run of a contract.

    Attributes:
        strategy: the text of the strategy.
        num_ranks: number of processes.
        deterministic: whether a run computes the same bits twice; not if the order of arrival matters.
        options, batch, optimizer, steps: the other settings of the recipe.
    """

    strategy: str
    num_ranks: int
    deterministic: bool = True
    options: ClassVar[Mapping[str, Any]]
    batch: ClassVar[Mapping[str, Any]]
    optimizer: ClassVar[Mapping[str, Any]]
    steps: int

    def recipe(self, **changes: Any) -> Recipe:
        """Return the recipe of a short run with the strategy."""
        settings: dict[str, Any] = {
            "task": "digits",
            "options": dict(self.options),
            "steps": self.steps,
            "batch": dict(self.batch),
            "optimizer": dict(self.optimizer),
            "strategy": Strategy.parse(self.strategy),
        }
        return Recipe(**(settings | changes))

    @pytest.fixture(scope="class")
    @classmethod
    def plain(cls) -> list[Trajectory]:
        """The final state of the undisturbed run on every rank, trained once; empty if runs differ."""
        recipe = cls().recipe()

        def train(cluster: Cluster) -> Trajectory:
            session = build_test_session(cluster, recipe)
            return whole_trajectory([stats.loss for stats in session.rounds()], session)

        return run_ranks(train, cls.num_ranks) if cls.deterministic else []


class LayoutContract(_TrainingContract):
    """Tests of a layout with sync=every-step."""

    options: ClassVar[Mapping[str, Any]] = {"model": "mlp", "hidden": [48, 32], "dropout": 0.1}
    batch: ClassVar[Mapping[str, Any]] = {"size": 46, "shards": 6}
    optimizer: ClassVar[Mapping[str, Any]] = {"name": "adamw", "lr": 1e-3, "clip_norm": 0.5}
    steps = 8

    @pytest.mark.parametrize("model", ["mlp", "convnet"])
    def test_every_step_is_that_of_the_oracle(self, model: str) -> None:
        """With unequal shards, a clip and dropout; with the ConvNet also batch statistics."""
        sizes: dict[str, dict[str, Any]] = {"mlp": {"hidden": [48, 32]}, "convnet": {"channels": 8}}
        recipe = self.recipe(options={"model": model, "dropout": 0.1, **sizes[model]})

        def verify(cluster: Cluster) -> VerificationReport:
            return compare_with_oracle(recipe, make_task(recipe), cluster, CPU, self.steps)

        for report in run_ranks(verify, self.num_ranks):
            assert report.ok, (report.failure, report.diagnosis)
            assert report.steps == self.steps

    def test_it_ends_where_the_oracle_ends(self, plain: list[Trajectory]) -> None:
        right = run_oracle(self.recipe(), self.steps)
        assert all(end.distance(right) <= 1e-5 for end in plain)

    def test_a_step_that_is_aborted_can_be_done_again(self, plain: list[Trajectory]) -> None:
        """Interrupted in the backward pass of the fourth step, on every rank: the same bits."""
        recipe = self.recipe()

        def disturbed(cluster: Cluster) -> Trajectory:
            session = build_test_session(cluster, recipe)
            return whole_trajectory(train_interrupted(session, at_run=3, after=1), session)

        for a, b in zip(plain, run_ranks(disturbed, self.num_ranks), strict=True):
            assert a.losses == b.losses
            assert a.distance(b) == 0.0

    def test_a_snapshot_goes_on_to_the_same_bits(self, plain: list[Trajectory]) -> None:
        recipe = self.recipe()

        def stopped(cluster: Cluster) -> Trajectory:
            first = build_test_session(cluster, recipe)
            losses = [stats.loss for _, stats in zip(range(3), first.rounds(), strict=False)]
            snapshot = first.snapshot()
            tensors = {name: t.detach().clone() for name, t in snapshot.tensors().items()}
            second = build_test_session(cluster, recipe)
            second.restore(tensors, snapshot.scalars())
            return whole_trajectory(losses + [stats.loss for stats in second.rounds()], second)

        for a, b in zip(plain, run_ranks(stopped, self.num_ranks), strict=True):
            assert a.losses == b.losses
            assert a.distance(b) == 0.0

    def test_a_snapshot_is_that_of_one_process(self) -> None:
        """Names and shapes do not depend on the layout."""
        recipe = self.recipe(steps=2)

        def shapes(cluster: Cluster, of: Recipe) -> dict[str, tuple[int, ...]]:
            session = build_test_session(cluster, of)
            list(session.rounds())
            return {name: tuple(t.shape) for name, t in session.snapshot().tensors().items()}

        alone = shapes(Cluster.single(), recipe.replace(strategy=Strategy()))
        assert all(rank_shapes == alone for rank_shapes in run_ranks(shapes, self.num_ranks, recipe))

    def test_evaluation_is_that_of_one_process(self) -> None:
        recipe = self.recipe(evaluate={"batch": 23})

        def score(cluster: Cluster, of: Recipe) -> tuple[float, float]:
            evaluation = evaluate(build_test_session(cluster, of))
            assert evaluation is not None
            return evaluation.loss, evaluation.num_items

        right = score(Cluster.single(), recipe.replace(strategy=Strategy()))
        for loss, items in run_ranks(score, self.num_ranks, recipe):
            assert items == right[1]
            assert abs(loss - right[0]) <= 1e-6 * right[0]


class RuleContract(_TrainingContract):
    """Tests of a sync rule.

    Attributes:
        interrupts: the step whose backward pass is interrupted on every rank that runs one.
    """

    options: ClassVar[Mapping[str, Any]] = {"model": "mlp", "hidden": [32]}
    batch: ClassVar[Mapping[str, Any]] = {"size": 48, "shards": 6}
    optimizer: ClassVar[Mapping[str, Any]] = {"name": "adamw", "lr": 2e-3}
    interrupts: int = 4
    steps = 10

    def test_it_learns_and_ends_at_the_last_step_with_all_ranks_equal(self) -> None:
        def train(cluster: Cluster) -> tuple[int, float, float, Trajectory]:
            session = build_test_session(cluster, self.recipe(steps=40))
            before = evaluate(session)
            losses = [stats.loss for stats in session.rounds()]
            after = evaluate(session)
            assert before is not None and after is not None
            return session.state.step, before.loss, after.loss, whole_trajectory(losses, session)

        ranks = run_ranks(train, self.num_ranks)
        for step, before, after, end in ranks:
            assert step == 40
            assert after < 0.8 * before
            assert end.distance(ranks[0][3]) == 0.0

    def test_after_every_round_all_ranks_agree(self) -> None:
        """Steps, losses and parameters are equal whenever the state can be saved."""

        def train(cluster: Cluster) -> list[tuple[int, float, torch.Tensor]]:
            session = build_test_session(cluster, self.recipe())
            records = []
            for stats in session.rounds():
                whole = session.snapshot().tensors()
                names = sorted(name for name in whole if name.startswith("model/"))
                flat = torch.cat([whole[name].detach().reshape(-1).clone() for name in names])
                records.append((session.state.step, stats.loss, flat))
            return records

        ranks = run_ranks(train, self.num_ranks)
        for rounds in zip(*ranks, strict=True):
            step, loss, flat = rounds[0]
            assert all(other[:2] == (step, loss) and torch.equal(other[2], flat) for other in rounds)

    def test_a_step_that_is_aborted_can_be_done_again(self, plain: list[Trajectory]) -> None:
        def disturbed(cluster: Cluster) -> Trajectory:
            session = build_test_session(cluster, self.recipe())
            return whole_trajectory(train_interrupted(session, self.interrupts, 1), session)

        ends = run_ranks(disturbed, self.num_ranks)
        assert all(end.distance(ends[0]) == 0.0 for end in ends)
        if self.deterministic:
            assert ends[0].losses == plain[0].losses
            assert ends[0].distance(plain[0]) == 0.0

    def test_a_snapshot_between_two_rounds_goes_on(self, plain: list[Trajectory]) -> None:
        def stopped(cluster: Cluster) -> Trajectory:
            first = build_test_session(cluster, self.recipe())
            losses = [stats.loss for _, stats in zip(range(1), first.rounds(), strict=False)]
            snapshot = first.snapshot()
            tensors = {name: t.detach().clone() for name, t in snapshot.tensors().items()}
            second = build_test_session(cluster, self.recipe())
            second.restore(tensors, snapshot.scalars())
            return whole_trajectory(losses + [stats.loss for stats in second.rounds()], second)

        ends = run_ranks(stopped, self.num_ranks)
        if self.deterministic:
            assert ends[0].losses == plain[0].losses
            assert ends[0].distance(plain[0]) == 0.0
