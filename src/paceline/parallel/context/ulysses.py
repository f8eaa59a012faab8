"""All-to-all over heads (DeepSpeed Ulysses): every rank attends with all positions of some of the heads.

Between the two exchanges attention is that of one process on fewer heads.

Source: Jacobs et al. 2023, DeepSpeed Ulysses, arXiv:2309.14509, section 3.
Shapes: B sequences, H heads, T positions of this rank, S of the whole, D width of a head, N ranks.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from paceline.comm.group_collectives import all_to_all_v
from paceline.comm.net import Net
from paceline.job.mesh import RankGroup
from paceline.parallel.context.sequence_split import PositionRuns


@dataclass(frozen=True)
class HeadExchange:
    """Exchange between local positions of all heads and all positions of local heads; heads are split evenly.

    Args:
        runs: positions of every rank.
    """

    net: Net
    group: RankGroup
    runs: tuple[PositionRuns, ...]

    def gather(self, tensors: Sequence[Tensor]) -> tuple[Tensor, ...]:
        """Turn each [B, H, T, D] into [B, H/N, S, D], in one exchange."""
        size = self.group.size
        pieces = [x.chunk(size, dim=1) for x in tensors]
        # All tensors for a rank travel as one: queries, keys and values cost one message.
        outgoing = [torch.cat([heads[rank].reshape(-1) for heads in pieces]) for rank in range(size)]
        shapes = [
            [(x.shape[0], x.shape[1] // size, runs.size, x.shape[3]) for x in tensors] for runs in self.runs
        ]
        received = self._exchange(outgoing, shapes)
        return tuple(self._in_order([row[i] for row in received]) for i in range(len(tensors)))

    def scatter(self, tensors: Sequence[Tensor]) -> tuple[Tensor, ...]:
        """Turn each [B, H/N, S, D] into [B, H, T, D], in one exchange."""
        num_positions = self.runs[self.group.rank].size
        outgoing = [torch.cat([_positions_of(x, runs).reshape(-1) for x in tensors]) for runs in self.runs]
        shapes = [[(*x.shape[:2], num_positions, x.shape[3]) for x in tensors]] * self.group.size
        received = self._exchange(outgoing, shapes)
        return tuple(torch.cat([row[i] for row in received], dim=1) for i in range(len(tensors)))

    def _exchange(self, outgoing: list[Tensor], shapes: Any) -> list[list[Tensor]]:
        sizes = [[torch.Size(shape).numel() for shape in row] for row in shapes]
        arrived = all_to_all_v(self.net, outgoing, [sum(row) for row in sizes], self.group).wait()
        return [
            [piece.view(shape) for piece, shape in zip(flat.split(row), row_shapes, strict=True)]
            for flat, row, row_shapes in zip(arrived, sizes, shapes, strict=True)
        ]

    def _in_order(self, by_rank: Sequence[Tensor]) -> Tensor:
        """Concatenate the positions of all ranks in ascending order."""
        split = [x.split(runs.sizes, dim=2) for x, runs in zip(by_rank, self.runs, strict=True)]
        return torch.cat([*(early for early, _ in split), *(late for _, late in reversed(split))], dim=2)


def _positions_of(x: Tensor, runs: PositionRuns) -> Tensor:
    return torch.cat([x[:, :, slice(*run)] for run in runs], dim=2)


class ScatterHeadsGatherPositions(torch.autograd.Function):
    """Autograd function of `HeadExchange.gather` for several tensors; gradients are scattered."""

    @staticmethod
    def forward(ctx: Any, heads: HeadExchange, *tensors: Tensor) -> tuple[Tensor, ...]:
        ctx.heads = heads
        return heads.gather(tensors)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Any) -> Any:
        return None, *ctx.heads.scatter(grads)


class GatherHeadsScatterPositions(torch.autograd.Function):
    """Autograd function of `HeadExchange.scatter` for one tensor; the gradient is gathered."""

    @staticmethod
    def forward(ctx: Any, heads: HeadExchange, x: Tensor) -> Tensor:
        ctx.heads = heads
        return heads.scatter([x])[0]

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Any) -> Any:
        return None, ctx.heads.gather(grads)[0]
