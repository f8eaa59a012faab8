"""PowerSGD: sums of matrices as products of low rank, with error feedback.

Each matrix M of a buffer is summed as P Q^T: first the ranks sum M Q and make its columns orthonormal, then
they sum M^T P. Q is kept from step to step, so that every step is one more step of power iteration. Values
that are in no matrix, or would not become smaller, are summed as they are, in the first of the two rounds.
Invariant: factors are equal on all ranks; the quantisation error is that of this rank alone.
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
    """The state of one buffer.

    Args:
        sent: quantisation error of this rank's values, [n].
        factors: Q of every matrix, [columns, rank].
    """

    sent: Tensor
    factors: Sequence[Tensor]


class PowerSGDCollective:
    """A collective whose sums are sent as factors of rank r.

    Args:
        inner: the route; its process group is used by nothing else than the thread of this object.
        rank: r.
        seed: seed of the first factors.
    Wire: all_reduces of sum(r M) + the values in no matrix, and of sum(r N) float32 values, over matrices of
        M x N. reduce_scatter costs the same: a rank needs all of P to have its rows of the sum.
    Exactness: approximate; equal bits on every rank whose processor computes alike.
    Source: Vogels et al. 2019, PowerSGD, arXiv:1905.13727, Algorithms 1 and 2.
    """

    def __init__(self, inner: AllToAllCollective, rank: int, *, seed: int = 0) -> None:
        self._inner, self._rank, self._seed = inner, rank, seed
        self._thread = CommThread(
            f"{inner.group.name}-low-rank",
            wait_counter(inner.net.ledger, inner.group.name),
            inner.net.activity,
        )
        self._matrices: dict[str, Sequence[MatrixSpan]] = {}
        self._committed: dict[str, _LowRankState] = {}
        self._pending: dict[str, _LowRankState] = {}
        # Memory of the step before the last, used again by the next one.
        self._spare: dict[str, _LowRankState] = {}
        # Only the thread uses it.
        self._workspace = Workspace()

    @property
    def group(self) -> RankGroup:
        return self._inner.group

    @property
    def feedback(self) -> PowerSGDCollective:
        return self

    def buffer(self, num_values: int, like: Tensor, key: str) -> Tensor:
        return like.new_zeros(num_values)

    def describe(self, key: str, matrices: Sequence[MatrixSpan]) -> None:
        self._matrices[key] = matrices

    def all_reduce(self, x: Tensor, key: str) -> Handle:
        flat = x.view(-1)
        return self._thread.submit("all_reduce", lambda: self._sum(flat, key, flat).view(x.shape))

    def reduce_scatter(self, x: Tensor, key: str, arriving: ReceiveBuffer = None) -> Handle:
        """Sum rows; the result is valid until the next sum of this buffer."""

        def hops() -> Tensor:
            total = self._workspace.take(f"sum {key}", (x.numel(),), x.dtype, x.device)
            return self._sum(x.reshape(-1), key, total).view(x.shape)[self.group.rank]

        return self._thread.submit("all_reduce", hops)

    def _sum(self, x: Tensor, key: str, total: Tensor) -> Tensor:
        """Sum `x` [n] into `total` [n], which may be `x`."""
        state, matrices = self._committed.get(key), self._compressible(key, x.numel())
        values = x
        if state is not None:
            values = torch.add(x, state.sent, out=self._workspace.like("values", x))
        pending = self._pending[key] = self._open(key, x, matrices)
        factors = self._factors(key, matrices, values, state)
        left, plain = self._sum_left(key, values, matrices, factors)
        right = self._sum_right(key, values, matrices, left, pending)
        for run, summed in zip(uncompressed_parts(total, matrices), plain, strict=True):
            run.copy_(summed)
        for m, p, q, factor in zip(matrices, left, right, pending.factors, strict=True):
            torch.mm(p, q.T, out=m.of(total))
            # The sum of Q is where the power iteration of the next step starts.
            factor.copy_(q)
        return total

    def _sum_left(
        self, key: str, x: Tensor, matrices: Sequence[MatrixSpan], factors: Sequence[Tensor]
    ) -> tuple[list[Tensor], list[Tensor]]:
        """Return orthonormal P of every matrix, and the sums of the values in no matrix."""
        uncompressed = uncompressed_parts(x, matrices)
        flat, views = self._factor_buffers("left", [m.rows for m in matrices], x, uncompressed)
        left, plain = views[: len(matrices)], views[len(matrices) :]
        for m, q, out in zip(matrices, factors, left, strict=True):
            torch.mm(m.of(x), q, out=out)
        for run, out in zip(uncompressed, plain, strict=True):
            out.copy_(run)
        self._inner.all_reduce(flat, f"{key}.p").wait(exposed=False)
        # The sums are equal on all ranks, so each rank orthogonalises them alone, with equal results.
        return [orthogonalise(p) for p in left], plain

    def _sum_right(
        self,
        key: str,
        x: Tensor,
        matrices: Sequence[MatrixSpan],
        left: Sequence[Tensor],
        pending: _LowRankState,
    ) -> list[Tensor]:
        """Return the sum of Q of every matrix; the error of this rank's own products is kept."""
        pending.sent.copy_(x)
        flat, right = self._factor_buffers("right", [m.columns for m in matrices], x)
        for m, p, q in zip(matrices, left, right, strict=True):
            torch.mm(m.of(x).T, p, out=q)
            # Before the sum, q is this rank's own factor: what its product misses is its error.
            m.of(pending.sent).addmm_(p, q.T, alpha=-1)
        for run in uncompressed_parts(pending.sent, matrices):
            run.zero_()
        # An overflow is seen by all ranks in this step, and must not stay in the error.
        pending.sent.nan_to_num_(0.0, 0.0, 0.0)
        self._inner.all_reduce(flat, f"{key}.q").wait(exposed=False)
        return right

    def _factor_buffers(
        self, name: str, heights: Sequence[int], like: Tensor, uncompressed: Sequence[Tensor] = ()
    ) -> tuple[Tensor, list[Tensor]]:
        """Return memory for one all_reduce: matrices of `heights` rows and r columns, and the values in no
        matrix.
        """
        shapes = [
            *((height, self._rank) for height in heights),
            *(tuple(view.shape) for view in uncompressed),
        ]
        sizes = [prod(shape) for shape in shapes]
        flat = self._workspace.take(name, (sum(sizes),), like.dtype, like.device)
        return flat, [view.view(shape) for view, shape in zip(flat.split(sizes), shapes, strict=True)]

    def _open(self, key: str, x: Tensor, matrices: Sequence[MatrixSpan]) -> _LowRankState:
        """Return memory for the errors of a buffer in this step, and for its factors."""
        shapes = [(m.columns, self._rank) for m in matrices]
        state = self._spare.pop(key, None)
        if state is not None and state.sent.shape == x.shape and [q.shape for q in state.factors] == shapes:
            return state
        return _LowRankState(torch.empty_like(x), [x.new_empty(shape) for shape in shapes])

    def _factors(
        self, key: str, matrices: Sequence[MatrixSpan], x: Tensor, state: _LowRankState | None
    ) -> Sequence[Tensor]:
        """Return Q of every matrix; columns that are zero or not finite would stay so, and are drawn
        again.
        """
        before = [None] * len(matrices) if state is None else state.factors
        keys = [hashed(self._seed, "low-rank", key, number) for number in range(len(matrices))]
        triples = zip(matrices, before, keys, strict=True)
        return [next_factor(matrix, q, self._rank, drawn, x) for matrix, q, drawn in triples]

    def _compressible(self, key: str, num_values: int) -> list[MatrixSpan]:
        return compressible_spans(self._matrices.get(key, [near_square_span(num_values)]), self._rank)

    def all_gather(self, x: Tensor, key: str, out: Tensor | None = None) -> Handle:
        gather = self._inner.all_gather
        return self._thread.submit("all_gather", lambda: gather(x, key, out).wait(exposed=False))

    def broadcast(self, x: Tensor, key: str, source: int = 0) -> Handle:
        inner = self._inner
        return self._thread.submit("broadcast", lambda: inner.broadcast(x, key, source).wait(exposed=False))

    def restore(self, key: str, places: Tensor) -> None:
        state = self._committed.get(key)
        if key in self._pending:
            restore_where(self._pending[key].sent, None if state is None else state.sent, places)

    def commit(self, keys: Collection[str] | None = None) -> None:
        done = [*self._pending] if keys is None else [key for key in keys if key in self._pending]
        self._spare |= {key: self._committed[key] for key in done if key in self._committed}
        self._committed |= {key: self._pending.pop(key) for key in done}

    def abort(self) -> None:
        self._thread.clear_error()
        self._spare |= self._pending
        self._pending = {}
        self._inner.abort()

    def residuals(self, key: str, num_values: int) -> Mapping[str, Tensor]:
        """Return the errors and the factors; `factor` holds Q^T in the first r rows of each matrix."""
        state = self._pending.get(key, self._committed.get(key))
        if state is None:
            return {}
        factor = torch.zeros_like(state.sent)
        for matrix, q in zip(self._compressible(key, state.sent.numel()), state.factors, strict=True):
            matrix.of(factor)[: self._rank] = q.T
        return {"sent": state.sent[:num_values], "factor": factor[:num_values]}

    def set_residuals(self, key: str, flats: Mapping[str, Tensor]) -> None:
        """Continue from these; without factors, or with those of other matrices, factors are drawn again."""
        losses = [flat for side, flat in flats.items() if side != "factor"]
        # The sum starts from a clone and not from 0, which would turn -0.0 into 0.0.
        sent, factor = sum(losses[1:], start=losses[0].clone()), flats.get("factor")
        source = torch.zeros_like(sent) if factor is None else factor
        matrices = self._compressible(key, sent.numel())
        self._committed[key] = _LowRankState(
            sent, [m.of(source)[: self._rank].T.contiguous() for m in matrices]
        )

    def chunks_in_flight(self, x: Tensor) -> tuple[int, int]:
        return x.numel(), 1

    def rescale(self, factor: float, keys: Collection[str]) -> None:
        """Multiply the errors; the factors are directions, so they stay unchanged."""
        for state in [self._committed[key] for key in keys if key in self._committed]:
            state.sent.mul_(factor)

    def clear(self, key: str) -> None:
        self._committed.pop(key, None)
        self._pending.pop(key, None)

    def close(self) -> None:
        """End the thread; everything that was launched has been waited for."""
        self._thread.close()


def power_sgd(path: AllToAllCollective, argument: int, seed: int) -> PowerSGDCollective:
    """Build the sums of the word `lowrank:R`."""
    return PowerSGDCollective(path, argument, seed=seed)
