"""Initial weights that are keyed by (seed, parameter name), never drawn from a stream.

Invariant: the value of a parameter depends on the seed, its name, its shape and its dtype only, so that
adding a layer, splitting the model or changing the device leaves all other weights as they are.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from torch import Tensor, nn

from paceline.keys import key

Rule = Callable[[str, Tensor, torch.Generator], object]
"""`rule(name, values, generator)` fills the values in place, or leaves them as the constructor did."""


@torch.no_grad()
def initialize_by_name(model: nn.Module, seed: int, rule: Rule) -> None:
    """Let the rule set every parameter, each with a generator of its own.

    Args:
        model: changed in place; a tied parameter is set once, under its first name.
        seed: the seed of the run.
        rule: works on CPU tensors, so that every device starts from the same bits.
    """
    for name, parameter in model.named_parameters():
        values = parameter.detach().cpu().clone()
        rule(name, values, torch.Generator().manual_seed(key(seed, "initialize", name)))
        parameter.copy_(values)


def fan_in_rule(name: str, values: Tensor, generator: torch.Generator) -> None:
    """Fill weights for ReLU networks: normal of variance 2 / fan-in; biases are zero; norms stay.

    Source: He et al. 2015, Delving Deep into Rectifiers, arXiv:1502.01852, section 2.2.
    """
    if values.dim() >= 2:
        fan_in = values[0].numel()
        values.normal_(0.0, math.sqrt(2.0 / fan_in), generator=generator)
    elif name.endswith("bias"):
        values.zero_()
