"""Newton-CG: logistic regression to rounding in few steps, equal on one and four ranks; products that are
not summed over ranks fail.
"""

from __future__ import annotations

from itertools import pairwise
from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import binary_cross_entropy_with_logits

from paceline import Loss, Task
from paceline.errors import RecipeError, StrategyError, TaskError
from paceline.job.cluster import Cluster
from paceline.optim import NewtonCG
from paceline.recipe import Recipe
from paceline.testing import run_ranks
from paceline.testing.parity import CPU, build_test_session
from paceline.verification import compare_with_oracle
from paceline.verification.verification_report import conclusion_lines
from tests.recipes import recipe_of

L2 = 1e-3
PRODUCT_OF_CLASS = NewtonCG._product


def logistic_task() -> Task:
    """The 569 samples of breast-cancer, of which each is a batch of its own size on 4 ranks."""
    datasets = pytest.importorskip("sklearn.datasets")
    x, y = (torch.tensor(t, dtype=torch.float64) for t in datasets.load_breast_cancer(return_X_y=True))
    x = (x - x.mean(0)) / x.std(0)
    model = nn.Linear(x.shape[1], 1).double()
    nn.init.zeros_(model.weight)
    nn.init.zeros_(model.bias)

    def loss(model: nn.Module, batch: Any) -> Loss:
        inputs, targets = batch
        logits = model(inputs)[:, 0]
        return Loss(binary_cross_entropy_with_logits(logits, targets, reduction="sum"), len(targets))

    return Task(model, list(zip(x, y, strict=True)), loss)


def logistic(strategy: str, steps: int = 15, **settings: Any) -> Recipe:
    values = {"optimizer": {"name": "newton_cg", "l2": L2}, "batch": {"size": 569, "shards": 5}} | settings
    return recipe_of(strategy, steps=steps, **values)


def gradient_norm(model: Any) -> float:
    """Of the whole objective, computed apart from the session."""
    task = logistic_task()
    model.zero_grad()
    inputs, targets = (torch.stack(column) for column in zip(*task.data, strict=True))
    loss = task.loss(model, (inputs, targets))
    (loss.total / loss.count + L2 / 2 * model.weight.square().sum()).backward()
    return float(torch.cat([p.grad.reshape(-1) for p in model.parameters()]).norm())


def norms_and_end(cluster: Cluster, strategy: str) -> tuple[list[float], Tensor]:
    session = build_test_session(cluster, logistic(strategy), logistic_task)
    norms = [gradient_norm(session.state.model) for _ in session.rounds()]
    end = torch.cat([p.detach().reshape(-1) for p in session.state.model.parameters()])
    session.close()
    return norms, end


def norms_of_rank_means(cluster: Cluster) -> list[float]:
    """The mutation twin: products are means over ranks of means over the unequal numbers of their samples."""

    def product(optimizer: NewtonCG, *arguments: Any) -> Tensor:
        add = optimizer._sum
        with patch.object(optimizer, "_sum", lambda x: add(x / x[-1])):
            return PRODUCT_OF_CLASS(optimizer, *arguments)

    with patch.object(NewtonCG, "_product", product):
        return norms_and_end(cluster, "replicas=4")[0]


@pytest.mark.capability("J7", "Z1", "Z2")
def test_logistic_regression_is_solved_in_15_steps_on_one_and_four_ranks() -> None:
    norms, right = norms_and_end(Cluster.single(), "replicas=1")
    assert min(norms) < 1e-8 < norms[0], norms
    for found, end in run_ranks(norms_and_end, 4, "replicas=4"):
        assert min(found) < 1e-8
        assert float((end - right).abs().max()) < 1e-9
    solved = next(step for step, norm in enumerate(norms) if norm < 1e-8)
    assert run_ranks(norms_of_rank_means, 4)[0][solved] > 1e-7


def network() -> Task:
    """A loss with negative curvature, dropout and running statistics."""
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Linear(5, 6), nn.BatchNorm1d(6), nn.Tanh(), nn.Dropout(0.2), nn.Linear(6, 1), nn.Flatten(0)
    ).double()
    x = torch.randn(72, 5, dtype=torch.float64)

    def loss(model: nn.Module, batch: Tensor) -> Loss:
        return Loss((model(batch) - batch.prod(1)).square().sum(), len(batch))

    return Task(model, list(x), loss)


def small(strategy: str, **settings: Any) -> Recipe:
    values = {
        "optimizer": {"name": "newton_cg", "damping": 0.01},
        "batch": {"size": 24, "shards": 4},
    } | settings
    return recipe_of(strategy, steps=6, **values)


@pytest.mark.capability("J7", "Z2")
def test_a_network_is_verified_and_resumes_to_the_bit() -> None:
    def found(cluster: Cluster) -> Any:
        report = compare_with_oracle(small("replicas=2"), network(), cluster, CPU, 4)
        first = build_test_session(cluster, small("replicas=2"), network)
        losses = [stats.loss for _, stats in zip(range(3), first.rounds(), strict=False)]
        snapshot = first.snapshot()
        saved = {name: t.detach().clone() for name, t in snapshot.tensors().items()}
        second = build_test_session(cluster, small("replicas=2"), network)
        second.restore(saved, snapshot.scalars())
        ends = []
        for session in (first, second):
            losses += [stats.loss for stats in session.rounds()]
            ends.append({name: t.detach().clone() for name, t in session.snapshot().tensors().items()})
            session.close()
        return report, losses, ends

    for report, losses, (right, resumed) in run_ranks(found, 2):
        assert report.ok and report.steps == 4, conclusion_lines(report)
        assert losses[-1] < 0.9 * losses[0]
        assert all(torch.equal(right[name], resumed[name]) for name in right)


def test_what_it_cannot_do_is_refused_with_the_reason() -> None:
    def texts(cluster: Cluster) -> list[str]:
        found = []
        for strategy in ("replicas=1 shard=2 zero=1", "replicas=1 pipeline=2"):
            with pytest.raises(StrategyError, match="NewtonCG needs whole layers and whole samples") as error:
                build_test_session(cluster, small(strategy), network)
            found.append(str(error.value))
        for settings in ({"batch": {"size": 24, "shards": 4, "reduction": "sum"}}, {"reproducible": True}):
            with pytest.raises((StrategyError, RecipeError)) as error:
                build_test_session(cluster, small("replicas=2", **settings), network)
            found.append(str(error.value))
        return found

    words = ("shard: ", "pipeline: ", "batch.reduction", "reproducible = true")
    for found in run_ranks(texts, 2):
        assert all(word in text for word, text in zip(words, found, strict=True)), found


def test_a_plain_loop_gives_the_loss_as_a_closure() -> None:
    """A rate of 0, gradients of 0 and parameters without values or gradients move nothing; a decrease of the
    loss is kept where curvature is negative.
    """
    p, empty, unused = (
        nn.Parameter(torch.tensor([0.1, 2.0], dtype=torch.float64)),
        nn.Parameter(torch.zeros(0)),
        nn.Parameter(torch.ones(1)),
    )
    optimizer = NewtonCG([p, empty, unused])

    def loss() -> Tensor:
        return (p[0] ** 4 - p[0] ** 2 + p[1] ** 2) + empty.sum()

    values = []
    for _ in range(12):
        optimizer.zero_grad()
        loss().backward()
        values.append(optimizer.step(loss))
    assert all(b <= a + 1e-14 for a, b in pairwise(values))
    assert values[-1] == pytest.approx(-0.25, abs=1e-6)
    for options in optimizer.param_groups:
        options["lr"] = 0.0
    before = p.detach().clone()
    loss().backward()
    optimizer.step(loss)
    assert torch.equal(p, before) and torch.equal(unused, torch.ones(1).double())
    with pytest.raises(TaskError, match="evaluates the loss in its step"):
        NewtonCG([p]).step()
    with pytest.raises(TaskError, match="complex"):
        NewtonCG([nn.Parameter(torch.ones(2, dtype=torch.complex64))])
