"""Kinds of models by how their gradients come about: hooks, experts, reuse, recomputation, ties, closures.

Only torch is imported.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from tests.zoo.kind import CLASSES, NUM_SAMPLES, SIZE, WIDTH, Kind, Made, chain, classes, mlp, points


def gradient_hook() -> Made:
    """The first row of a matrix shall not be trained."""
    made = mlp()
    mask = torch.ones(8, 1)
    mask[0] = 0.0
    made.model[0].weight.register_hook(lambda grad: grad * mask)
    return made


def hook_that_clips() -> Made:
    """What it makes of a sum is not the sum of what it makes of the parts."""
    made = mlp()
    made.model[0].weight.register_hook(lambda grad: grad.clamp(-0.02, 0.02))
    return made


def hook_after_accumulation() -> Made:
    """It changes the gradient in place, once it is there."""
    made = mlp()

    def halve_and_clip(p: nn.Parameter) -> None:
        p.grad.mul_(0.5).clamp_(-0.02, 0.02)

    made.model[0].weight.register_post_accumulate_grad_hook(halve_and_clip)
    return made


class HalvesGradients(nn.Module):
    """A hook on what goes out: the gradient that comes back is halved and clipped, once."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        y = self.layer(x)
        if y.requires_grad:
            y.register_hook(lambda grad: (0.5 * grad).clamp(-0.05, 0.05))
        return y


def activation_hook() -> Made:
    return mlp(HalvesGradients(), nn.Tanh(), HalvesGradients())


def module_hooks() -> Made:
    """Of the module, forward and backward."""
    made = mlp(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 8))
    for layer in made.model[2], made.model[4]:
        layer.register_forward_hook(lambda module, args, out: 2.0 * out)
        layer.register_full_backward_pre_hook(lambda module, grads: tuple(0.5 * g for g in grads))
        layer.register_full_backward_hook(lambda module, into, out: tuple(0.5 * g for g in into))
    return made


class Experts(nn.Module):
    """The sample names its expert."""

    def __init__(self) -> None:
        super().__init__()
        self.experts = nn.ModuleList(nn.Linear(WIDTH, 8) for _ in range(2))
        self.head = nn.Linear(8, CLASSES)

    def forward(self, x: Tensor, which: Tensor) -> Tensor:
        y = x.new_zeros(len(x), 8)
        for number, expert in enumerate(self.experts):
            rows = (which == number).nonzero()[:, 0]
            if len(rows):
                y = y.index_add(0, rows, expert(x[rows]))
        return self.head(y.tanh())


def _experts(which: Callable[[int], int]) -> Made:
    samples = [(x, torch.tensor(which(i)), y) for i, (x, y) in enumerate(points())]

    def loss(model: nn.Module, batch: Any) -> tuple[Tensor, float]:
        x, expert, y = batch
        return F.cross_entropy(model(x, expert), y, reduction="sum"), len(y)

    return Made(Experts(), samples, loss)


def late_expert() -> Made:
    """The second expert is used from the third step on."""
    return _experts(lambda i: int(i >= 2 * SIZE))


def routed_experts() -> Made:
    """In every step only a few samples use the second expert: some shards have no gradient of it."""
    return _experts(lambda i: int(i % SIZE == 3))


def layer_reused() -> Made:
    again = nn.Linear(8, 8)
    return chain(
        nn.Linear(WIDTH, 8), again, nn.Tanh(), again, nn.Tanh(), again, nn.Tanh(), nn.Linear(8, CLASSES)
    )


class Checkpointed(nn.Module):
    """Computes a block again in backward, in the older way."""

    def __init__(self, block: nn.Module) -> None:
        super().__init__()
        self.block = block

    def forward(self, x: Tensor) -> Tensor:
        return checkpoint(self.block, x, use_reentrant=True)


def reentrant() -> Made:
    block = nn.Sequential(nn.Linear(8, 8), nn.Tanh())
    return chain(nn.Linear(WIDTH, 8), Checkpointed(block), nn.Linear(8, CLASSES))


class _Rests(torch.autograd.Function):
    """Gives the backward pass time, so that what was handed on before it is under way."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        time.sleep(0.01)
        return grads[0]


class Rest(nn.Module):
    """The identity, slowly."""

    def forward(self, x: Tensor) -> Tensor:
        return _Rests.apply(x)


def reentrant_reused() -> Made:
    """One block behind two checkpoints: its gradient is complete after the second only."""
    block = nn.Sequential(nn.Linear(8, 8), nn.Tanh())
    links = [Checkpointed(block), Rest(), Checkpointed(block)]
    return chain(nn.Linear(WIDTH, 8), *links, nn.Linear(8, CLASSES))


def tied_weights() -> Made:
    """The last matrix is the first."""
    samples = [(torch.randint(CLASSES, (2,)), torch.randint(CLASSES, ())) for _ in range(NUM_SAMPLES)]
    first, last = nn.EmbeddingBag(CLASSES, 8, mode="sum"), nn.Linear(8, CLASSES)
    last.weight = first.weight
    return chain(first, nn.Linear(8, 8), nn.Tanh(), last, samples=samples)


def loss_closes_over_the_model() -> Made:
    """The loss takes the model from around it, not the one that it is given."""
    made = mlp()
    outer = made.model
    return Made(outer, made.samples, lambda model, batch: classes(outer, batch))


def loss_closes_over_a_part() -> Made:
    """A penalty on a layer that the loss holds by itself."""
    made = mlp()
    layer = made.model[0]

    def loss(model: nn.Module, batch: Any) -> tuple[Tensor, float]:
        total, count = classes(model, batch)
        return total + 0.05 * count * layer.weight.square().sum(), count

    return Made(made.model, made.samples, loss)


def frozen() -> Made:
    """The first layer is not trained."""
    made = mlp()
    made.model[0].requires_grad_(False)
    return made


def unused_parameter() -> Made:
    class Spare(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.used, self.spare = nn.Linear(WIDTH, CLASSES), nn.Linear(4, 4)

        def forward(self, x: Tensor) -> Tensor:
            return self.used(x)

    return Made(Spare(), points(), classes)


COMPUTED: dict[str, Kind] = {
    "gradient-hook": Kind(gradient_hook),
    "hook-that-clips": Kind(hook_that_clips),
    "hook-after-accumulation": Kind(hook_after_accumulation),
    "activation-hook": Kind(activation_hook),
    "module-hooks": Kind(module_hooks),
    "late-expert": Kind(late_expert),
    "routed-experts": Kind(routed_experts),
    "layer-reused": Kind(layer_reused),
    "reentrant": Kind(reentrant),
    "reentrant-reused": Kind(reentrant_reused),
    "tied-weights": Kind(tied_weights),
    "loss-closes-over-the-model": Kind(loss_closes_over_the_model),
    "loss-closes-over-a-part": Kind(loss_closes_over_a_part),
    "frozen": Kind(frozen),
    "unused-parameter": Kind(unused_parameter),
}
