"""BatchNorm over all ranks of a step: the statistics are those of the whole batch.

Invariant: with one micro-batch on each rank, outputs, gradients and running statistics are those of one
forward over all samples, except for rounding (tests/parity/test_sync_batchnorm.py). Every rank that trains
must run the same modules in the same order. Nothing is sent in evaluation.

Source: Ioffe and Szegedy 2015, Batch Normalization, arXiv:1502.03167, Algorithm 1, with m over all ranks.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.nn.modules.batchnorm import _BatchNorm

from paceline.comm.net import Net
from paceline.job.mesh import RankGroup, duplicate_group

SumOverRanks = Callable[[Tensor], Tensor]


def synchronize_batch_norms(model: nn.Module, group: RankGroup, net: Net) -> Callable[[], None]:
    """Let every BatchNorm of a model compute its statistics over a group; collective.

    Args:
        model: changed in place; names, parameters and buffers stay.
        group: the ranks that share the samples of a step; each runs one micro-batch.
    Returns:
        A function that restores the modules.
    Wire: for each module one all_reduce of 8 (2 C + 1) bytes in forward, and one of 16 C in backward.
    """
    # A group of its own: these sums run between those of gradients, in no fixed order with them.
    batch_norm_group = duplicate_group(group, "batchnorm")

    def total(x: Tensor) -> Tensor:
        return cast(Tensor, net.all_reduce(x, batch_norm_group).wait())

    changed = [(module, type(module)) for module in batch_norms_of(model)]
    for module, kind in changed:
        # A subclass in place of a new module: names, hooks and references to the module stay valid.
        module.__class__ = type(
            f"Synced{kind.__name__}", (_SyncedBatchNorm, kind), {"total_over_ranks": staticmethod(total)}
        )

    def undo() -> None:
        for module, kind in changed:
            module.__class__ = kind

    return undo


def batch_norms_of(model: nn.Module) -> list[_BatchNorm]:
    """Return the modules of a model that compute statistics over a batch."""
    return [module for module in model.modules() if isinstance(module, _BatchNorm)]


class _SyncedBatchNorm(_BatchNorm):
    """BatchNorm whose training forward sums over ranks."""

    total_over_ranks: SumOverRanks

    def forward(self, x: Tensor) -> Tensor:
        if not self.training:
            return super().forward(x)
        self._check_input_dim(x)
        y, mean, var, count = _NormalizeOverRanks.apply(
            x, self.weight, self.bias, self.eps, self.total_over_ranks
        )
        if self.track_running_stats:
            self._update_running(mean, var * (count / (count - 1)))
        return cast(Tensor, y)

    @torch.no_grad()
    def _update_running(self, mean: Tensor, unbiased: Tensor) -> None:
        """Update the running statistics as PyTorch does."""
        seen, running_stats = cast(Tensor, self.num_batches_tracked), (self.running_mean, self.running_var)
        seen.add_(1)
        share = self.momentum if self.momentum is not None else 1.0 / float(seen)
        for running, batch_value in zip(
            cast("tuple[Tensor, Tensor]", running_stats), (mean, unbiased), strict=True
        ):
            running.lerp_(batch_value.to(running.dtype), share)


class _NormalizeOverRanks(torch.autograd.Function):
    """x [N, C, ...] -> (x - mean) / sqrt(var + eps) * weight + bias, with mean and variance over all ranks.

    Also returns mean [C], biased variance [C], float64, and the number of values of a channel.
    """

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Tensor | None, bias: Tensor | None, eps: float, total: SumOverRanks
    ) -> tuple[Tensor, Tensor, Tensor, float]:
        dims = [d for d in range(x.dim()) if d != 1]
        wide = x.to(torch.float64)
        count_here = torch.tensor([x.numel() / x.shape[1]], dtype=torch.float64, device=x.device)
        sums = total(torch.cat([count_here, wide.sum(dims), wide.square().sum(dims)]))
        count = float(sums[0])
        # In float64 the mean of squares minus the squared mean does not cancel for values of usual size.
        mean, square = sums[1:].view(2, -1) / count
        # Rounding can make a variance of zero slightly negative.
        var = (square - mean.square()).clamp_(min=0.0)
        scale = torch.rsqrt(var + eps)
        # PyTorch's wording, by which `raise_for_too_few_values` knows it. After the sum, so all ranks raise.
        if count < 2:
            raise ValueError(f"Expected more than 1 value per channel when training, got {x.shape} on a rank")
        # Not float64, since the saved tensor is as large as the activations.
        save_dtype = torch.promote_types(x.dtype, torch.float32)
        normal = ((wide - _per_channel(mean, x)) * _per_channel(scale, x)).to(save_dtype)
        ctx.save_for_backward(normal, scale, weight)
        ctx.count, ctx.total, ctx.has_bias = count, total, bias is not None
        y = normal if weight is None else normal * _per_channel(weight, x)
        y = y if bias is None else y + _per_channel(bias, x)
        ctx.mark_non_differentiable(mean, var)
        return y.to(x.dtype), mean, var, count

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: Tensor, *unused: Any) -> tuple[Tensor | None, ...]:
        normal, scale, weight = ctx.saved_tensors
        dims = [d for d in range(dy.dim()) if d != 1]
        wide = dy.to(torch.float64)
        local_sums = torch.stack([wide.sum(dims), (wide * normal).sum(dims)])
        # A copy, because the all_reduce works in place and the local sums are used again.
        mean_sums = ctx.total(local_sums.flatten().clone()).view(2, -1) / ctx.count
        dx = (wide - _per_channel(mean_sums[0], dy) - normal * _per_channel(mean_sums[1], dy)) * _per_channel(
            scale, dy
        )
        dx = dx if weight is None else dx * _per_channel(weight, dy)
        param_dtype = torch.float32 if weight is None else weight.dtype
        # Local sums: the reduction of gradients adds those of the other ranks.
        weight_grad = None if weight is None else local_sums[1].to(param_dtype)
        return (
            dx.to(dy.dtype),
            weight_grad,
            local_sums[0].to(param_dtype) if ctx.has_bias else None,
            None,
            None,
        )


def _per_channel(values: Tensor, x: Tensor) -> Tensor:
    """Return [C] as [1, C, 1, ...], to broadcast with x."""
    return values.view(1, -1, *[1] * (x.dim() - 2))
