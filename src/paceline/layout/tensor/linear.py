"""Column and row parallel linear layers: a pair of them costs one sum in forward and one in backward.

The first of a pair is cut by its outputs (columns), the second by its inputs (rows); what lies between them
works on a part of the features.
Source: Shoeybi et al. 2019, Megatron-LM, arXiv:1909.08053, section 3 (the functions f and g).
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from paceline.comm import Collective


class _Enter(torch.autograd.Function):
    """The identity; the gradients of all ranks add up in backward (Megatron's f)."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, collective: Collective, key: str) -> Tensor:
        ctx.collective, ctx.key = collective, key
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        return _summed(grads[0], ctx.collective, f"{ctx.key}.backward"), None, None


class _Leave(torch.autograd.Function):
    """The sum over all ranks; the identity in backward (Megatron's g)."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, collective: Collective, key: str) -> Tensor:
        return _summed(x, collective, f"{key}.forward")

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        return grads[0], None, None


def _summed(x: Tensor, collective: Collective, key: str) -> Tensor:
    flat = x.detach().reshape(-1).clone()
    total: Tensor = collective.all_reduce(flat, key).wait()
    return total.view_as(x)


def make_column(linear: nn.Linear, collective: Collective, name: str) -> None:
    """Let a linear layer whose weight is cut by outputs give a part of the outputs of whole inputs."""

    def forward(self: nn.Linear, x: Tensor) -> Tensor:
        return F.linear(_Enter.apply(x, collective, name), self.weight, self.bias)

    _become(linear, "Column", forward)


def make_row(linear: nn.Linear, collective: Collective, name: str) -> None:
    """Let a linear layer whose weight is cut by inputs give whole outputs of a part of the inputs."""

    def forward(self: nn.Linear, x: Tensor) -> Tensor:
        y = _Leave.apply(F.linear(x, self.weight), collective, name)
        return y if self.bias is None else y + self.bias

    _become(linear, "Row", forward)


def _become(linear: nn.Linear, word: str, forward: Any) -> None:
    kind = type(linear)
    linear.__class__ = type(
        f"{word}{kind.__name__}", (kind,), {"forward": forward, "__module__": kind.__module__}
    )
