"""Attention of some queries to some keys, with the logarithm of what each row of the softmax was divided by.

From these logarithms the blocks of a row are put together exactly, in any order (Dao et al. 2022,
FlashAttention, arXiv:2205.14135, section 3.1; Milakov & Gimelshein 2018, arXiv:1805.02867).

Shapes: B sequences, H heads, Q queries, K keys, D width of a head.
"""

from __future__ import annotations

from typing import NamedTuple, Protocol

import torch
from torch import Tensor

_aten = torch.ops.aten


class Attended(NamedTuple):
    """Args: out: [B, H, Q, D] in the type of the queries; lse: [B, H, Q], float32 or wider."""

    out: Tensor
    lse: Tensor


class Kernel(Protocol):
    """One block, forward and backward. Keys and values have as many heads as queries."""

    def forward(self, q: Tensor, k: Tensor, v: Tensor, *, causal: bool, scale: float) -> Attended:
        """Attend; `causal` only where queries and keys are the same positions."""

    def backward(
        self, grad: Tensor, q: Tensor, k: Tensor, v: Tensor, whole: Attended, *, causal: bool, scale: float
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Gradients of q, k and v; `whole` is over all keys, whichever are in this block."""


class Fused:
    """PyTorch's flash attention for processors: no [Q, K] tensor."""

    def forward(self, q: Tensor, k: Tensor, v: Tensor, *, causal: bool, scale: float) -> Attended:
        """See `Kernel`."""
        return Attended(*_aten._scaled_dot_product_flash_attention_for_cpu(q, k, v, 0.0, causal, scale=scale))

    def backward(
        self, grad: Tensor, q: Tensor, k: Tensor, v: Tensor, whole: Attended, *, causal: bool, scale: float
    ) -> tuple[Tensor, Tensor, Tensor]:
        """See `Kernel`."""
        found: tuple[Tensor, Tensor, Tensor] = _aten._scaled_dot_product_flash_attention_for_cpu_backward(
            grad, q, k, v, whole.out, whole.lse, 0.0, causal, scale=scale
        )
        return found


class Plain:
    """In products and sums that every device has, in float32 or wider; holds [B, H, Q, K]."""

    def forward(self, q: Tensor, k: Tensor, v: Tensor, *, causal: bool, scale: float) -> Attended:
        """See `Kernel`."""
        scores = _scores(q, k, causal, scale)
        lse = scores.logsumexp(-1)
        return Attended(((scores - lse[..., None]).exp() @ wide(v)).to(q.dtype), lse)

    def backward(
        self, grad: Tensor, q: Tensor, k: Tensor, v: Tensor, whole: Attended, *, causal: bool, scale: float
    ) -> tuple[Tensor, Tensor, Tensor]:
        """See `Kernel`."""
        grad = wide(grad)
        shares = (_scores(q, k, causal, scale) - whole.lse[..., None]).exp()
        delta = (grad * wide(whole.out)).sum(-1, keepdim=True)
        of_scores = shares * (grad @ wide(v).mT - delta) * scale
        return of_scores @ wide(k), of_scores.mT @ wide(q), shares.mT @ grad


def kernel_for(q: Tensor, v: Tensor) -> Kernel:
    """The one that needs least memory here."""
    return Fused() if q.device.type == "cpu" and q.shape[-1] == v.shape[-1] else Plain()


def wide(x: Tensor) -> Tensor:
    """In the type in which blocks are added: float32, or float64 of such."""
    return x if x.dtype == torch.float64 else x.float()


def _scores(q: Tensor, k: Tensor, causal: bool, scale: float) -> Tensor:
    scores = wide(q) @ wide(k).mT * scale
    if causal:
        later = torch.ones(scores.shape[-2:], dtype=torch.bool, device=q.device).triu(1)
        scores = scores.masked_fill(later, float("-inf"))
    return scores
