"""Adam becomes SGD with momentum: the formula by hand, both ends, and no jump of the loss between them."""

from __future__ import annotations

import math
from itertools import pairwise
from typing import Any

import pytest
import torch
from torch import nn

from paceline.job.cluster import Cluster
from paceline.optim.adabound import AdaBound
from paceline.recipe import Recipe
from paceline.testing.parity import build_test_session


def steps(optimizer: type[torch.optim.Optimizer], count: int, **settings: Any) -> torch.Tensor:
    """Some updates by seeded gradients."""
    draw = torch.Generator().manual_seed(3)
    p = nn.Parameter(torch.linspace(-1, 1, 5))
    one = optimizer([p], **settings)
    for _ in range(count):
        p.grad = torch.randn(5, generator=draw)
        one.step()
    return p.detach()


def test_it_is_the_algorithm_of_the_paper() -> None:
    lr, (b1, b2), final, gamma, eps = 0.02, (0.8, 0.9), 0.05, 0.1, 1e-8
    draw = torch.Generator().manual_seed(3)
    x, m, v = torch.linspace(-1, 1, 5).double().tolist(), [0.0] * 5, [0.0] * 5
    for t in range(1, 31):
        for i, g in enumerate(torch.randn(5, generator=draw).double().tolist()):
            m[i], v[i] = b1 * m[i] + (1 - b1) * g, b2 * v[i] + (1 - b2) * g * g
            rate = lr * math.sqrt(1 - b2**t) / (1 - b1**t) / (math.sqrt(v[i]) + eps)
            low, high = final * (1 - 1 / (gamma * t + 1)), final * (1 + 1 / (gamma * t))
            x[i] -= min(max(rate, low), high) * m[i]
    found = steps(AdaBound, 30, lr=lr, betas=(b1, b2), final_lr=final, gamma=gamma)
    assert torch.allclose(found.double(), torch.tensor(x).double(), atol=1e-6)


@pytest.mark.capability("J18")
def test_it_begins_as_adam_and_ends_as_sgd_with_momentum() -> None:
    settings = {"lr": 0.01, "betas": (0.9, 0.99)}
    adam = steps(torch.optim.Adam, 20, **settings)
    assert torch.allclose(steps(AdaBound, 20, **settings, gamma=1e-9), adam, atol=1e-6)
    closed = steps(AdaBound, 20, **settings, final_lr=0.3, gamma=1e9)
    sgd = steps(torch.optim.SGD, 20, lr=0.3 * 0.1, momentum=0.9)  # a moment is 1 - beta of a momentum
    assert torch.allclose(closed, sgd, atol=1e-5) and not torch.allclose(closed, adam, atol=1e-3)


@pytest.mark.capability("J18")
def test_the_loss_has_no_jump_on_the_way() -> None:
    """Digits: rates of all values go from Adam's to SGD's within 60 steps."""

    def losses(**optimizer: Any) -> list[float]:
        recipe = Recipe(
            task="digits",
            options={"model": "mlp", "hidden": [32]},
            steps=80,
            batch={"size": 256, "shards": 1},
            optimizer=optimizer,
        )
        session = build_test_session(Cluster.single(), recipe)
        found = [stats.loss for stats in session.rounds()]
        session.close()
        return found

    found = losses(name="adabound", lr=5e-3, final_lr=0.5, gamma=0.05)
    adam = losses(name="adam", lr=5e-3)
    assert found[-1] < 0.2 * found[0]
    most = max(after - before for before, after in pairwise(adam[5:]))
    assert max(after - before for before, after in pairwise(found[5:])) < most + 0.15


def test_a_schedule_lowers_both_rates() -> None:
    p = nn.Parameter(torch.ones(1))
    one = AdaBound([p], lr=0.1, final_lr=1.0, gamma=1e9)
    one.param_groups[0]["lr"] = 0.05
    p.grad = torch.ones(1)
    one.step()
    assert float(p.detach()) == pytest.approx(1 - 0.5 * 0.1)  # half of final_lr, times the first moment
