"""Mappings between tensors that all tensor ranks have and tensors that each rank has a part of.

The names are those of Megatron-LM: activations are copied to a tensor-parallel region, reduced from it or
gathered from it, each with the matching collective in backward. Each mapping costs at most one collective in
each direction.

Backward of each mapping is another mapping, so gradients can be differentiated again (gradient penalties).

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
    """Identity in forward; sum of the gradients of all ranks in backward (Megatron's f)."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, collective: Collective, key: str) -> Tensor:
        ctx.collective, ctx.key = collective, key
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        key = f"{ctx.key}.backward"
        if torch.is_grad_enabled():  # a gradient that is differentiated again
            return reduce_from_tensor_region(grads[0], ctx.collective, key), None, None
        return summed(grads[0], ctx.collective, key), None, None


class _ReduceFromRegion(torch.autograd.Function):
    """Sum over all ranks in forward; identity in backward (Megatron's g)."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, collective: Collective, key: str) -> Tensor:
        ctx.collective, ctx.key = collective, key
        return summed(x, collective, f"{key}.forward")

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        if torch.is_grad_enabled():
            return copy_to_tensor_region(grads[0], ctx.collective, ctx.key), None, None
        return grads[0], None, None


def copy_to_tensor_region(x: Tensor, collective: Collective, key: str) -> Tensor:
    """Return a tensor that every rank has, for layers that are split; its gradients are summed."""
    y: Tensor = _CopyToRegion.apply(x, collective, key)
    return y


def reduce_from_tensor_region(x: Tensor, collective: Collective, key: str) -> Tensor:
    """Return the sum of the partial results of all ranks."""
    y: Tensor = _ReduceFromRegion.apply(x, collective, key)
    return y


class _GatherFromRegion(torch.autograd.Function):
    """Features of all ranks in forward; this rank's slice of the gradient in backward.

    The gradient needs no sum, because every rank continues with the same features and computes the same
    gradient.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, spans: Sequence[Span], collective: Collective, key: str) -> Tensor:
        ctx.arguments = spans, collective, key
        return gather_uneven(x, [span[-1] - span[0] for span in spans], -1, collective, f"{key}.forward")

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        return _SplitToRegion.apply(grads[0], *ctx.arguments), None, None, None


class _SplitToRegion(torch.autograd.Function):
    """This rank's slice of features that every rank has in forward; gradients of all ranks in backward."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, spans: Sequence[Span], collective: Collective, key: str) -> Tensor:
        ctx.arguments = spans, collective, f"{key}.backward"
        return x[..., slice(*spans[collective.group.rank])].contiguous()

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        return gather_from_tensor_region(grads[0], *ctx.arguments), None, None, None


def gather_from_tensor_region(x: Tensor, spans: Sequence[Span], collective: Collective, key: str) -> Tensor:
    """Return all features [..., F] from the parts of all ranks.

    Args:
        spans: of the features, by rank.
    """
    y: Tensor = _GatherFromRegion.apply(x, spans, collective, key)
    return y


def gather_uneven(x: Tensor, widths: Sequence[int], dim: int, collective: Collective, key: str) -> Tensor:
    """Concatenate the parts of all ranks along a dimension, in new memory; no gradient.

    Args:
        widths: size of each rank's part along `dim`.
    """
    # An all_gather needs equal sizes: every part is padded to the widest.
    size = x.shape[dim]
    padded = x.new_zeros([max(widths) if d == dim % x.dim() else n for d, n in enumerate(x.shape)])
    padded.narrow(dim, 0, size).copy_(x.detach())
    rows = collective.all_gather(padded.reshape(-1), key).wait()
    pairs = zip(rows, widths, strict=True)
    return torch.cat([row.view(padded.shape).narrow(dim, 0, width) for row, width in pairs], dim)


def summed(x: Tensor, collective: Collective, key: str) -> Tensor:
    """Return the sum over all ranks in new memory; no gradient."""
    # A copy, as all_reduce may work in place and autograd may use the tensor elsewhere.
    flat = x.detach().reshape(-1).clone()
    total: Tensor = collective.all_reduce(flat, key).wait()
    return total.view_as(x)


class SharedInput:
    """Input that several layers share, mapped once, so that their gradients meet in one sum.

    Args:
        enters: the mapping.
        users: number of layers that use the input; nothing is kept after the last of them.
    """

    def __init__(self, enters: Callable[[Tensor], Tensor], users: int) -> None:
        self._enters, self._users = enters, users
        self._used, self._x, self._entered = 0, torch.empty(0), torch.empty(0)

    def __call__(self, x: Tensor) -> Tensor:
        """Return the mapped input, which is the same tensor for all layers."""
        # Another tensor means another forward, which may come before all layers have used the last input.
        if self._used == 0 or x is not self._x:
            self._used, self._x, self._entered = 0, x, self._enters(x)
        self._used += 1
        mapped = self._entered
        if self._used == self._users:
            self._used, self._x, self._entered = 0, torch.empty(0), torch.empty(0)
        return mapped
