"""The low-rank codec: a matrix as the product of two thin ones, found by one step of power iteration."""

from __future__ import annotations

from collections.abc import Sequence
from math import isqrt
from typing import NamedTuple

import torch
from torch import Tensor

from paceline.comm.codecs.codec_protocol import Codec, CodecKeys, bytes_of, values_of
from paceline.comm.workspace import Workspace

# A column of which less than this share of its length is left is numerically dependent on those before it.
_DEPENDENCE_TOLERANCE = 1e-4


class MatrixSpan(NamedTuple):
    """The position of a matrix in a row of values: its first value, and its shape."""

    start: int
    rows: int
    columns: int

    @property
    def end(self) -> int:
        """Index after its last value."""
        return self.start + self.rows * self.columns

    def of(self, x: Tensor) -> Tensor:
        """Return the matrix in `x` [n], as a view."""
        return x[self.start : self.end].view(self.rows, self.columns)


def near_square_span(num_values: int) -> MatrixSpan:
    """Return the largest matrix with floor(sqrt n) rows at the beginning of n values."""
    rows = isqrt(num_values)
    return MatrixSpan(0, rows, num_values // rows if rows else 0)


def compressible_spans(matrices: Sequence[MatrixSpan], rank: int) -> list[MatrixSpan]:
    """Return the matrices whose factors are smaller than they are."""
    return [m for m in matrices if rank * (m.rows + m.columns) < m.rows * m.columns]


def draw_factor(matrix: MatrixSpan, rank: int, key: int, like: Tensor) -> Tensor:
    """Draw a random factor [columns, rank] to start from, a function of the key."""
    # A CPU generator, so that ranks on different devices draw the same numbers.
    draw = torch.Generator().manual_seed(key)
    return torch.randn(matrix.columns, rank, generator=draw).to(like.device, like.dtype)


def next_factor(matrix: MatrixSpan, before: Tensor | None, rank: int, key: int, like: Tensor) -> Tensor:
    """Return Q of the previous step, [columns, rank]; columns without a direction are drawn at random."""
    if before is not None and bool(has_direction(before).all()):
        return before
    # A column without direction would stay zero or infinite in all later steps.
    fresh = draw_factor(matrix, rank, key, like)
    return fresh if before is None else torch.where(has_direction(before), before, fresh)


def has_direction(x: Tensor) -> Tensor:
    """Return which columns of `x` [M, r] are finite and not zero, bool [r]."""
    norms = torch.linalg.vector_norm(x, dim=0)
    return (norms > 0) & norms.isfinite()


def orthogonalise(x: Tensor) -> Tensor:
    """Make the columns of `x` [M, r] orthonormal, in place; a column that depends on those before it becomes
    zero.

    Source: modified Gram-Schmidt, as in PowerSGD, Algorithm 1.
    """
    tops = torch.linalg.vector_norm(x, torch.inf, 0)
    # Scale first: squares of large values would overflow in the norm.
    x.div_(tops.clamp_min_(torch.finfo(x.dtype).tiny))
    before = x.norm(dim=0)
    for k in range(x.shape[1]):
        column = x[:, k : k + 1]
        norm = column.norm()
        column.mul_(torch.where(norm <= _DEPENDENCE_TOLERANCE * before[k], 0.0, 1 / norm))
        x[:, k + 1 :].addmm_(column, column.T @ x[:, k + 1 :], alpha=-1)
    return x


def uncompressed_parts(x: Tensor, matrices: Sequence[MatrixSpan]) -> list[Tensor]:
    """Return the runs of `x` [n] between the matrices, as views."""
    ends = [0, *(m.end for m in matrices)]
    starts = [*(m.start for m in matrices), x.numel()]
    return [x[end:start] for end, start in zip(ends, starts, strict=True)]


class LowRankCodec:
    """A codec to P Q^T of rank r for the largest near-square matrix of a row; the remaining values are sent
    as they are.

    This is the encoding of one row alone. Where ranks average whole tensors, `comm.collectives.power_sgd` has
    better factors: it knows the shapes of the tensors, and continues from the factors of the step before.

    Args:
        rank: r.
    Source: Vogels et al. 2019, PowerSGD, arXiv:1905.13727, section 3.
    """

    needs_error_feedback, ragged, block = True, False, 0

    def __init__(self, rank: int) -> None:
        self.rank = rank

    def _matrices(self, num_values: int) -> list[MatrixSpan]:
        return compressible_spans([near_square_span(num_values)], self.rank)

    def num_bytes(self, num_values: int) -> int:
        """Return 4 (r (M + N) + n - M N); 4 n where factors would not be smaller."""
        saved = sum(m.rows * m.columns - self.rank * (m.rows + m.columns) for m in self._matrices(num_values))
        return 4 * (num_values - saved)

    def encode(self, x: Tensor, keys: CodecKeys, workspace: Workspace) -> Tensor:
        return bytes_of(torch.stack([self._coded(row, keys) for row in x]) if len(x) else x)

    def _coded(self, x: Tensor, keys: CodecKeys) -> Tensor:
        values, matrices = x.to(torch.float32), self._matrices(x.numel())
        pieces = []
        for matrix in matrices:
            m = matrix.of(values)
            p = orthogonalise(m @ draw_factor(matrix, self.rank, keys.shared, m))
            pieces += [p.reshape(-1), (m.T @ p).reshape(-1)]
        return torch.cat([*pieces, *uncompressed_parts(values, matrices)])

    def decode(self, payload: Tensor, out: Tensor, keys: CodecKeys, workspace: Workspace) -> None:
        """Multiply the factors of each row, and copy the values that are in no matrix."""
        rows, matrices = (
            values_of(payload, torch.float32, workspace).to(out.dtype),
            self._matrices(out.shape[1]),
        )
        for row, values in zip(out, rows, strict=True):
            offset = 0
            for matrix in matrices:
                sizes = matrix.rows * self.rank, matrix.columns * self.rank
                p, q = values[offset : offset + sum(sizes)].split(sizes)
                torch.matmul(p.view(-1, self.rank), q.view(-1, self.rank).T, out=matrix.of(row))
                offset += sum(sizes)
            for run in uncompressed_parts(row, matrices):
                run.copy_(values[offset : offset + run.numel()])
                offset += run.numel()


def low_rank(argument: int) -> Codec:
    """Build the codec of the word `lowrank:R`."""
    return LowRankCodec(argument)
