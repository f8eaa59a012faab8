"""A micro-batch on its way through one stage: what its backward needs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from paceline.layout.pipeline.halves import AtOnce, Halves, in_halves
from paceline.schedule import Action

Weights = Mapping[str, Tensor]


@dataclass
class Flight:
    """A micro-batch between its forward and its backward.

    Args:
        shard: which of the step it is.
        key: seeds what is random in it.
        inputs: the tensors that came in and can have a gradient.
        outputs: those that went out; the scaled loss on the last stage.
        action: its forward.
        num_samples: of the whole micro-batch.
        buffers: of the rank's model, as this micro-batch has left them.
        again: those that a second half of the backward sees: what the first half saw.
    """

    shard: int
    key: int
    inputs: Sequence[Tensor]
    outputs: Sequence[Tensor]
    action: Action
    num_samples: int
    buffers: Sequence[Tensor]
    halves: Halves | AtOnce | None = None
    again: Sequence[Tensor] | None = None

    def first_half(self, arrived: Sequence[Tensor], weights: Sequence[Tensor]) -> list[Tensor]:
        """Gradients of every input; those of the weights are put off.

        Args:
            arrived: gradients of the outputs.
        """
        pairs = [(x, g) for x, g in zip(self.outputs, arrived, strict=True) if x.requires_grad]
        self.halves = in_halves([x for x, _ in pairs], self.inputs, weights)
        if not self.halves.is_all_put_off:
            self.again = [b.clone() for b in self.buffers]
        back = self.halves.of_inputs([g for _, g in pairs])
        return [torch.zeros_like(x) if g is None else g for x, g in zip(self.inputs, back, strict=True)]

    def second_half(self) -> None:
        """Add the gradients that were put off to `.grad` of the weights, and call the hooks that see them."""
        assert self.halves is not None
        for weight, g in self.halves.of_weights().items():
            weight.grad = g if weight.grad is None else weight.grad.add_(g)
            hooks = getattr(weight, "_post_accumulate_grad_hooks", None) or {}
            for hook in () if self.halves.has_called_hooks else [*hooks.values()]:
                hook(weight)

    def gradients(
        self, arrived: Sequence[Tensor], weights: Weights | None
    ) -> tuple[list[Tensor | None], list[Tensor]]:
        """Run autograd once.

        Args:
            arrived: gradients of the outputs.
            weights: what the forward used in place of the stage's parameters.
        Returns:
            Gradients of those weights that are trained, and of every input. Without weights there are none of
            the first: they are added to `.grad` of the parameters.
        """
        pairs = [(x, g) for x, g in zip(self.outputs, arrived, strict=True) if x.requires_grad]
        outputs, grads = [x for x, _ in pairs], [g for _, g in pairs]
        if weights is None:
            if outputs:
                torch.autograd.backward(outputs, grads)
            return [], [torch.zeros_like(x) if x.grad is None else x.grad for x in self.inputs]
        trained = [w for w in weights.values() if w.requires_grad]
        both = torch.autograd.grad(outputs, [*trained, *self.inputs], grads, allow_unused=True)
        back = zip(self.inputs, both[len(trained) :], strict=True)
        return list(both[: len(trained)]), [torch.zeros_like(x) if g is None else g for x, g in back]
