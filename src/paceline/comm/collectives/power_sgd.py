"""Sums of matrices as products of low rank, with error feedback: PowerSGD.

Each matrix M of a buffer is summed as P Q^T: first the ranks sum M Q and make its columns orthonormal, then
they sum M^T P. Q is kept from step to step, so that one step of power iteration follows the other. What is
no matrix, or would not become smaller, is summed as it is, in the first of the two rounds.
Invariant: factors are equal on all ranks; what is lost is of this rank alone.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from math import prod

import torch
from torch import Tensor

from paceline.comm.codecs.low_rank import (
    MatrixSpan,
    compressible_spans,
    near_square_span,
    next_factor,
    orthogonalise,
    uncompressed_parts,
)
from paceline.comm.collectives.collective_protocol import AllToAllCollective, ReceiveBuffer, wait_counter
from paceline.comm.collectives.error_feedback import restore_where
from paceline.comm.comm_thread import CommThread
from paceline.comm.handle import Handle
from paceline.comm.workspace import Workspace
from paceline.job.mesh import RankGroup
from paceline.state.keys import key as hashed


@dataclass(frozen=True)
class _LowRankState:
    """Of one buffer.

    Args:
        sent: what this rank's values lost, [n].
        factors: Q of every matrix, [columns, rank].
    """

    sent: Tensor
    factors: Sequence[Tensor]


class PowerSGDCollective:
    """A collective whose sums travel as factors of rank r.

    Args:
        inner: the path; its process group is its own: a thread of this object uses it.
        rank: r.
        seed: of the first factors.
    Wire: all_reduces of sum(r M) + what is no matrix, and of sum(r N) float32 values, over matrices of M x N.
        reduce_scatter costs the same: a rank needs all of P to have its rows of the sum.
    Exactness: approximate; equal bits on every rank whose processor computes alike.
    Source: Vogels et al. 2019, PowerSGD, arXiv:1905.13727, Algorithms 1 and 2.
    """

    def __init__(self, inner: AllToAllCollective, rank: int, *, seed: int = 0) -> None:
        self._inner, self._rank, self._seed = inner, rank, seed
        self._line = CommThread(
            f"{inner.group.name}-low-rank", wait_counter(inner.net.ledger, inner.group.name)
        )
        self._matrices: dict[str, Sequence[MatrixSpan]] = {}
        self._kept: dict[str, _LowRankState] = {}
        self._pending: dict[str, _LowRankState] = {}
        self._spare: dict[str, _LowRankState] = {}  # memory of the step before the last
        self._workspace = Workspace()  # of the thread of the line

    @property
    def group(self) -> RankGroup:
        """See `Collective`."""
        return self._inner.group

    @property
    def feedback(self) -> PowerSGDCollective:
        """See `Collective`."""
        return self

    def buffer(self, num_values: int, like: Tensor, key: str) -> Tensor:
        """See `Collective`."""
        return like.new_zeros(num_values)

    def describe(self, key: str, matrices: Sequence[MatrixSpan]) -> None:
        """See `ErrorFeedbackStore`."""
        self._matrices[key] = matrices

    def all_reduce(self, x: Tensor, key: str) -> Handle:
        """See `Collective`."""
        flat = x.view(-1)
        return self._line.submit("all_reduce", lambda: self._sum(flat, key, flat).view(x.shape))

    def reduce_scatter(self, x: Tensor, key: str, arriving: ReceiveBuffer = None) -> Handle:
        """See `Collective`; the sum is good until the next one of this buffer."""

        def hops() -> Tensor:
            total = self._workspace.take(f"sum {key}", (x.numel(),), x.dtype, x.device)
            return self._sum(x.reshape(-1), key, total).view(x.shape)[self.group.rank]

        return self._line.submit("all_reduce", hops)

    def _sum(self, x: Tensor, key: str, total: Tensor) -> Tensor:
        """Sum `x` [n] into `total` [n], which may be `x`."""
        kept, matrices = self._kept.get(key), self._compressible(key, x.numel())
        values = x
        if kept is not None:
            values = torch.add(x, kept.sent, out=self._workspace.like("values", x))
        pending = self._pending[key] = self._opened(key, x, matrices)
        factors = self._factors(key, matrices, values, kept)
        left, plain = self._sum_left(key, values, matrices, factors)
        right = self._sum_right(key, values, matrices, left, pending)
        for place, found in zip(uncompressed_parts(total, matrices), plain, strict=True):
            place.copy_(found)
        for m, p, q, factor in zip(matrices, left, right, pending.factors, strict=True):
            torch.mm(p, q.T, out=m.of(total))
            factor.copy_(q)
        return total

    def _sum_left(
        self, key: str, x: Tensor, matrices: Sequence[MatrixSpan], factors: Sequence[Tensor]
    ) -> tuple[list[Tensor], list[Tensor]]:
        """Orthonormal P of every matrix, and the sums of what is no matrix."""
        rest = uncompressed_parts(x, matrices)
        flat, parts = self._pieces("left", [m.rows for m in matrices], x, rest)
        left, plain = parts[: len(matrices)], parts[len(matrices) :]
        for m, q, out in zip(matrices, factors, left, strict=True):
            torch.mm(m.of(x), q, out=out)
        for place, out in zip(rest, plain, strict=True):
            out.copy_(place)
        self._inner.all_reduce(flat, f"{key}.p").wait(exposed=False)
        return [orthogonalise(p) for p in left], plain

    def _sum_right(
        self,
        key: str,
        x: Tensor,
        matrices: Sequence[MatrixSpan],
        left: Sequence[Tensor],
        pending: _LowRankState,
    ) -> list[Tensor]:
        """The sum of Q of every matrix; what this rank's own products lose is kept."""
        pending.sent.copy_(x)
        flat, right = self._pieces("right", [m.columns for m in matrices], x)
        for m, p, q in zip(matrices, left, right, strict=True):
            torch.mm(m.of(x).T, p, out=q)
            m.of(pending.sent).addmm_(p, q.T, alpha=-1)
        for place in uncompressed_parts(pending.sent, matrices):
            place.zero_()
        pending.sent.nan_to_num_(0.0, 0.0, 0.0)
        self._inner.all_reduce(flat, f"{key}.q").wait(exposed=False)
        return right

    def _pieces(
        self, name: str, heights: Sequence[int], like: Tensor, rest: Sequence[Tensor] = ()
    ) -> tuple[Tensor, list[Tensor]]:
        """Memory for one all_reduce: matrices of so many rows and r columns, and what is no matrix."""
        shapes = [*((height, self._rank) for height in heights), *(tuple(part.shape) for part in rest)]
        sizes = [prod(shape) for shape in shapes]
        flat = self._workspace.take(name, (sum(sizes),), like.dtype, like.device)
        return flat, [part.view(shape) for part, shape in zip(flat.split(sizes), shapes, strict=True)]

    def _opened(self, key: str, x: Tensor, matrices: Sequence[MatrixSpan]) -> _LowRankState:
        """Memory for what a buffer loses in this step, and for its factors."""
        shapes = [(m.columns, self._rank) for m in matrices]
        found = self._spare.pop(key, None)
        if found is not None and found.sent.shape == x.shape and [q.shape for q in found.factors] == shapes:
            return found
        return _LowRankState(torch.empty_like(x), [x.new_empty(shape) for shape in shapes])

    def _factors(
        self, key: str, matrices: Sequence[MatrixSpan], x: Tensor, kept: _LowRankState | None
    ) -> Sequence[Tensor]:
        """Q of every matrix; a column that is zero, or not finite, would stay so, and is drawn anew."""
        before = [None] * len(matrices) if kept is None else kept.factors
        keys = [hashed(self._seed, "low-rank", key, number) for number in range(len(matrices))]
        of_each = zip(matrices, before, keys, strict=True)
        return [next_factor(matrix, q, self._rank, drawn, x) for matrix, q, drawn in of_each]

    def _compressible(self, key: str, num_values: int) -> list[MatrixSpan]:
        return compressible_spans(self._matrices.get(key, [near_square_span(num_values)]), self._rank)

    def all_gather(self, x: Tensor, key: str, out: Tensor | None = None) -> Handle:
        """See `Collective`."""
        gather = self._inner.all_gather
        return self._line.submit("all_gather", lambda: gather(x, key, out).wait(exposed=False))

    def broadcast(self, x: Tensor, key: str, source: int = 0) -> Handle:
        """See `Collective`."""
        inner = self._inner
        return self._line.submit("broadcast", lambda: inner.broadcast(x, key, source).wait(exposed=False))

    def restore(self, key: str, places: Tensor) -> None:
        """See `ErrorFeedbackStore`."""
        kept = self._kept.get(key)
        if key in self._pending:
            restore_where(self._pending[key].sent, None if kept is None else kept.sent, places)

    def commit(self, keys: Collection[str] | None = None) -> None:
        """See `ErrorFeedbackStore`."""
        done = [*self._pending] if keys is None else [key for key in keys if key in self._pending]
        self._spare |= {key: self._kept[key] for key in done if key in self._kept}
        self._kept |= {key: self._pending.pop(key) for key in done}

    def abort(self) -> None:
        """See `Collective`."""
        self._line.clear_error()
        self._spare |= self._pending
        self._pending = {}
        self._inner.abort()

    def residuals(self, key: str, num_values: int) -> Mapping[str, Tensor]:
        """See `ErrorFeedbackStore`; `factor` holds Q^T in the first r rows of each matrix."""
        found = self._pending.get(key, self._kept.get(key))
        if found is None:
            return {}
        factor = torch.zeros_like(found.sent)
        for matrix, q in zip(self._compressible(key, found.sent.numel()), found.factors, strict=True):
            matrix.of(factor)[: self._rank] = q.T
        return {"sent": found.sent[:num_values], "factor": factor[:num_values]}

    def set_residuals(self, key: str, flats: Mapping[str, Tensor]) -> None:
        """See `ErrorFeedbackStore`; without factors, or where they are of other matrices, they are found anew."""
        losses = [flat for side, flat in flats.items() if side != "factor"]
        sent, factor = sum(losses[1:], start=losses[0].clone()), flats.get("factor")  # -0.0 stays
        source = torch.zeros_like(sent) if factor is None else factor
        matrices = self._compressible(key, sent.numel())
        self._kept[key] = _LowRankState(sent, [m.of(source)[: self._rank].T.contiguous() for m in matrices])

    def chunks_in_flight(self, x: Tensor) -> tuple[int, int]:
        """See `Coded`."""
        return x.numel(), 1

    def rescale(self, factor: float, keys: Collection[str]) -> None:
        """See `ErrorFeedbackStore`; factors are directions."""
        for one in [self._kept[key] for key in keys if key in self._kept]:
            one.sent.mul_(factor)

    def clear(self, key: str) -> None:
        """See `ErrorFeedbackStore`."""
        self._kept.pop(key, None)
        self._pending.pop(key, None)

    def close(self) -> None:
        """End the thread; what was launched has been waited for."""
        self._line.close()


def power_sgd(path: AllToAllCollective, argument: str, seed: int) -> PowerSGDCollective:
    """The word `lowrank:R`, where ranks sum."""
    return PowerSGDCollective(path, int(argument), seed=seed)
