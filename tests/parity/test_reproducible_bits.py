"""Reproducible runs: one SHA-256 after every step, on any number of processes and lanes, under any layout."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cache
from typing import Any
from unittest.mock import patch

import pytest
import torch
from _pytest.mark import ParameterSet
from torch import Tensor

from paceline.comm import Gradients, Net
from paceline.comm.reduction import BucketSum, SharedNorm, TiedGradientReduction, UnorderedSum, summation_tree
from paceline.job.cluster import Cluster
from paceline.job.mesh import RankGroup
from paceline.parallel import data_parallel, gradient_reduction
from paceline.parallel.session_context import SessionContext
from paceline.parallel.state_hash import state_sha256
from paceline.recipe import Recipe, Strategy
from paceline.session.build import build_order
from paceline.state.slot import TensorSlot
from paceline.testing import run_ranks
from paceline.testing.parity import build_test_session, make_task
from tests.recipes import recipe_of
from tests.texts import SMALL_TEXT

STEPS = 50
FEW_STEPS = 6  # each mistake of the twins is in the first update
GPT: dict[str, Any] = {
    "task": "byte-gpt",
    "options": {"layers": 2, "width": 16, "heads": 2, "context": 16, "dropout": 0.1, "sample_tokens": 0}
    | {"text": SMALL_TEXT},
    "batch": {"size": 21, "shards": 8},
    "optimizer": {"name": "adamw", "lr": 3e-3, "clip_norm": 0.5, "weight_decay": 0.1},
}
CONVNET: dict[str, Any] = {
    "task": "digits",
    "options": {"model": "convnet", "channels": 4, "dropout": 0.2},
    "batch": {"size": 37, "shards": 8},
    "optimizer": {"name": "adamw", "lr": 3e-3, "clip_norm": 0.5},
}
MODELS = {"byte-gpt": GPT, "convnet": CONVNET}
BOTH = ("byte-gpt", "convnet")
# By strategy, the models that have it in `make test`: every way once, and ways that could meet.
STRATEGIES: dict[str, tuple[str, ...]] = {
    "replicas=2": (),
    "replicas=3 route=native": BOTH[1:],
    "replicas=4": (),
    "replicas=5": BOTH[:1],
    "replicas=8": (),
    "replicas=1 lanes=2": (),
    "replicas=1 lanes=4": (),
    "replicas=2 lanes=2 route=native": (),
    "replicas=1 shard=2 zero=1": (),
    "replicas=1 shard=3 zero=1 lanes=2": BOTH[:1],
    "replicas=2 shard=2 zero=1": BOTH[1:],
    "replicas=1 shard=3 zero=1 route=native": (),
    "replicas=1 pipeline=2": (),
    "replicas=3 pipeline=2": (),
    "replicas=1 pipeline=3": (),
    "replicas=1 pipeline=2 lanes=2": (),
    "replicas=2 pipeline=3 lanes=3": BOTH[:1],
    "replicas=1 shard=2 zero=1 pipeline=2 lanes=2": BOTH[:1],
}


def matrix() -> Iterator[ParameterSet]:
    """Every model with every strategy."""
    for model in MODELS:
        for strategy in STRATEGIES:
            marks = [] if model in STRATEGIES[strategy] else [pytest.mark.soak]
            yield pytest.param(model, strategy, marks=marks, id=f"{model}-{strategy}")


@dataclass(frozen=True)
class Bits:
    """After every step: the hash of the state, and the loss."""

    sha256: list[str]
    losses: list[float]

    def first_difference(self, other: Bits) -> int | None:
        mine = zip(self.sha256, self.losses, strict=True)
        theirs = zip(other.sha256, other.losses, strict=True)
        return next((step for step, (a, b) in enumerate(zip(mine, theirs, strict=True)) if a != b), None)


def recipe_for(model: str, strategy: str, **changes: Any) -> Recipe:
    return recipe_of(strategy, **(MODELS[model] | {"steps": STEPS, "reproducible": True} | changes))


def bits_of(cluster: Cluster, recipe: Recipe) -> Bits:
    session = build_test_session(cluster, recipe)
    sha256, losses = [], []
    for stats in session.rounds():
        sha256.append(state_sha256(session.snapshot().tensors()))
        losses.append(stats.loss)
    session.close()
    return Bits(sha256, losses)


def run(recipe: Recipe) -> list[Bits]:
    strategy = recipe.strategy
    return run_ranks(bits_of, (strategy.replicas or 1) * strategy.ranks_per_replica, recipe, deadline=720.0)


@cache
def alone(model: str, steps: int = STEPS) -> Bits:
    """One process, one lane."""
    return run(recipe_for(model, "replicas=1", steps=steps))[0]


@pytest.mark.capability("I10", "A2", "A7", "A9", "J10", "J11")
@pytest.mark.timeout(960)
@pytest.mark.parametrize(("model", "strategy"), list(matrix()))
def test_fifty_steps_of_adamw_have_the_hashes_of_one_process(model: str, strategy: str) -> None:
    right = alone(model)
    assert len(set(right.sha256)) == STEPS, "the state moves in every step"
    for found in run(recipe_for(model, strategy)):
        assert found.first_difference(right) is None


CHANGES: dict[str, dict[str, Any]] = {
    "bf16": {"precision": {"compute": "bf16"}},
    "fp16": {"precision": {"compute": "fp16", "init_scale": 2.0**18}},
    "recompute": {"memory": {"recompute": "blocks"}},
    "sgd": {"optimizer": {"name": "sgd", "lr": 0.1, "momentum": 0.9, "nesterov": True}},
}
SPREADS = ("replicas=3 route=native", "replicas=1 pipeline=2")
THREADS_AND_PARTS = ("replicas=1 lanes=2", "replicas=1 shard=2 zero=1")


def changed() -> Iterator[ParameterSet]:
    """Every change with every strategy; three quarters of them in `make soak`."""
    for i, name in enumerate(CHANGES):
        for strategy in (*SPREADS, *THREADS_AND_PARTS):
            is_short = strategy == (*SPREADS, *THREADS_AND_PARTS)[i]
            yield pytest.param(name, strategy, marks=[] if is_short else [pytest.mark.soak])


@cache
def changed_alone(name: str) -> Bits:
    """One process, one lane, with one change."""
    return run(recipe_for("byte-gpt", "replicas=1", steps=12, **CHANGES[name]))[0]


@pytest.mark.capability("I10", "K2")
@pytest.mark.timeout(960)
@pytest.mark.parametrize(("name", "strategy"), list(changed()))
def test_amp_recomputation_and_momentum_keep_their_bits(name: str, strategy: str) -> None:
    right = changed_alone(name)
    for found in run(recipe_for("byte-gpt", strategy, steps=12, **CHANGES[name])):
        assert found.first_difference(right) is None


@pytest.mark.capability("A10", "I10")
def test_more_shards_than_samples_leave_some_empty() -> None:
    """The last batch of an epoch: here 8 shards of 3 samples."""
    changes = {"batch": {"size": 299, "shards": 8}, "options": {"model": "mlp", "hidden": [16]}, "steps": 8}
    small = recipe_for("convnet", "replicas=1", **changes)
    assert build_order(small, make_task(small)).batch_size(5) == 3
    right = run(small)[0]
    for strategy in ("replicas=3", "replicas=8", "replicas=2 lanes=3"):
        assert run(small.replace(strategy=Strategy.parse(strategy)))[0].first_difference(right) is None


def plain_sums(context: SessionContext, sharded_model: Any, axes: Any, turns: Any) -> BucketSum:
    mesh = context.mesh
    return UnorderedSum(context.collective(mesh.axes["shard"]), context.collective(mesh.replica))


class NormOfFlats(SharedNorm):
    def __init__(self, slots: Any, counted: Any, group: RankGroup, net: Net) -> None:
        super().__init__(group, net)

    def __call__(self, grads: Gradients) -> float:
        return super().__call__(replace(grads, norms=torch._foreach_norm(list(grads.flats))))


def close_stage_by_stage(self: TiedGradientReduction) -> None:
    """Each stage adds its shards, and the sums meet: another order than shard by shard."""

    def own_sum(slot: TensorSlot) -> Tensor:
        return torch.stack([grad.detach() for (one, _), grad in self._held.items() if one == slot]).sum(0)

    totals = {slot: self._net.all_reduce(own_sum(slot), self._holders).wait() for slot in self._tensors}
    places = sorted(self._micro_batches, key=lambda place: place.start)
    for place in places:
        self.inner.micro_batch(place, is_last=place == places[-1])
        for slot, total in totals.items():
            self.inner.ready(slot, total if place == places[0] else None)
    self.inner.close()


def sum_in_the_order_of_ranks(places: Any, values: Any) -> Any:
    return sum(values[1:], start=values[0])


SEED_MICRO_BATCH = data_parallel.seed_micro_batch


def seed_by_rank(key: int, *args: Any, **kwargs: Any) -> None:
    SEED_MICRO_BATCH(key + torch.distributed.get_rank(), *args, **kwargs)


BROKEN: list[tuple[str, str, Any, str, Any]] = [
    ("byte-gpt", "replicas=3", gradient_reduction, "_build_sums", plain_sums),
    ("byte-gpt", "replicas=3", summation_tree, "tree_sum", sum_in_the_order_of_ranks),
    ("byte-gpt", "replicas=1 shard=3 zero=1", gradient_reduction, "CanonicalNorm", NormOfFlats),
    ("byte-gpt", "replicas=1 pipeline=3", TiedGradientReduction, "close", close_stage_by_stage),
    ("convnet", "replicas=3", data_parallel, "seed_micro_batch", seed_by_rank),
]


def broken_bits(cluster: Cluster) -> list[Bits]:
    """Of runs that each miss one mechanism."""
    found = []
    for model, strategy, owner, name, replacement in BROKEN:
        with patch.object(owner, name, replacement):
            found.append(bits_of(cluster, recipe_for(model, strategy, steps=FEW_STEPS)))
    return found


@pytest.mark.capability("I10")
def test_without_one_mechanism_the_hashes_differ() -> None:
    """Twins: each mechanism is needed, and the matrix above would see that it is gone."""
    found = run_ranks(broken_bits, 3, deadline=720.0)[0]
    for (model, strategy, _, name, _), bits in zip(BROKEN, found, strict=True):
        assert bits.first_difference(alone(model, FEW_STEPS)) is not None, (strategy, name)
