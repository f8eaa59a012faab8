"""What tensor ranks send each other: one sum where a part of a model begins to be cut, and one where it ends.

Source: Shoeybi et al. 2019, Megatron-LM, arXiv:1909.08053, section 3 (the functions f and g).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from paceline.comm.collectives.collective_protocol import Collective
from paceline.state.slot import Span


class _CopyToRegion(torch.autograd.Function):
    """The identity; the gradients of all ranks add up in backward (Megatron's f)."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, collective: Collective, key: str) -> Tensor:
        ctx.collective, ctx.key = collective, key
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        return summed(grads[0], ctx.collective, f"{ctx.key}.backward"), None, None


class _ReduceFromRegion(torch.autograd.Function):
    """The sum over all ranks; the identity in backward (Megatron's g)."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, collective: Collective, key: str) -> Tensor:
        return summed(x, collective, f"{key}.forward")

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        return grads[0], None, None


def copy_to_tensor_region(x: Tensor, collective: Collective, key: str) -> Tensor:
    """What every rank has whole, where each goes on with a part of a layer."""
    found: Tensor = _CopyToRegion.apply(x, collective, key)
    return found


def reduce_from_tensor_region(x: Tensor, collective: Collective, key: str) -> Tensor:
    """The sum of what every rank has a part of."""
    found: Tensor = _ReduceFromRegion.apply(x, collective, key)
    return found


class _GatherFromRegion(torch.autograd.Function):
    """The features of all ranks, with which every rank goes on alike; its own part of the gradient."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, spans: Sequence[Span], collective: Collective, key: str) -> Tensor:
        ctx.span = spans[collective.group.rank]
        widths = [span[-1] - span[0] for span in spans]
        padded = x.new_zeros(*x.shape[:-1], max(widths))
        padded[..., : x.shape[-1]] = x.detach()
        rows = collective.all_gather(padded.reshape(-1), f"{key}.forward").wait()
        parts = [row.view(padded.shape)[..., :width] for row, width in zip(rows, widths, strict=True)]
        return torch.cat(parts, -1)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        return grads[0][..., slice(*ctx.span)].contiguous(), None, None, None


def gather_from_tensor_region(x: Tensor, spans: Sequence[Span], collective: Collective, key: str) -> Tensor:
    """All features [..., F] of those that each rank has.

    Args:
        spans: of the features, by rank.
    """
    found: Tensor = _GatherFromRegion.apply(x, spans, collective, key)
    return found


def summed(x: Tensor, collective: Collective, key: str) -> Tensor:
    """The sum over all ranks, in new memory; no gradient."""
    flat = x.detach().reshape(-1).clone()
    total: Tensor = collective.all_reduce(flat, key).wait()
    return total.view_as(x)


class SharedInput:
    """Where layers take in the same tensor: it enters once, so that their gradients meet in one sum.

    Args:
        enters: what is done with the tensor.
        users: how many layers take it in; after the last of them nothing is kept.
    """

    def __init__(self, enters: Callable[[Tensor], Tensor], users: int) -> None:
        self._enters, self._users = enters, users
        self._used, self._x, self._entered = 0, torch.empty(0), torch.empty(0)

    def __call__(self, x: Tensor) -> Tensor:
        """What all layers get for the same tensor."""
        if self._used == 0 or x is not self._x:
            self._used, self._x, self._entered = 0, x, self._enters(x)
        self._used += 1
        found = self._entered
        if self._used == self._users:
            self._used, self._x, self._entered = 0, torch.empty(0), torch.empty(0)
        return found
