"""Cross-entropy of a linear output layer, chunk by chunk: the logits of all rows are never in memory.

For each chunk of rows the logits, their loss and their gradient are computed one after another, and the
gradient is multiplied into those of the hidden states and the weight at once; backward only scales these.

Shapes: N rows (positions), W width, V vocabulary, C rows of a chunk.
Source: the chunked loss of Hsu et al. 2024, Liger Kernel, arXiv:2410.10989, section 3.2.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from paceline.models.fused_operations import FusedOperations

_CHUNK_VALUES = 2**20


def chunked_cross_entropy(
    hidden_NW: Tensor,
    weight_VW: Tensor,
    targets_N: Tensor,
    *,
    chunk_rows: int | None = None,
    ignore_index: int = -100,
    operations: FusedOperations | None = None,
) -> tuple[Tensor, Tensor]:
    """Sum the cross-entropies of `hidden @ weight.T` and count the rows.

    Args:
        hidden_NW: [N, W], floating point.
        weight_VW: [V, W], of the same dtype.
        targets_N: int64 [N]; rows with `ignore_index` are left out of sum, count and gradients.
        chunk_rows: rows whose logits are in memory at a time; None: as many as have about a million logits.
        operations: chooses the form of the loss of a chunk; None: the plain form.
    Returns:
        The sum of the losses in nats, float32 [], and the number of rows that are counted, int64 [].
    Memory: C V values for the logits of a chunk (2 C V with `operations`), and the gradients; the unchunked
        loss needs 3 N V and these.
    Exactness: that of float32 logits, up to the order in which chunks are added;
        tests/unit/models/test_fused_operations.py.
    """
    if torch.is_autocast_enabled(hidden_NW.device.type):
        dtype = torch.get_autocast_dtype(hidden_NW.device.type)
        hidden_NW, weight_VW = hidden_NW.to(dtype), weight_VW.to(dtype)
    rows = chunk_rows or max(1, _CHUNK_VALUES // len(weight_VW))
    tracks = torch.is_grad_enabled() and (hidden_NW.requires_grad or weight_VW.requires_grad)
    with torch.autocast(hidden_NW.device.type, enabled=False):
        total: Tensor = _ChunkedLoss.apply(
            hidden_NW, weight_VW, targets_N, rows, ignore_index, operations, tracks
        )
    return total, (targets_N != ignore_index).sum()


def _overwrite_with_gradient(
    logits_CV: Tensor, targets_C: Tensor, ignore_index: int
) -> tuple[Tensor, Tensor]:
    """Return the result of `softmax_loss`, with the gradient in the memory of the logits."""
    counts_C = targets_C != ignore_index
    chosen_C1 = torch.where(counts_C, targets_C, 0)[:, None]
    logits_CV.sub_(logits_CV.amax(1, keepdim=True))
    chosen_logit_C1 = logits_CV.gather(1, chosen_C1)
    norm_C1 = logits_CV.exp_().sum(1, keepdim=True)
    total = ((norm_C1.log() - chosen_logit_C1)[:, 0] * counts_C).sum()
    gradient_CV = logits_CV.mul_(counts_C[:, None] / norm_C1)
    gradient_CV.scatter_add_(1, chosen_C1, -counts_C[:, None].to(gradient_CV.dtype))
    return total, gradient_CV


class _ChunkedLoss(torch.autograd.Function):
    """The sum of the losses; its forward computes the gradients, too."""

    @staticmethod
    def forward(
        ctx: Any,
        hidden_NW: Tensor,
        weight_VW: Tensor,
        targets_N: Tensor,
        rows: int,
        ignore_index: int,
        operations: FusedOperations | None,
        tracks: bool,
    ) -> Tensor:
        total = torch.zeros((), dtype=torch.float32, device=hidden_NW.device)
        # In float32, as a scale of the loss that keeps halves from underflow comes only in backward.
        to_hidden = torch.empty_like(hidden_NW, dtype=torch.float32) if tracks else None
        to_weight = torch.zeros_like(weight_VW, dtype=torch.float32) if tracks else None
        for start in range(0, len(hidden_NW), rows):
            chunk = slice(start, start + rows)
            hidden_CW = hidden_NW[chunk]
            logits_CV = (hidden_CW @ weight_VW.T).float()
            if operations is None:
                loss, gradient_CV = _overwrite_with_gradient(logits_CV, targets_N[chunk], ignore_index)
            else:
                loss, gradient_CV = operations.apply(
                    "softmax_loss", logits_CV, targets_N[chunk], ignore_index
                )
            del logits_CV
            total += loss
            if to_hidden is not None and to_weight is not None:
                gradient_CV = gradient_CV.to(weight_VW.dtype)
                to_hidden[chunk] = gradient_CV @ weight_VW
                if weight_VW.dtype == torch.float32:
                    to_weight.addmm_(gradient_CV.T, hidden_CW)
                else:
                    to_weight += gradient_CV.T @ hidden_CW
        if to_hidden is not None and to_weight is not None:
            ctx.save_for_backward(to_hidden, to_weight)
            ctx.dtype = weight_VW.dtype
        return total

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, scale: Tensor) -> tuple[Tensor | None, ...]:
        to_hidden, to_weight = ctx.saved_tensors
        # In place, because a copy can be as large as the embedding; autograd refuses a second backward then.
        return (
            to_hidden.mul_(scale).to(ctx.dtype) if ctx.needs_input_grad[0] else None,
            to_weight.mul_(scale).to(ctx.dtype) if ctx.needs_input_grad[1] else None,
            *(None,) * 5,
        )
