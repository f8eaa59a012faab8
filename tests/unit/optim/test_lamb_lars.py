"""LAMB and LARS at the edges: norms of 0, empty and complex tensors, no decay, rate 0, exclusions."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from paceline.optim import Lamb, Lars, Muon, build_optimizer
from paceline.optim.muon import assign_by_cost
from paceline.recipe.optimizer_recipe import OptimizerRecipe

KINDS = (Lamb, Lars)


def step(kind: Any, p: Tensor, grad: Tensor, **options: Any) -> Tensor:
    parameter = nn.Parameter(p.clone())
    parameter.grad = grad
    kind([parameter], **options).step()
    return parameter.detach()


@pytest.mark.capability("J5")
@pytest.mark.parametrize("kind", KINDS)
def test_a_norm_of_zero_scales_by_one(kind: Any) -> None:
    zero, one = torch.zeros(3, 2, dtype=torch.float64), torch.ones(3, 2, dtype=torch.float64)
    from_zero = step(kind, zero, 2 * one, lr=0.5)
    # Adam's first update has length 1 in every value, that of SGD is the gradient.
    expected = -0.5 * one if kind is Lamb else -0.5 * 2 * one
    assert torch.allclose(from_zero, expected, atol=1e-6)
    assert torch.equal(step(kind, one, zero, lr=0.5), one)
    assert torch.isfinite(step(kind, zero, zero, lr=0.5, weight_decay=0.1)).all()
    assert torch.equal(step(kind, one, one, lr=0.0), one)


@pytest.mark.parametrize("kind", KINDS)
def test_a_tensor_without_values_is_no_error(kind: Any) -> None:
    empty = nn.Parameter(torch.zeros(0, 4))
    full = nn.Parameter(torch.ones(2, 4))
    empty.grad, full.grad = torch.zeros(0, 4), torch.ones(2, 4)
    kind([empty, full], lr=0.1).step()
    assert not torch.equal(full, torch.ones(2, 4)) and torch.isfinite(full).all()


@pytest.mark.parametrize("kind", KINDS)
def test_a_complex_tensor_is_two_real_ones(kind: Any) -> None:
    generator = torch.Generator().manual_seed(0)
    p, grad = (torch.randn(3, 4, 2, dtype=torch.float64, generator=generator) for _ in range(2))
    options = {"lr": 0.1, "weight_decay": 0.2}
    found = step(kind, torch.view_as_complex(p), torch.view_as_complex(grad), **options)
    assert torch.allclose(torch.view_as_real(found), step(kind, p, grad, **options), rtol=0, atol=1e-15)


def test_exclusions_go_by_shape_and_type_and_not_by_name() -> None:
    class Odd(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embed = nn.Embedding(5, 4)
            self.planes = nn.LayerNorm((3, 4))
            self.bias = nn.Linear(4, 4, bias=False)
            self.norm = nn.Linear(4, 4)
            self.b1 = nn.Parameter(torch.zeros(4))

    def sides(**fields: Any) -> tuple[set[str], set[str]]:
        groups = build_optimizer(
            Odd(), OptimizerRecipe(weight_decay=0.1, **{"name": "lamb"} | fields), fused_allowed=True
        ).param_groups
        adapted = {n for g in groups if g["adapt"] for n in g["param_names"]}
        assert all(g["weight_decay"] == 0.0 for g in groups if not g["adapt"])
        return adapted, {n for g in groups if not g["adapt"] for n in g["param_names"]}

    adapted, excluded = sides()
    assert adapted == {"embed.weight", "bias.weight", "norm.weight"}
    assert excluded == {"planes.weight", "planes.bias", "norm.bias", "b1"}
    assert "embed.weight" in sides(exclude=["embeddings"], name="lars")[1]
    assert sides(exclude=[], decay_on="all")[1] == set()


def test_work_goes_to_the_rank_with_the_least_so_far() -> None:
    assert assign_by_cost([1, 5, 4, 2, 2], 2) == [1, 0, 1, 1, 0]
    assert assign_by_cost([1, 1], 4) == [0, 1] and assign_by_cost([], 3) == []


def test_muon_in_float64_is_that_of_bfloat16_up_to_its_rounding() -> None:
    generator = torch.Generator().manual_seed(0)
    p, grad = (torch.randn(12, 7, generator=generator) for _ in range(2))
    found = step(Muon, p.double(), grad.double(), lr=1.0) - p.double()
    half = step(torch.optim.Muon, p, grad, lr=1.0) - p
    assert float((found - half).norm() / half.norm()) < 0.02
    assert torch.equal(step(Muon, p, grad, lr=1.0), step(torch.optim.Muon, p, grad, lr=1.0))
