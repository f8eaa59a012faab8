"""Noise that protects samples in plain training: each gradient is clipped, batches are Poisson draws."""

from __future__ import annotations

from typing import Any, cast

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import TensorDataset

from paceline import Loss, Task
from paceline.errors import RecipeError, TaskError
from paceline.job.cluster import Cluster
from paceline.models.dropout import KeyedDropout
from paceline.parallel.per_sample_gradients import PerSampleRunner
from paceline.parallel.session_context import Components
from paceline.recipe import Recipe
from paceline.testing import run_ranks
from paceline.testing.parity import build_test_session
from tests.recipes import recipe_of

pytest.importorskip("dp_accounting", reason="needs paceline[private]")
NUM_SAMPLES, SIZE, CLIP, RATE = 40, 10, 0.7, 0.3


def data() -> TensorDataset:
    generator = torch.Generator().manual_seed(4)
    x = torch.randn(NUM_SAMPLES, 3, generator=generator) * torch.linspace(0.1, 4.0, NUM_SAMPLES).unsqueeze(1)
    return TensorDataset(x, torch.randn(NUM_SAMPLES, 2, generator=generator))


def task(extra: nn.Module | None = None) -> Task:
    torch.manual_seed(2)
    model = nn.Sequential(nn.Linear(3, 5), extra or nn.Tanh(), nn.Linear(5, 2))

    def loss(model: nn.Module, batch: list[Tensor]) -> Loss:
        errors = (model(batch[0]) - batch[1]).square()
        return Loss(errors.sum(), len(batch[0]), {"largest": errors.detach().amax(1).sum()})

    return Task(model, data(), loss)


def recipe(strategy: str = "", **tables: Any) -> Recipe:
    private = {"unit": "sample", "noise": 1e-6, "clip_norm": CLIP, **tables.pop("private", {})}
    tables = {
        "steps": 3,
        "batch": {"size": SIZE, "shards": 4},
        "optimizer": {"name": "sgd", "lr": RATE},
        "debug": {"entropy_seed": 5},
        **tables,
    }
    return recipe_of(strategy, private=private, **tables)


def trained(cluster: Cluster, components: Components | None = None) -> tuple[list[Tensor], list[list[int]]]:
    """Return the weights after three steps, and the samples that each step has drawn."""
    session = build_test_session(cluster, recipe(), task, components)
    list(session.rounds())
    draws = cast(Any, session.private).draws
    batches = [draws.poisson(NUM_SAMPLES, SIZE / NUM_SAMPLES, "batch", step).tolist() for step in range(3)]
    return [p.detach() for p in session.runner.sharded_model.model.parameters()], batches


def plain(batches: list[list[int]]) -> tuple[list[Tensor], int]:
    """Return the weights of a loop over samples, and how many gradients it has clipped."""
    own, num_clipped = task(), 0
    parameters = [*own.model.parameters()]
    for batch in batches:
        sums = [torch.zeros_like(p) for p in parameters]
        for index in batch:
            loss = own.loss(own.model, [t[index : index + 1] for t in data().tensors])
            grads = torch.autograd.grad(loss.total, parameters)
            norm = float(torch.cat([g.flatten() for g in grads]).norm())
            num_clipped += norm > CLIP
            for total, g in zip(sums, grads, strict=True):
                total += g * min(1.0, CLIP / norm)
        with torch.no_grad():
            for p, total in zip(parameters, sums, strict=True):
                p -= RATE * total / SIZE
    return [p.detach() for p in parameters], num_clipped


class ClipsTheSum(PerSampleRunner):
    def _add_clipped(self, grads: list[Tensor], scale: float) -> None:
        summed = [g.sum(0, keepdim=True) for g in grads]
        super()._add_clipped(summed, scale)


def largest_difference(weights: list[Tensor], expected: list[Tensor]) -> float:
    return max(float((a - b).abs().max()) for a, b in zip(weights, expected, strict=True))


def test_samples_are_clipped_one_by_one_and_divided_by_the_expected_batch_on_any_number_of_ranks() -> None:
    weights, batches = trained(Cluster.single())
    expected, num_clipped = plain(batches)
    assert 0 < num_clipped < sum(map(len, batches)) and len({*map(len, batches)}) > 1
    assert largest_difference(weights, expected) < 1e-5
    for of_rank, drawn in run_ranks(trained, 2):
        assert drawn == batches and largest_difference(of_rank, expected) < 1e-5


def test_a_clip_after_the_sum_and_the_actual_batch_as_divisor_end_elsewhere(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    from paceline.session import private_training

    plain_batches = trained(Cluster.single())[1]
    expected, _ = plain(plain_batches)
    with monkeypatch.context() as patch:
        patch.setattr(private_training, "PerSampleRunner", ClipsTheSum)
        assert largest_difference(trained(Cluster.single())[0], expected) > 1e-3

    plain_part = private_training.add_noise_and_divide

    def divide_by_actual(private: Any, record: Any) -> None:
        plain_part(private, record)
        record.divisor = record.grads.scale * record.tally.count
        record.multiplier = 1.0 / record.divisor

    with monkeypatch.context() as patch:
        patch.setattr(private_training, "add_noise_and_divide", divide_by_actual)
        assert largest_difference(trained(Cluster.single())[0], expected) > 1e-3


def test_a_step_without_samples_is_released_too_and_the_noise_has_the_claimed_variance() -> None:
    def one_weight() -> Task:
        model = nn.Linear(2000, 1, bias=False)
        nn.init.zeros_(model.weight)

        def loss(model: nn.Module, batch: list[Tensor]) -> Loss:
            return Loss(model(batch[0]).sum(), len(batch[0]))

        return Task(model, TensorDataset(torch.zeros(1000, 2000)), loss)

    settings = recipe(steps=4, batch={"size": 1}, private={"noise": 3.0}, debug={"entropy_seed": 1})
    session = build_test_session(Cluster.single(), settings, one_weight)
    sizes, weight = list[int](), cast(Tensor, session.runner.sharded_model.model.weight)
    before = weight.detach().clone()
    for stats in session.rounds():
        assert stats.applied and stats.num_samples == 1
        sizes.append(int(stats.num_items))
        moved = (weight.detach() - before) / (RATE * 3.0 * CLIP)
        assert float(moved.var(correction=0)) == pytest.approx(1.0, abs=0.104)
        before = weight.detach().clone()
    assert 0 in sizes
    assert [*cast(Any, session.private).ledger.releases.values()] == [4]


def test_a_sample_whose_gradient_is_not_finite_adds_nothing() -> None:
    model = nn.Linear(2, 1)
    runner = cast(Any, object.__new__(PerSampleRunner))
    runner._parameters, runner._clip_norm = [*model.parameters()], 1.0
    for p in model.parameters():
        p.grad = torch.zeros_like(p)
    grads = [torch.ones(3, 1, 2), torch.ones(3, 1)]
    grads[0][1, 0, 0] = torch.nan
    runner._add_clipped(grads, 2.0)
    assert model.weight.grad is not None
    torch.testing.assert_close(model.weight.grad, torch.full((1, 2), 2 * 2.0 / 3.0**0.5))


def test_what_mixes_samples_is_refused_by_name() -> None:
    for extra, match in (
        (nn.BatchNorm1d(5), "BatchNorm1d, whose statistics mix samples"),
        (KeyedDropout(0.5), "KeyedDropout, whose masks are those of a whole micro-batch"),
    ):
        with pytest.raises(TaskError, match=match):
            build_test_session(Cluster.single(), recipe(), lambda extra=extra: task(extra))
    for strategy in ("shard=2 zero=1", "pipeline=2", "tensor=2", "lanes=2", "sync=local:2", "codec=int8"):
        with pytest.raises(RecipeError, match=r"expected sync=every-step on replicas of whole models"):
            recipe(strategy)
    with pytest.raises(RecipeError, match="reads nothing but gradients"):
        recipe(optimizer={"name": "kfac"})
    with pytest.raises(RecipeError, match="need as many, and there are 40"):
        build_test_session(Cluster.single(), recipe(batch={"size": 41}), task)
