"""A chunk runs with other weights, and has its own afterwards."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.func import functional_call

from paceline.parallel.pipeline.forward_backward import WeightOverride


class Tied(nn.Module):
    """One weight at two places, and a frozen one."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(3, 3), nn.Linear(3, 3, bias=False)
        self.second.weight = self.first.weight
        self.scale = nn.Parameter(torch.tensor(2.0), requires_grad=False)
        self.register_parameter("none", None)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.second(self.first(x).relu()) * self.scale


def others(chunk: nn.Module) -> dict[str, torch.Tensor]:
    return {n: (p.detach() + 1).requires_grad_(p.requires_grad) for n, p in chunk.named_parameters()}


@pytest.mark.capability("D6")
def test_a_chunk_computes_with_other_weights_what_functional_call_does() -> None:
    chunk, x = Tied(), torch.randn(4, 3)
    before, weights = dict(chunk.named_parameters()), others(chunk)
    own = chunk(x)
    with WeightOverride(chunk).within(weights):
        found = chunk(x)
    right = functional_call(chunk, weights, (x,))
    assert torch.equal(found, right) and not torch.equal(found, own)
    trained = [w for w in weights.values() if w.requires_grad]
    grads = (torch.autograd.grad(y.square().sum(), trained) for y in (found, right))
    assert all(torch.equal(a, b) for a, b in zip(*grads, strict=True))
    assert {n: id(p) for n, p in chunk.named_parameters()} == {n: id(p) for n, p in before.items()}
    assert chunk.second.weight is chunk.first.weight


def test_an_error_leaves_the_parameters_where_they_were() -> None:
    chunk = Tied()
    before = [id(p) for p in chunk.parameters()]
    with pytest.raises(ValueError, match="inside"), WeightOverride(chunk).within(others(chunk)):
        raise ValueError("inside")
    with pytest.raises(KeyError), WeightOverride(chunk).within({"first.weight": torch.ones(3, 3)}):
        pass
    assert [id(p) for p in chunk.parameters()] == before and chunk.second.weight is chunk.first.weight
