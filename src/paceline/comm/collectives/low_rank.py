"""Sums of matrices as products of low rank, with error feedback: PowerSGD.

Each matrix M of a buffer is summed as P Q^T: first the ranks sum M Q and make its columns orthonormal, then
they sum M^T P. Q is kept from step to step, so that one step of power iteration follows the other. What is
no matrix, or would not become smaller, is summed as it is, in the first of the two rounds.
Invariant: factors are equal on all ranks; what is lost is of this rank alone.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from paceline.comm.codecs.low_rank import Matrix, draw_factor, near_square, orthogonalise, rest_of, worthwhile
from paceline.comm.collectives.collective import Exchanging
from paceline.comm.handle import Handle
from paceline.comm.line import Line
from paceline.keys import key as hashed
from paceline.mesh import Group


@dataclass(frozen=True)
class _Kept:
    """Of one buffer.

    Args:
        sent: what this rank's values lost, [n].
        factors: Q of every matrix, [columns, rank].
    """

    sent: Tensor
    factors: Sequence[Tensor]


class LowRankCollective:
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

    def __init__(self, inner: Exchanging, rank: int, *, seed: int = 0) -> None:
        self._inner, self._rank, self._seed = inner, rank, seed
        self._line = Line(f"{inner.group.name}-low-rank", self._waited)
        self._matrices: dict[str, Sequence[Matrix]] = {}
        self._kept: dict[str, _Kept] = {}
        self._pending: dict[str, _Kept] = {}

    @property
    def group(self) -> Group:
        """See `Collective`."""
        return self._inner.group

    @property
    def feedback(self) -> LowRankCollective:
        """See `Collective`."""
        return self

    def buffer(self, num_values: int, like: Tensor, key: str) -> Tensor:
        """See `Collective`."""
        return like.new_zeros(num_values)

    def describe(self, key: str, matrices: Sequence[Matrix]) -> None:
        """See `Feedback`."""
        self._matrices[key] = matrices

    def all_reduce(self, x: Tensor, key: str) -> Handle:
        """See `Collective`."""
        return self._line.submit("all_reduce", lambda: x.copy_(self._sum(x.reshape(-1), key).view(x.shape)))

    def reduce_scatter(self, x: Tensor, key: str) -> Handle:
        """See `Collective`."""
        handle = self._line.submit("all_reduce", lambda: self._sum(x.reshape(-1), key))
        return handle.then(lambda total: total.view(x.shape)[self.group.rank].clone())

    def _sum(self, x: Tensor, key: str) -> Tensor:
        kept, matrices = self._kept.get(key), self._worthwhile(key, x.numel())
        values = x if kept is None else x + kept.sent
        factors = self._factors(key, matrices, values, kept)
        total, sent = torch.empty_like(x), values.clone()
        thin = [m.of(values) @ q for m, q in zip(matrices, factors, strict=True)]
        thin = self._summed([*thin, *rest_of(values, matrices)], f"{key}.p")
        for place, found in zip(rest_of(total, matrices), thin[len(matrices) :], strict=True):
            place.copy_(found)
        left = [orthogonalise(p) for p in thin[: len(matrices)]]
        own = [m.of(values).T @ p for m, p in zip(matrices, left, strict=True)]
        right = self._summed(own, f"{key}.q")
        for m, p, q, mine in zip(matrices, left, right, own, strict=True):
            torch.matmul(p, q.T, out=m.of(total))
            m.of(sent).sub_(p @ mine.T)
        for place in rest_of(sent, matrices):
            place.zero_()
        self._pending[key] = _Kept(sent.nan_to_num_(0.0, 0.0, 0.0), right)
        return total

    def _summed(self, parts: Sequence[Tensor], name: str) -> list[Tensor]:
        """The sums over the ranks of some tensors, in one all_reduce."""
        flat = torch.cat([part.reshape(-1) for part in parts]) if parts else torch.zeros(0)
        self._inner.all_reduce(flat, name).wait(exposed=False)
        pieces = flat.split([part.numel() for part in parts])
        return [piece.view(part.shape) for piece, part in zip(pieces, parts, strict=True)]

    def _factors(self, key: str, matrices: Sequence[Matrix], x: Tensor, kept: _Kept | None) -> list[Tensor]:
        """Q of every matrix; a column that is zero, or not finite, would stay so, and is drawn anew."""
        found = []
        for number, matrix in enumerate(matrices):
            fresh = draw_factor(matrix, self._rank, hashed(self._seed, "low-rank", key, number), x)
            if kept is not None:
                q = kept.factors[number]
                norms = q.norm(dim=0)
                fresh = torch.where((norms > 0) & norms.isfinite(), q, fresh)
            found.append(fresh)
        return found

    def _worthwhile(self, key: str, num_values: int) -> list[Matrix]:
        return worthwhile(self._matrices.get(key, [near_square(num_values)]), self._rank)

    def all_gather(self, x: Tensor, key: str) -> Handle:
        """See `Collective`."""
        return self._line.submit("all_gather", lambda: self._inner.all_gather(x, key).wait(exposed=False))

    def broadcast(self, x: Tensor, key: str, source: int = 0) -> Handle:
        """See `Collective`."""
        return self._line.submit(
            "broadcast", lambda: self._inner.broadcast(x, key, source).wait(exposed=False)
        )

    def commit(self) -> None:
        """See `Feedback`."""
        self._kept.update(self._pending)
        self._pending = {}

    def abort(self) -> None:
        """See `Collective`."""
        self._line.mend()
        self._pending = {}
        self._inner.abort()

    def lost(self, key: str, num_values: int) -> Mapping[str, Tensor]:
        """See `Feedback`; `factor` holds Q^T in the first r rows of each matrix."""
        found = self._pending.get(key, self._kept.get(key))
        if found is None:
            return {}
        factor = torch.zeros_like(found.sent)
        for matrix, q in zip(self._worthwhile(key, found.sent.numel()), found.factors, strict=True):
            matrix.of(factor)[: self._rank] = q.T
        return {"sent": found.sent[:num_values], "factor": factor[:num_values]}

    def set_lost(self, key: str, flats: Mapping[str, Tensor]) -> None:
        """See `Feedback`; without factors, or where they are of other matrices, they are found anew."""
        losses = [flat for side, flat in flats.items() if side != "factor"]
        sent, factor = torch.stack(losses).sum(0), flats.get("factor")
        source = torch.zeros_like(sent) if factor is None else factor
        matrices = self._worthwhile(key, sent.numel())
        self._kept[key] = _Kept(sent, [m.of(source)[: self._rank].T.contiguous() for m in matrices])

    def clear(self, key: str) -> None:
        """See `Feedback`."""
        self._kept.pop(key, None)
        self._pending.pop(key, None)

    def close(self) -> None:
        """End the thread; what was launched has been waited for."""
        self._line.close()

    def _waited(self, op: str, seconds: float) -> None:
        """Count seconds that a caller waited for both rounds."""
        row = self._inner.net.ledger.rows.get((op, self.group.name))
        if row is not None:
            row.exposed_seconds += seconds


def summed(path: Exchanging, argument: str, seed: int) -> LowRankCollective:
    """The word `lowrank:R`, where ranks sum."""
    return LowRankCollective(path, int(argument), seed=seed)
