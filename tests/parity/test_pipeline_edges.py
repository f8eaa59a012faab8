"""Stages at the edges: any number of micro-batches, ragged and empty steps, tied weights."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from paceline.comm import BucketReducer, GradientReduction, LedgerEntry
from paceline.comm.reduction import TiedGradientReduction, UnorderedSum
from paceline.job.cluster import Cluster
from paceline.parallel import ShardedModel
from paceline.parallel.session_context import SessionContext
from paceline.recipe import OptimizerRecipe, Recipe, Strategy
from paceline.state.slot import TensorSlot
from paceline.sync import every_step
from paceline.task import Loss, Task
from paceline.testing import run_ranks
from paceline.testing.parity import (
    CPU,
    Trajectory,
    build_test_session,
    make_task,
    run_oracle,
    whole_trajectory,
)
from paceline.verification import VerificationReport, compare_with_oracle

TRAINING_IMAGES = 1498
TWO_STAGES = "replicas=1 pipeline=2"


def digits(strategy: str = TWO_STAGES, **changes: Any) -> Recipe:
    settings: dict[str, Any] = {
        "task": "digits",
        "options": {"model": "mlp", "hidden": [48, 32]},
        "steps": 4,
        "batch": {"size": 46, "shards": 4},
        "optimizer": {"name": "sgd", "lr": 0.05, "momentum": 0.9},
        "strategy": Strategy.parse(strategy),
    }
    return Recipe(**(settings | changes))


def verify(
    cluster: Cluster, recipe: Recipe, make: Callable[[], Task] | None = None, steps: int = 3
) -> VerificationReport:
    task = make() if make is not None else make_task(recipe)
    return compare_with_oracle(recipe, task, cluster, CPU, steps)


def train(cluster: Cluster, recipe: Recipe) -> Trajectory:
    session = build_test_session(cluster, recipe)
    return whole_trajectory([stats.loss for stats in session.rounds()], session)


@pytest.mark.capability("D2")
def test_micro_batches_are_the_full_batch_however_many() -> None:
    """46 samples in 1, 3 and 8 micro-batches, of which the last is smaller, against one batch of 46."""

    def ends(cluster: Cluster) -> list[Trajectory]:
        return [train(cluster, digits(batch={"size": 46, "shards": m})) for m in (1, 3, 8)]

    right = run_oracle(digits(), 4, shards=1)
    for rank in run_ranks(ends, 2):
        assert all(end.distance(right) <= 1e-6 for end in rank)


@pytest.mark.capability("D2", "D3")
@pytest.mark.parametrize("strategy, num_ranks", [("replicas=1 pipeline=3", 3), ("replicas=2 pipeline=2", 4)])
def test_the_last_step_of_an_epoch_has_one_sample(strategy: str, num_ranks: int) -> None:
    """Fewer micro-batches than usual, and a replica without any."""
    recipe = digits(
        strategy,
        options={"model": "convnet", "channels": 4, "dropout": 0.1},
        steps=None,
        epochs=1,
        batch={"size": TRAINING_IMAGES - 1, "shards": 4},
        optimizer={"name": "adamw", "lr": 1e-3, "clip_norm": 0.5},
    )
    report = run_ranks(verify, num_ranks, recipe)[0]
    assert report.ok, (report.failure, report.diagnosis)
    assert report.steps == 2


@pytest.mark.capability("D3")
@pytest.mark.parametrize("num_stages", [2, 3])
def test_a_stage_really_runs_in_the_order_of_the_table(num_stages: int) -> None:
    def order(cluster: Cluster) -> list[str]:
        session = build_test_session(cluster, digits(f"replicas=1 pipeline={num_stages}", steps=1))
        seen: list[str] = []
        (stage,) = session.runner.executor.chunks
        stage.register_forward_hook(lambda *_: seen.append("F"))
        next(stage.parameters()).register_hook(lambda grad: seen.append("B"))
        list(session.rounds())
        return seen

    assert run_ranks(order, num_stages) == [["F"] * 4 + ["B"] * 4] * num_stages


class Tied(nn.Sequential):
    """The first and the last layer share their weights, and are on two stages."""

    def __init__(self) -> None:
        super().__init__(nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 64))
        self[4].weight = self[0].weight


def tied_task() -> Task:
    def over_first_ten(model: nn.Module, batch: Sequence[Tensor]) -> Loss:
        images, targets = batch
        return Loss(F.cross_entropy(model(images)[:, :10], targets, reduction="sum"), len(images))

    torch.manual_seed(3)
    return replace(
        make_task(digits()), model=Tied(), initialize=None, stages=None, loss=over_first_ten, held_out=None
    )


def tied_weights(cluster: Cluster, codec: str, breaks: Callable[[], None] | None = None) -> list[float]:
    """The first layer's weights as this rank trained them: on every second rank, those of the last layer."""
    if breaks is not None:
        breaks()
    adamw = {"name": "adamw", "lr": 1e-2}
    recipe = digits(f"replicas=3 pipeline=2 codec={codec}", steps=6, optimizer=adamw)
    session = build_test_session(cluster, recipe, tied_task)
    list(session.rounds())
    return session.runner.sharded_model.model[0].weight.detach().flatten().tolist()


@pytest.mark.capability("D1", "H8")
@pytest.mark.parametrize("codec", ["fp32", "int8"])
def test_tied_weights_on_two_stages_keep_equal_bits(codec: str) -> None:
    """Three replicas: a sum, or a codec's blocks, would fall differently in the buckets of another stage."""

    def weights(cluster: Cluster) -> list[float]:
        recipe = digits(
            f"replicas=3 pipeline=2 codec={codec}", steps=6, optimizer={"name": "adamw", "lr": 1e-2}
        )
        session = build_test_session(cluster, recipe, tied_task)
        list(session.rounds())
        return session.runner.sharded_model.model[0].weight.detach().flatten().tolist()

    ranks = run_ranks(weights, 6)
    assert all(values == ranks[0] for values in ranks)


class AmongOthers(TiedGradientReduction):
    """Shared tensors meet, and then lie in one bucket with the others of their stage."""

    def ready(self, slot: TensorSlot, grad: Tensor | None) -> None:
        (super() if slot in self._tensors else self.inner).ready(slot, grad)


def reduce_on_every_stage() -> None:
    def build_reduction(context: SessionContext, sharded_model: ShardedModel) -> GradientReduction:
        mesh = context.mesh
        sums = UnorderedSum(context.collective(mesh.axes["shard"]), context.collective(mesh.replica))
        inner = BucketReducer(sharded_model.computes, sharded_model.parts, sums, context.bucket_bytes)
        shared = [held for held in sharded_model.held.values() if held.holders]
        tensors = {held.computes: sharded_model.computes[held.computes] for held in shared}
        return AmongOthers(inner, tensors, mesh.subgroup_along("pipeline", shared[0].holders), context.net)

    every_step.build_gradient_reduction = build_reduction


@pytest.mark.capability("D1")
def test_tied_weights_that_every_stage_sums_by_itself_drift_apart() -> None:
    """The mutation twin."""
    ranks = run_ranks(tied_weights, 6, "int8", reduce_on_every_stage)
    assert any(values != ranks[0] for values in ranks)


class Counts(torch.optim.SGD):
    """Keeps a plain number for every parameter."""

    def step(self, closure: Any = None) -> None:
        super().step(closure)
        for p in self.param_groups[0]["params"]:
            self.state[p]["updates"] = self.state[p].get("updates", 0) + 1


@pytest.mark.capability("D1", "Z1")
@pytest.mark.parametrize("strategy", [TWO_STAGES, "replicas=1 shard=2 zero=1"])
def test_numbers_in_the_optimizer_of_another_rank_are_in_the_snapshot(strategy: str) -> None:
    recipe = digits(strategy).replace(optimizer=OptimizerRecipe())

    def counted() -> Task:
        return replace(make_task(recipe), optimizer=lambda model: Counts(model.parameters(), lr=0.05))

    def numbers(cluster: Cluster) -> dict[str, int]:
        session = build_test_session(cluster, recipe, counted)
        list(session.rounds())
        return dict(session.snapshot().scalars()["optimizer"])

    for found in run_ranks(numbers, 2):
        assert found == {f"layers.{k}.{kind}/updates": 4 for k in (0, 3, 6) for kind in ("weight", "bias")}


@pytest.mark.capability("D1")
def test_stages_send_the_bytes_of_activations_and_a_description_of_each() -> None:
    """By the backend; and in memory, where each is whole."""

    def sent(cluster: Cluster) -> list[tuple[int, int]]:
        found = []
        for route in ("native", "auto"):
            session = build_test_session(cluster, digits(f"{TWO_STAGES} route={route}"))
            entry = session.net.ledger.rows.get(("send", "pipeline"), LedgerEntry())
            calls, payload = entry.calls, entry.payload_bytes  # the loss was tried before the first step
            list(session.rounds())
            entry = session.net.ledger.rows["send", "pipeline"]
            found.append((entry.calls - calls, entry.payload_bytes - payload))
            session.close()
        return found

    def counted(images: list[int], first: int) -> tuple[int, int]:
        """4 steps; the first part of a message is as long as the message before."""
        calls = num_bytes = 0
        for length in [512 + 4 * 48 * n for n in images] * 4:  # an image has 48 features
            calls += 1 if length <= first else 2
            num_bytes += first + (0 if length <= first else length - 512)
            first = length
        return calls, num_bytes

    whole = 4 * 4, 4 * (4 * 512 + 4 * 48 * 46)
    assert run_ranks(sent, 2) == [
        [counted([11, 12, 11, 12], first=512 + 4 * 48 * 2), whole],  # two images were tried
        [counted([12, 11, 12, 11], first=512), whole],
    ]
