"""Every optimizer by name: parameters that are zero, empty or complex, and a rate of 0."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from paceline.errors import TaskError
from paceline.optim import Muon, build_optimizer
from paceline.optim.adabound import AdaBound
from paceline.recipe.optimizer_recipe import OptimizerRecipe
from paceline.recipe.registry.optimizer_specs import OPTIMIZER_SPECS

WORDS = [spec.word for spec in OPTIMIZER_SPECS]
TAKES_NO_COMPLEX = ("adafactor", "newton_cg")
ODD = {
    "empty": torch.zeros(0, 4),
    "empty vector": torch.zeros(0),
    "complex": torch.ones(3, 2, dtype=torch.complex64),
}


class Odd(nn.Module):
    def __init__(self, odd: Tensor) -> None:
        super().__init__()
        self.full, self.zero = nn.Parameter(torch.ones(3, 2)), nn.Parameter(torch.zeros(3, 2))
        self.odd = nn.Parameter(odd.clone())

    def forward(self) -> Tensor:
        weights = torch.arange(6.0).view(3, 2)
        return self.full.square().sum() + (self.zero * weights).sum() + self.odd.abs().square().sum()


@pytest.mark.parametrize("lr", [0.05, 0.0])
@pytest.mark.parametrize("kind", ODD)
@pytest.mark.parametrize("word", WORDS)
def test_every_optimizer_updates_what_it_can_or_refuses_it(word: str, kind: str, lr: float) -> None:
    model = Odd(ODD[kind])
    options = {"switch_update": 2} if word == "adam_to_sgd" else {}
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
    assert moved == ([False] * 3 if lr == 0 and word != "rprop" else [True, moved[1], kind == "complex"])


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
