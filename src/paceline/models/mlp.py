"""A multi-layer perceptron: the smallest model that every strategy is tested on."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import Literal

from torch import Tensor, nn

from paceline.models.dropout import KeyedDropout

_ACTIVATIONS: dict[str, type[nn.Module]] = {"relu": nn.ReLU, "tanh": nn.Tanh}


class MLP(nn.Module):
    """Linear layers with an activation, and dropout, between them.

    Args:
        num_inputs: features of a sample.
        hidden: widths of the hidden layers, none or more.
        num_outputs: features of the result.
        activation: "relu" or "tanh".
        dropout: probability of dropping a hidden value.
    """

    def __init__(
        self,
        num_inputs: int,
        hidden: Sequence[int],
        num_outputs: int,
        *,
        activation: Literal["relu", "tanh"] = "relu",
        dropout: float = 0.0,
    ) -> None:
        super().__init__()
        widths = [num_inputs, *hidden, num_outputs]
        layers: list[nn.Module] = []
        for fan_in, fan_out in pairwise(widths):
            layers += [nn.Linear(fan_in, fan_out), _ACTIVATIONS[activation](), KeyedDropout(dropout)]
        self.layers = nn.Sequential(*layers[:-2])

    def chain(self) -> list[nn.Module]:
        """Return the modules whose composition is this model."""
        return list(self.layers)

    def forward(self, x: Tensor) -> Tensor:  # (B, num_inputs) -> (B, num_outputs)
        """Map samples, float32 [B, num_inputs], to outputs, float32 [B, num_outputs]."""
        return self.layers(x)
