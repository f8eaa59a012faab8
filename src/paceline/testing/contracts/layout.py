"""What every layout keeps: checked from a strategy's text, on real data, against the oracle."""

from __future__ import annotations

from abc import ABC
from collections.abc import Mapping
from typing import Any, ClassVar

import pytest

from paceline.cluster import Cluster
from paceline.recipe import Recipe, Strategy
from paceline.testing.interrupt import train_interrupted
from paceline.testing.parity import CPU, Trajectory, make_task, run_oracle, session_of
from paceline.testing.ranks import run_ranks
from paceline.training import Session, evaluate
from paceline.verification import Report, compare_with_oracle

_BATCH = {"size": 46, "shards": 6}
_ADAMW = {"name": "adamw", "lr": 1e-3, "clip_norm": 0.5}


class LayoutContract(ABC):
    """A layout under every-step, on the scikit-learn digits.

    Attributes:
        strategy: its text.
        num_ranks: how many processes it takes.
    """

    strategy: str
    num_ranks: int
    options: ClassVar[Mapping[str, Any]] = {"model": "mlp", "hidden": [48, 32], "dropout": 0.1}
    steps = 8

    def recipe(self, **changes: Any) -> Recipe:
        """A short run under the strategy."""
        settings: dict[str, Any] = {
            "task": "digits",
            "options": dict(self.options),
            "steps": self.steps,
            "batch": _BATCH,
            "optimizer": _ADAMW,
            "strategy": Strategy.parse(self.strategy),
        }
        return Recipe(**(settings | changes))

    @pytest.mark.parametrize("model", ["mlp", "convnet"])
    def test_every_step_is_that_of_the_oracle(self, model: str) -> None:
        """Unequal shards, a clip, dropout; with the ConvNet also batch statistics."""
        sizes: dict[str, dict[str, Any]] = {"mlp": {"hidden": [48, 32]}, "convnet": {"channels": 8}}
        recipe = self.recipe(options={"model": model, "dropout": 0.1, **sizes[model]})

        def verify(cluster: Cluster) -> Report:
            return compare_with_oracle(recipe, make_task(recipe), cluster, CPU, self.steps)

        for report in run_ranks(verify, self.num_ranks):
            assert report.ok, (report.failure, report.diagnosis)
            assert report.steps == self.steps

    @pytest.fixture(scope="class")
    @classmethod
    def plain(cls) -> list[Trajectory]:
        """Where every rank of the undisturbed run ends, whole; it is run once for all tests."""
        recipe = cls().recipe()

        def run(cluster: Cluster) -> Trajectory:
            session = session_of(cluster, recipe)
            return whole([stats.loss for stats in session.rounds()], session)

        return run_ranks(run, cls.num_ranks)

    def test_it_ends_where_the_oracle_ends(self, plain: list[Trajectory]) -> None:
        right = run_oracle(self.recipe(), self.steps)
        assert all(end.distance(right) <= 1e-5 for end in plain)

    def test_a_step_that_is_aborted_can_be_done_again(self, plain: list[Trajectory]) -> None:
        """In the backward pass of the fourth step, after one gradient, on every rank: the same bits."""
        recipe = self.recipe()

        def disturbed(cluster: Cluster) -> Trajectory:
            session = session_of(cluster, recipe)
            return whole(train_interrupted(session, at_run=3, after=1), session)

        for a, b in zip(plain, run_ranks(disturbed, self.num_ranks), strict=True):
            assert a.losses == b.losses
            assert a.distance(b) == 0.0

    def test_a_snapshot_goes_on_to_the_same_bits(self, plain: list[Trajectory]) -> None:
        recipe = self.recipe()

        def stopped(cluster: Cluster) -> Trajectory:
            first = session_of(cluster, recipe)
            losses = [stats.loss for _, stats in zip(range(3), first.rounds(), strict=False)]
            found = first.snapshot()
            kept = {name: t.detach().clone() for name, t in found.tensors().items()}
            second = session_of(cluster, recipe)
            second.restore(kept, found.scalars())
            return whole(losses + [stats.loss for stats in second.rounds()], second)

        for a, b in zip(plain, run_ranks(stopped, self.num_ranks), strict=True):
            assert a.losses == b.losses
            assert a.distance(b) == 0.0

    def test_a_snapshot_is_that_of_one_process(self) -> None:
        """Names and shapes do not depend on the layout."""
        recipe = self.recipe(steps=2)

        def shapes(cluster: Cluster, of: Recipe) -> dict[str, tuple[int, ...]]:
            session = session_of(cluster, of)
            list(session.rounds())
            return {name: tuple(t.shape) for name, t in session.snapshot().tensors().items()}

        alone = shapes(Cluster.single(), recipe.replace(strategy=Strategy()))
        assert all(found == alone for found in run_ranks(shapes, self.num_ranks, recipe))

    def test_evaluation_is_that_of_one_process(self) -> None:
        recipe = self.recipe(evaluate={"batch": 23})

        def score(cluster: Cluster, of: Recipe) -> tuple[float, float]:
            found = evaluate(session_of(cluster, of))
            assert found is not None
            return found.loss, found.num_items

        right = score(Cluster.single(), recipe.replace(strategy=Strategy()))
        for loss, items in run_ranks(score, self.num_ranks, recipe):
            assert items == right[1]
            assert abs(loss - right[0]) <= 1e-6 * right[0]


def whole(losses: list[float], session: Session) -> Trajectory:
    """Where a session stands, with what its peers hold; collective."""
    tensors = {name: t.detach().clone() for name, t in session.snapshot().tensors().items()}
    model = {n.removeprefix("model/"): t for n, t in tensors.items() if n.startswith("model/")}
    return Trajectory(losses, model, {n: t for n, t in tensors.items() if n.startswith("optimizer/")})
