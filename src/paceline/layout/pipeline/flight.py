"""A unit under way in a stage: what its forward leaves for its backward."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from paceline.layout.pipeline.stage import call

Weights = Mapping[str, Tensor]


class Stage(nn.Module):
    """The links of one stage, called one after another."""

    def __init__(self, links: Sequence[nn.Module]) -> None:
        super().__init__()
        self.links = nn.ModuleList(links)

    def forward(self, x: Any) -> Any:
        for link in self.links:
            x = call(link, x)
        return x


class View(nn.Module):
    """What the task's loss takes for the model: it answers with what the pipeline has computed."""

    def __init__(self, answer: Callable[[], Any]) -> None:
        super().__init__()
        self._answer = answer

    def forward(self, *inputs: Any, **named: Any) -> Any:
        return self._answer()


@dataclass
class Flight:
    """A unit between its forward and its backward.

    Args:
        key: seeds what is random in it.
        inputs: the floating-point tensors that came in.
        outputs: those that went out; the scaled loss on the last stage.
    """

    key: int
    inputs: Sequence[Tensor]
    outputs: Sequence[Tensor]


def gradients(
    flight: Flight, arrived: Sequence[Tensor], weights: Weights | None
) -> tuple[list[Tensor | None], list[Tensor]]:
    """Gradients of the weights (none without them: they are in `.grad`), and of every input."""
    pairs = [(x, g) for x, g in zip(flight.outputs, arrived, strict=True) if x.requires_grad]
    outputs, grads = [x for x, _ in pairs], [g for _, g in pairs]
    if weights is None:
        if outputs:
            torch.autograd.backward(outputs, grads)
        return [], [torch.zeros_like(x) if x.grad is None else x.grad for x in flight.inputs]
    trained = [w for w in weights.values() if w.requires_grad]
    both = torch.autograd.grad(outputs, [*trained, *flight.inputs], grads, allow_unused=True)
    back = zip(flight.inputs, both[len(trained) :], strict=True)
    return list(both[: len(trained)]), [torch.zeros_like(x) if g is None else g for x, g in back]


def as_tuple(x: Any) -> tuple[Any, ...]:
    return x if isinstance(x, tuple) else (x,)
