"""Every optimizer by name: parameters that are zero, empty, complex, unused or masked, groups without decay,
and a rate of 0.

The other bad input of optimizers: tests/unit/optim/test_kfac.py (singular factors),
tests/parity/test_adam_to_sgd.py (a switch before the first update) and
tests/unit/models/test_fused_operations.py (a compiled form that fails).
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from paceline.errors import TaskError
from paceline.job.cluster import Cluster
from paceline.optim import Muon, build_optimizer
from paceline.optim.adabound import AdaBound
from paceline.recipe.optimizer_recipe import OptimizerRecipe
from paceline.recipe.registry.optimizer_specs import OPTIMIZER_SPECS
from paceline.testing.parity import build_test_session
from tests.recipes import recipe_of

WORDS = [spec.word for spec in OPTIMIZER_SPECS]
TAKES_NO_COMPLEX = ("adafactor", "newton_cg")
ODD = {
    "empty": torch.zeros(0, 4),
    "empty vector": torch.zeros(0),
    "complex": torch.ones(3, 2, dtype=torch.complex64),
}
DECAYS = {spec.word: [key for key in ("weight_decay", "l2") if key in spec.reads] for spec in OPTIMIZER_SPECS}


OPTIONS: dict[str, dict[str, Any]] = {"adam_to_sgd": {"switch_update": 2}, "asgd": {"lambd": 0.0}}


class Odd(nn.Module):
    def __init__(self, odd: Tensor) -> None:
        super().__init__()
        self.full, self.zero = nn.Parameter(torch.ones(3, 2)), nn.Parameter(torch.zeros(3, 2))
        self.odd = nn.Parameter(odd.clone())
        self.never_runs = nn.Linear(2, 2, bias=False)

    def forward(self) -> Tensor:
        weights = torch.arange(6.0).view(3, 2)
        return self.full.square().sum() + (self.zero * weights).sum() + self.odd.abs().square().sum()


@pytest.mark.parametrize("lr", [0.05, 0.0])
@pytest.mark.parametrize("kind", ODD)
@pytest.mark.parametrize("word", WORDS)
def test_every_optimizer_updates_what_it_can_or_refuses_it(word: str, kind: str, lr: float) -> None:
    model = Odd(ODD[kind])
    options = OPTIONS.get(word, {})
    before = [p.detach().clone() for p in model.parameters()]

    def train() -> None:
        optimizer = build_optimizer(model, OptimizerRecipe(name=word, lr=lr, **options), True)
        for _ in range(3):
            optimizer.zero_grad()
            model().backward()
            optimizer.step(model if word == "newton_cg" else None)

    if kind == "complex" and word in TAKES_NO_COMPLEX:
        with pytest.raises(TaskError, match="got a complex parameter"):
            train()
        return
    train()
    assert all(torch.isfinite(p).all() for p in model.parameters())
    moved = [not torch.equal(old, p) for old, p in zip(before, model.parameters(), strict=True)]
    # The rate of Rprop is its first step size, which has a least value of its own.
    assert moved == (
        [False] * 4 if lr == 0 and word != "rprop" else [True, moved[1], kind == "complex", False]
    )


class Decayed(nn.Module):
    """A matrix and a vector whose gradients are 0, beside parameters that have others."""

    def __init__(self) -> None:
        super().__init__()
        self.rest = nn.Linear(3, 2)
        self.matrix, self.vector = nn.Parameter(torch.ones(2, 3)), nn.Parameter(torch.ones(3))

    def forward(self) -> Tensor:
        still = 0.0 * (self.matrix.sum() + self.vector.sum())
        return self.rest(torch.ones(4, 3)).square().sum() + still


@pytest.mark.parametrize("word", [word for word in WORDS if DECAYS[word]])
def test_a_group_without_decay_stays_where_the_other_one_shrinks(word: str) -> None:
    torch.manual_seed(0)
    model = Decayed()
    recipe = OptimizerRecipe(name=word, lr=0.05, **OPTIONS.get(word, {}), **{DECAYS[word][0]: 0.1})
    optimizer = build_optimizer(model, recipe, True)
    # Three updates: the second moments of some begin with the first.
    for _ in range(3):
        optimizer.zero_grad()
        model().backward()
        optimizer.step(model if word == "newton_cg" else None)
    assert torch.equal(model.vector, torch.ones(3))
    assert torch.isfinite(model.matrix).all() and float(model.matrix.detach().max()) < 1.0


@pytest.mark.parametrize("word", WORDS)
def test_every_optimizer_goes_on_where_a_mask_leaves_a_matrix_one_value_or_refuses_masks(word: str) -> None:
    """The last layer has 10 weights, of which 9 are masked; with 100 % the recipe is refused."""
    recipe = recipe_of(
        "replicas=1",
        task="digits",
        steps=3,
        options={"model": "mlp", "hidden": [1]},
        optimizer={"name": word, "lr": 0.01, **OPTIONS.get(word, {})},
        batch={"size": 8, "shards": 1},
        sparsity={"target": 0.99, "first": 0, "last": 1, "every": 1},
    )
    session = build_test_session(Cluster.single(), recipe)
    list(session.rounds())
    found = dict(session.state.model.named_parameters())
    session.close()
    assert all(torch.isfinite(p).all() for p in found.values())
    assert [int(p.count_nonzero()) for p in found.values() if p.dim() > 1] == [1, 1]


def test_adabound_takes_a_complex_value_for_two_real_ones() -> None:
    generator = torch.Generator().manual_seed(0)
    values, *grads = (torch.randn(4, 3, 2, dtype=torch.float64, generator=generator) for _ in range(4))
    real, wave = nn.Parameter(values.clone()), nn.Parameter(torch.view_as_complex(values))
    for p in (real, wave):
        optimizer = AdaBound([p], lr=0.1, weight_decay=0.1)
        for grad in grads:
            p.grad = torch.view_as_complex(grad) if p.is_complex() else grad
            optimizer.step()
    assert torch.equal(torch.view_as_real(wave.detach()), real.detach())


def test_muon_refuses_a_complex_matrix() -> None:
    p = nn.Parameter(torch.ones(3, 2, dtype=torch.complex64))
    p.grad = torch.ones_like(p)
    with pytest.raises(TaskError, match="complex matrix"):
        Muon([p]).step()
