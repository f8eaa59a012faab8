"""The norm of a whole gradient, written apart from `paceline.comm.reduction.norm`."""

from __future__ import annotations

from collections.abc import Iterable
from math import sqrt

import torch
from torch import Tensor


def plain_norm(gradients: Iterable[Tensor]) -> float:
    """The Euclidean norm over all tensors together, summed in float64."""
    return sqrt(sum(float(reals(g).to(torch.float64).square().sum()) for g in gradients))


def norm_by_rows(tensors: Iterable[Tensor]) -> float:
    """The norm of a reproducible run as it is defined: row after row, in the order of the model.

    Args:
        tensors: of every trained parameter; zeros where it has no gradient, which keeps its rows in the sum.
    Exactness: a row is what the first dimension counts. PyTorch's norm of the row alone, squared; then one
        sum over all of them. Everything in float64, so bits depend on PyTorch's kernels alone.
    """
    squares = []
    for tensor in tensors:
        t = reals(tensor)
        for row in t.unbind(0) if t.dim() else [t]:
            norm = torch.linalg.vector_norm(row.reshape(1, -1), dim=1, dtype=torch.float64)
            squares.append(norm.square())
    return float(torch.cat(squares).sum().sqrt()) if squares else 0.0


def reals(t: Tensor) -> Tensor:
    """Complex values as pairs of real ones."""
    t = t.detach()
    return torch.view_as_real(t.resolve_conj()) if t.is_complex() else t
