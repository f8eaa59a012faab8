"""Products of cuts on a tiny GPT with tied weights and dropout: every step is that of the oracle.

Each has mutation twins: an exchange that is forgotten, a norm that counts twice, a plan that is not whole.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from paceline.cluster import Cluster
from paceline.comm import Gradients
from paceline.comm.reduction import joint_norm
from paceline.layout.digest import state_sha256
from paceline.recipe import Recipe, Strategy
from paceline.sync.update import Norm
from paceline.testing import run_ranks
from paceline.testing.parity import CPU, make_task, session_of
from paceline.training import Pieces
from paceline.verification import Report, compare_with_oracle

STEPS = 4
PRODUCTS = {
    "replicas=1 shard=2 zero=3": 2,
    "replicas=1 tensor=2": 2,
    "replicas=1 pipeline=2 schedule=1f1b": 2,
    "replicas=1 shard=2 zero=1 pipeline=2": 4,
    "replicas=1 shard=2 zero=3 pipeline=2 schedule=1f1b": 4,
    "replicas=1 tensor=2 pipeline=2": 4,
    "replicas=1 shard=2 zero=1 tensor=2": 4,
    "replicas=1 shard=2 zero=3 tensor=2": 4,
    "replicas=2 shard=2 zero=3": 4,
    "replicas=2 tensor=2": 4,
    "replicas=1 shard=2 zero=3 tensor=2 pipeline=2": 8,
}
SHORT = (
    "replicas=1 shard=2 zero=3",
    "replicas=1 tensor=2",
    "replicas=1 pipeline=2 schedule=1f1b",
    "replicas=1 shard=2 zero=1 pipeline=2",
)


def gpt(strategy: str, **changes: Any) -> Recipe:
    """Most of its parameters are built without memory; the embedding is the output layer too."""
    settings: dict[str, Any] = {
        "task": "byte-gpt",
        "options": {
            "layers": 2,
            "width": 48,
            "heads": 2,
            "context": 16,
            "dropout": 0.1,
            "sample_tokens": 0,
            "train_tokens": 20_000,
            "held_out_tokens": 200,
        },
        "steps": 12,
        "batch": {"size": 21, "shards": 4},
        "optimizer": {"name": "adamw", "lr": 3e-3, "clip_norm": 0.1, "weight_decay": 0.1},
        "strategy": Strategy.parse(strategy),
    }
    return Recipe(**(settings | changes))


def digits(strategy: str) -> Recipe:
    """A dropout lies between the column and the row."""
    return gpt(strategy, task="digits", options={"model": "mlp", "hidden": [48], "dropout": 0.3})


def verify(
    cluster: Cluster, recipe: Recipe, pieces: Pieces | None = None, plan: dict[str, str] | None = None
) -> Report:
    task = make_task(recipe)
    if plan is not None:
        task = replace(task, tensor=plan)
    return compare_with_oracle(recipe, task, cluster, CPU, STEPS, pieces=pieces)


@pytest.mark.capability("Z1", "Z2")
@pytest.mark.parametrize(
    "strategy", [pytest.param(text, marks=[pytest.mark.soak] * (text not in SHORT)) for text in PRODUCTS]
)
def test_every_step_of_a_gpt_is_that_of_the_oracle(strategy: str) -> None:
    for report in run_ranks(verify, PRODUCTS[strategy], gpt(strategy)):
        assert report.ok, (report.failure, report.diagnosis)
        assert report.steps == STEPS


def forgotten(gather: Callable[[], None]) -> Callable[[], None]:
    return lambda: None


def own_norm(norm: Norm) -> Norm:
    return lambda grads: joint_norm(grads.norms)


def counted_on_every_holder(norm: Norm) -> Norm:
    """What several ranks of a replica hold is in the norm of each."""

    def broken(grads: Gradients) -> float:
        return norm(replace(grads, norms=[g.norm() for g in grads.tensors.values() if g is not None]))

    return broken


TWINS = {
    "zero=3, the own norm": ("replicas=1 shard=2 zero=3", Pieces(norm=own_norm)),
    "tensor, counted twice": ("replicas=1 tensor=2", Pieces(norm=counted_on_every_holder)),
    "1f1b, counted twice": (
        "replicas=1 pipeline=2 schedule=1f1b",
        Pieces(norm=counted_on_every_holder),
    ),
    "zero=1 of stages, not gathered": (
        "replicas=1 shard=2 zero=1 pipeline=2",
        Pieces(gather=forgotten),
    ),
    "zero=1 of stages, counted twice": (
        "replicas=1 shard=2 zero=1 pipeline=2",
        Pieces(norm=counted_on_every_holder),
    ),
    "zero=3 of tensor, counted twice": (
        "replicas=1 shard=2 zero=3 tensor=2",
        Pieces(norm=counted_on_every_holder),
    ),
}


@pytest.mark.capability("Z2")
@pytest.mark.parametrize("twin", TWINS)
def test_a_broken_product_is_found(twin: str) -> None:
    """The mutation twins."""
    strategy, pieces = TWINS[twin]
    for report in run_ranks(verify, PRODUCTS[strategy], gpt(strategy), pieces):
        assert not report.ok


@pytest.mark.capability("Z1", "Z2")
def test_a_plan_that_forgets_the_dropout_is_found() -> None:
    whole = {"layers.0": "column", "layers.2": "split", "layers.3": "row"}
    without = {"layers.0": "column", "layers.3": "row"}
    recipe = digits("replicas=1 tensor=2")
    assert run_ranks(verify, 2, recipe, None, whole)[0].ok
    assert not run_ranks(verify, 2, recipe, None, without)[0].ok


@pytest.mark.capability("I10")
@pytest.mark.parametrize(
    "strategy",
    [
        "replicas=1 shard=2 zero=3",
        "replicas=1 shard=2 zero=1 pipeline=2",
        pytest.param("replicas=1 shard=2 zero=3 pipeline=2", marks=pytest.mark.soak),
        pytest.param("replicas=1 shard=2 zero=3 pipeline=2 schedule=1f1b", marks=pytest.mark.soak),
        pytest.param("replicas=2 shard=2 zero=3", marks=pytest.mark.soak),
        pytest.param("replicas=1 pipeline=2 schedule=1f1b", marks=pytest.mark.soak),
    ],
)
def test_a_reproducible_product_has_the_bits_of_one_process(strategy: str) -> None:
    def bits(cluster: Cluster, recipe: Recipe) -> list[tuple[str, float]]:
        session = session_of(cluster, recipe)
        found = [(state_sha256(session.snapshot().tensors()), stats.loss) for stats in session.rounds()]
        session.close()
        return found

    recipe = gpt(strategy, steps=8, reproducible=True)
    (right,) = run_ranks(bits, 1, recipe.replace(strategy=Strategy.parse("replicas=1")))
    assert len({sha256 for sha256, _ in right}) == 8
    for found in run_ranks(bits, PRODUCTS[strategy], recipe):
        assert found == right
