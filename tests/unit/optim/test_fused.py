"""PyTorch's fused kernels are taken only where they are right: types, memory formats, late gradients."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from paceline.optim import build_optimizer, fused_is_supported
from paceline.recipe import OptimizerRecipe


@pytest.mark.capability("J1")
@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16, torch.float16])
@pytest.mark.parametrize(
    "fields", [{"momentum": 0.0}, {"momentum": 0.9}, {"momentum": 0.9, "nesterov": True}]
)
def test_sgd_is_the_formula_in_every_type(dtype: torch.dtype, fields: dict[str, float]) -> None:
    """The fused kernel of PyTorch is 0.1 off in half types from 16 values on."""
    generator = torch.Generator().manual_seed(0)
    start, *grads = (
        torch.randn(65, generator=generator, dtype=torch.float64).to(dtype) / 4 for _ in range(5)
    )
    p = nn.Parameter(start.clone())
    recipe = OptimizerRecipe(name="sgd", lr=0.1, **fields)
    optimizer = build_optimizer(nn.ParameterList([p]), recipe, fused_allowed=True)
    right, memory = start.double(), torch.zeros(65, dtype=torch.float64)
    for grad in grads:
        p.grad = grad.clone()
        optimizer.step()
        memory = fields["momentum"] * memory + grad.double()
        right -= 0.1 * (grad.double() + 0.9 * memory if fields.get("nesterov") else memory)
    assert (p.detach().double() - right).abs().max() <= 8 * torch.finfo(dtype).eps


@pytest.mark.capability("J1")
@pytest.mark.parametrize("name", ["sgd", "adam", "adamw", "rmsprop"])
def test_a_gradient_that_comes_late_is_trained_as_without_fused_kernels(name: str) -> None:
    """The second parameter has none in the first three steps, the third never has one."""
    ends = []
    for fused_allowed in (True, False):
        early, late, never = (nn.Parameter(torch.linspace(-1, 1, 40)) for _ in range(3))
        fields = {"momentum": 0.9} if name in ("sgd", "rmsprop") else {}
        model = nn.ParameterList([early, late, never])
        recipe = OptimizerRecipe(name=name, lr=0.1, **fields)
        optimizer = build_optimizer(model, recipe, fused_allowed=fused_allowed)
        for step in range(6):
            early.grad = torch.linspace(0, step + 1, 40)
            late.grad = torch.linspace(-1, 2, 40) if step >= 3 else None
            optimizer.step()
        assert torch.equal(never, torch.linspace(-1, 1, 40))
        ends.append((early, late))
    for fused, plain in zip(*ends, strict=True):
        assert torch.allclose(fused, plain, rtol=0, atol=1e-6)


@pytest.mark.capability("A2")
@pytest.mark.parametrize("name", ["sgd", "adam", "adamw"])
def test_fused_kernels_are_left_alone_where_parameters_are_not_contiguous(name: str) -> None:
    """They pair values by their place in memory: a gradient of the usual order would go elsewhere."""
    conv = nn.Conv2d(3, 4, 3).to(memory_format=torch.channels_last)
    matrix = nn.Parameter(torch.zeros(4, 3).t())
    assert not fused_is_supported(name, conv.named_parameters())
    assert not fused_is_supported(name, [("matrix", matrix)])
    assert fused_is_supported(name, nn.Conv2d(3, 4, 3).named_parameters())
