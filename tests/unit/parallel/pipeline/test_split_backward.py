"""A backward in two halves has the bits of one, whatever the weights are used for."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from paceline.models.gpt import GPTBlock, GPTConfig
from paceline.parallel.pipeline.split_backward import split_backward


class Odd(nn.Module):
    """Weights: used twice, not used, added, and in a branch apart from the input."""

    def __init__(self) -> None:
        super().__init__()
        self.twice, self.unused, self.once = (nn.Linear(8, 8) for _ in range(3))
        self.added, self.apart = nn.Parameter(torch.randn(8)), nn.Parameter(torch.randn(8))

    def forward(self, x: Tensor) -> Tensor:
        x = self.twice(torch.tanh(self.twice(x))) + self.added
        return self.once(x) * self.apart.exp().sum()


class Recomputed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Sequential(nn.Linear(8, 16), nn.GELU(), nn.Linear(16, 8))

    def forward(self, x: Tensor) -> Tensor:
        return checkpoint(self.inner, x, use_reentrant=False)


MODELS = {
    "blocks": lambda: nn.Sequential(*(GPTBlock(GPTConfig(width=8, heads=2, context=8)) for _ in range(2))),
    "odd": Odd,
    "recomputed": Recomputed,
}


@pytest.mark.capability("D11")
@pytest.mark.parametrize("takes", [True, False], ids=["inputs", "no inputs"])
@pytest.mark.parametrize("kind", MODELS)
def test_both_halves_have_the_bits_of_a_whole_backward(kind: str, takes: bool) -> None:
    torch.manual_seed(1)
    model, grad = MODELS[kind](), torch.randn(2, 5, 8)
    x = torch.randn(2, 5, 8, requires_grad=takes)
    model(x).backward(grad)
    weights = dict(model.named_parameters())
    right = {name: p.grad for name, p in weights.items()}
    y = model(x)
    halves = split_backward([y], [x] if takes else [], [*weights.values()])
    back = halves.input_gradients([grad])
    assert [torch.equal(g, x.grad) for g in back] == [True] * takes
    found = halves.weight_gradients()
    assert {name for name, g in right.items() if g is not None} == {
        n for n, p in weights.items() if p in found
    }
    assert all(torch.equal(found[p], right[name]) for name, p in weights.items() if p in found)


@pytest.mark.capability("D11")
def test_what_a_weight_needs_is_not_computed_in_the_first_half() -> None:
    """The first half of a chain of linear layers multiplies once for each, as the second does."""
    seen: list[str] = []

    class Count(torch.utils._python_dispatch.TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            seen.append(func.name())
            return func(*args, **(kwargs or {}))

    model = nn.Sequential(*(nn.Linear(8, 8) for _ in range(4)))
    x = torch.randn(3, 8, requires_grad=True)
    halves = split_backward([model(x)], [x], [*model.parameters()])
    counts = []
    for half in (lambda: halves.input_gradients([torch.randn(3, 8)]), halves.weight_gradients):
        seen.clear()
        with Count():
            half()
        counts.append(sum(name == "aten::mm" for name in seen))
    assert counts == [4, 4]
