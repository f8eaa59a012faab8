"""BatchNorm over all ranks of a step: statistics of the whole batch, as one process would take them.

Invariant: with one micro-batch a rank, outputs, gradients and running statistics are those of one forward
over all samples, but for rounding (tests/parity/test_sync_batchnorm.py). Every rank that trains has to run
the same modules in the same order. In evaluation nothing is sent.

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
    """Let every BatchNorm of a model take its statistics over a group; collective.

    Args:
        model: changed in place; names, parameters and buffers stay.
        group: the ranks that share the samples of a step; each runs one micro-batch.
    Returns:
        Makes the modules what they were.
    Wire: for each module one all_reduce of 8 (2 C + 1) bytes forward, and one of 16 C backward.
    """
    own = duplicate_group(
        group, "batchnorm"
    )  # these sums come between those of gradients, in no order with them

    def total(x: Tensor) -> Tensor:
        return cast(Tensor, net.all_reduce(x, own).wait())

    changed = [(module, type(module)) for module in batch_norms_of(model)]
    for module, kind in changed:
        module.__class__ = type(
            f"Synced{kind.__name__}", (_SyncedBatchNorm, kind), {"total_over_ranks": staticmethod(total)}
        )

    def undo() -> None:
        for module, kind in changed:
            module.__class__ = kind

    return undo


def batch_norms_of(model: nn.Module) -> list[_BatchNorm]:
    """The modules of a model that take statistics over a batch."""
    return [module for module in model.modules() if isinstance(module, _BatchNorm)]


class _SyncedBatchNorm(_BatchNorm):
    """A BatchNorm whose training forward sums over ranks."""

    total_over_ranks: SumOverRanks

    def forward(self, x: Tensor) -> Tensor:
        if not self.training:
            return super().forward(x)
        self._check_input_dim(x)
        y, mean, var, count = _NormalizeOverRanks.apply(
            x, self.weight, self.bias, self.eps, self.total_over_ranks
        )
        if self.track_running_stats:
            self._move(mean, var * (count / (count - 1)))
        return cast(Tensor, y)

    @torch.no_grad()
    def _move(self, mean: Tensor, unbiased: Tensor) -> None:
        """Running statistics, as PyTorch moves them."""
        seen, kept = cast(Tensor, self.num_batches_tracked), (self.running_mean, self.running_var)
        seen.add_(1)
        share = self.momentum if self.momentum is not None else 1.0 / float(seen)
        for running, now in zip(cast("tuple[Tensor, Tensor]", kept), (mean, unbiased), strict=True):
            running.lerp_(now.to(running.dtype), share)


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
        here = torch.tensor([x.numel() / x.shape[1]], dtype=torch.float64, device=x.device)
        sums = total(torch.cat([here, wide.sum(dims), wide.square().sum(dims)]))
        count = float(sums[0])
        mean, square = sums[1:].view(2, -1) / count
        var = (square - mean.square()).clamp_(min=0.0)
        scale = torch.rsqrt(var + eps)
        if count < 2:
            raise ValueError(f"Expected more than 1 value per channel when training, got {x.shape} on a rank")
        kept = torch.promote_types(x.dtype, torch.float32)
        normal = ((wide - _per_channel(mean, x)) * _per_channel(scale, x)).to(kept)
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
        mine = torch.stack([wide.sum(dims), (wide * normal).sum(dims)])
        of_all = ctx.total(mine.flatten().clone()).view(2, -1) / ctx.count  # the sum is taken in place
        dx = (wide - _per_channel(of_all[0], dy) - normal * _per_channel(of_all[1], dy)) * _per_channel(
            scale, dy
        )
        dx = dx if weight is None else dx * _per_channel(weight, dy)
        to = torch.float32 if weight is None else weight.dtype
        of_weight = None if weight is None else mine[1].to(to)
        return dx.to(dy.dtype), of_weight, mine[0].to(to) if ctx.has_bias else None, None, None


def _per_channel(values: Tensor, x: Tensor) -> Tensor:
    """[C] as [1, C, 1, ...], to go with x."""
    return values.view(1, -1, *[1] * (x.dim() - 2))
