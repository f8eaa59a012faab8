"""Sequences split over ranks inside the stages of a pipeline, and under an own loop: the answer is that of
one process. The grid of products is in test_context.py."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from paceline.errors import TaskError
from paceline.job.cluster import Cluster
from paceline.models import positions
from paceline.parallel.context import context_attention
from paceline.parallel.placement import ContextTransform, TensorPlacement
from paceline.recipe import Recipe
from paceline.session import OwnLoop, build_session, partition_check
from paceline.session.fit_loop import fitting
from paceline.tasks.byte_gpt import next_token_loss
from paceline.testing import run_ranks
from paceline.testing.parity import CPU, build_test_session, make_task
from paceline.verification import compare_with_oracle
from tests.parity.test_context import begins_at_zero, recipe, score, verified

STAGES = "replicas=1 context=2 pipeline=2 schedule=1f1b"


def summed_by_itself(self: ContextTransform, held: TensorPlacement, coordinate: int) -> TensorPlacement:
    """A cut that forgets to sum over the ranks that run other positions."""
    return replace(held, counts=held.counts and coordinate == 0)


@pytest.mark.capability("Z1", "Z2", "E2", "J11")
def test_stages_train_on_parts_of_sequences_as_one_process() -> None:
    """Tied weights, clip, dropout, micro-batches in turn, blocks recomputed; and an evaluation.

    Mutation twins: gradients summed over the wrong axes; positions that begin at 0 on every rank, which are
    refused before the first step, and found if nobody had asked then.
    """
    of = recipe(STAGES, positions="learned", heads=3).replace(steps=6)
    again = recipe(STAGES).replace(steps=4, memory={"recompute": "blocks"})

    def run(cluster: Cluster) -> tuple[list[str], tuple[float, float], list[bool]]:
        right, found = [verified(cluster, of), verified(cluster, again)], list[bool]()
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(ContextTransform, "cut", summed_by_itself)
            found.append(compare_with_oracle(of, make_task(of), cluster, CPU, 1).ok)
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(
                context_attention, "_INSTEAD", {**context_attention._INSTEAD, positions: begins_at_zero}
            )
            with pytest.raises(TaskError, match="returns other values on parts of a sequence"):
                build_session(of, make_task(of), cluster, CPU)
            patch.setattr(partition_check, "_compare_values", lambda *args: None)
            found.append(compare_with_oracle(of, make_task(of), cluster, CPU, 1).ok)
        return right, score(cluster, of), found

    loss, items = score(Cluster.single(), of.replace(strategy="replicas=1"))
    for right, (mine, counted), found in run_ranks(run, 4):
        assert right == ["", ""]
        assert counted == items and abs(mine - loss) <= 1e-6 * loss
        assert found == [False, False]


def by_hand(own: Any) -> None:
    """A user's own loop; it gets what `Task.sequence` gives, or the whole batch in one process."""
    for batch in own.batches():
        own.backward(next_token_loss(own.model, batch))
        own.step()


def looped(cluster: Cluster, of: Recipe) -> float:
    """The loss that an own loop finds inside its body, after two steps."""
    losses = []
    session = build_test_session(cluster, of)
    with fitting(session, None, ()) as found:
        loop = OwnLoop(session, found)
        for batch in loop.batches():
            loop.backward(next_token_loss(loop.model, batch))
            if loop.step() is not None:
                evaluation = loop.evaluate()
                losses.append(evaluation.loss if evaluation else 0.0)
        loop.end()
    return losses[-1]


@pytest.mark.capability("Z1", "Z2")
def test_an_own_loop_gets_its_positions() -> None:
    """Verified step by step; and an evaluation in the body of the loop, where both see their positions."""
    of = recipe("replicas=1 context=2", positions="learned", heads=6).replace(steps=3)

    def run(cluster: Cluster) -> tuple[str, float]:
        report = compare_with_oracle(of, make_task(of), cluster, CPU, 3, loop=by_hand)
        wrong = "" if report.ok and report.steps == 3 else f"{report.failure} {report.diagnosis}"
        return wrong, looped(cluster, of)

    right = looped(Cluster.single(), of.replace(strategy="replicas=1"))
    for wrong, loss in run_ranks(run, 2):
        assert wrong == ""
        assert abs(loss - right) <= 1e-5 * right
