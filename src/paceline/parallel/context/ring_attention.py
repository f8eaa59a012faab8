"""Attention of some queries to some keys, with the logarithm of what each row of the softmax was divided by.

From these logarithms the blocks of a row are put together exactly, in any order (Dao et al. 2022,
FlashAttention, arXiv:2205.14135, section 3.1; Milakov & Gimelshein 2018, arXiv:1805.02867).

Shapes: B sequences, H heads, Q queries, K keys, D width of a head.

Ring attention: keys and values pass from rank to rank, and every rank adds up what its queries see.

While a block is computed the next is under way. Outputs are added with an online softmax, in float32 or
wider. In backward keys and values pass once more, and after them the sums of their gradients, which come home
to the rank that they belong to.

Source: Liu, Zaharia, Abbeel 2023, Ring Attention with Blockwise Transformers for Near-Infinite Context,
arXiv:2310.01889, section 3.
Shapes: B sequences, H heads of queries, G of keys and values, T positions of this rank, D width of a head.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor

from paceline.comm.group_collectives import all_to_all_v
from paceline.comm.handle import Handle
from paceline.comm.net import Net
from paceline.job.mesh import RankGroup
from paceline.parallel.context.sequence_split import AttentionBlock, PositionRuns, attention_block

_aten = torch.ops.aten


class AttentionOutput(NamedTuple):
    """Args: out: [B, H, Q, D] in the type of the queries; lse: [B, H, Q], float32 or wider."""

    out: Tensor
    lse: Tensor


class AttentionKernel(Protocol):
    """One block, forward and backward. Keys and values have as many heads as queries."""

    def forward(self, q: Tensor, k: Tensor, v: Tensor, *, causal: bool, scale: float) -> AttentionOutput:
        """Attend; `causal` only where queries and keys are the same positions."""

    def backward(
        self,
        grad: Tensor,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        whole: AttentionOutput,
        *,
        causal: bool,
        scale: float,
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Gradients of q, k and v; `whole` is over all keys, whichever are in this block."""


class FlashCpuKernel:
    """PyTorch's flash attention for processors: no [Q, K] tensor."""

    def forward(self, q: Tensor, k: Tensor, v: Tensor, *, causal: bool, scale: float) -> AttentionOutput:
        """See `AttentionKernel`."""
        return AttentionOutput(
            *_aten._scaled_dot_product_flash_attention_for_cpu(q, k, v, 0.0, causal, scale=scale)
        )

    def backward(
        self,
        grad: Tensor,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        whole: AttentionOutput,
        *,
        causal: bool,
        scale: float,
    ) -> tuple[Tensor, Tensor, Tensor]:
        """See `AttentionKernel`."""
        found: tuple[Tensor, Tensor, Tensor] = _aten._scaled_dot_product_flash_attention_for_cpu_backward(
            grad, q, k, v, whole.out, whole.lse, 0.0, causal, scale=scale
        )
        return found


class MatmulKernel:
    """In products and sums that every device has, in float32 or wider; holds [B, H, Q, K]."""

    def forward(self, q: Tensor, k: Tensor, v: Tensor, *, causal: bool, scale: float) -> AttentionOutput:
        """See `AttentionKernel`."""
        scores = _scores(q, k, causal, scale)
        lse = scores.logsumexp(-1)
        return AttentionOutput(((scores - lse[..., None]).exp() @ to_sum_dtype(v)).to(q.dtype), lse)

    def backward(
        self,
        grad: Tensor,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        whole: AttentionOutput,
        *,
        causal: bool,
        scale: float,
    ) -> tuple[Tensor, Tensor, Tensor]:
        """See `AttentionKernel`."""
        grad = to_sum_dtype(grad)
        shares = (_scores(q, k, causal, scale) - whole.lse[..., None]).exp()
        delta = (grad * to_sum_dtype(whole.out)).sum(-1, keepdim=True)
        of_scores = shares * (grad @ to_sum_dtype(v).mT - delta) * scale
        return of_scores @ to_sum_dtype(k), of_scores.mT @ to_sum_dtype(q), shares.mT @ grad


def choose_attention_kernel(q: Tensor, v: Tensor) -> AttentionKernel:
    """The one that needs least memory here."""
    return FlashCpuKernel() if q.device.type == "cpu" and q.shape[-1] == v.shape[-1] else MatmulKernel()


def to_sum_dtype(x: Tensor) -> Tensor:
    """In the type in which blocks are added: float32, or float64 of such."""
    return x if x.dtype == torch.float64 else x.float()


def _scores(q: Tensor, k: Tensor, causal: bool, scale: float) -> Tensor:
    scores = to_sum_dtype(q) @ to_sum_dtype(k).mT * scale
    if causal:
        later = torch.ones(scores.shape[-2:], dtype=torch.bool, device=q.device).triu(1)
        scores = scores.masked_fill(later, float("-inf"))
    return scores


@dataclass(frozen=True)
class AttentionRing:
    """What the ranks of a ring have in common in one call of attention.

    Args:
        runs: the positions of every rank.
        causal: a position sees those up to its own.
        scale: of the scores.
    """

    net: Net
    group: RankGroup
    runs: tuple[PositionRuns, ...]
    causal: bool
    scale: float

    def source(self, step: int) -> int:
        """Whose keys are here after so many passes."""
        return (self.group.rank - step) % self.group.size

    def block(self, step: int) -> AttentionBlock:
        """What this rank's queries see of them."""
        return attention_block(self.runs, self.group.rank, self.source(step), causal=self.causal)

    def shift(self, x: Tensor, num_values: int) -> Handle:
        """Send a flat tensor on, and receive `num_values` from the rank before."""
        size, rank = self.group.size, self.group.rank
        parts, sizes = [x.new_empty(0)] * size, [0] * size
        parts[(rank + 1) % size], sizes[(rank - 1) % size] = x, num_values
        handle = all_to_all_v(self.net, parts, sizes, self.group)
        return handle.then(lambda found: found[(rank - 1) % size])


def ring_attention(q: Tensor, k: Tensor, v: Tensor, ring: AttentionRing) -> Tensor:
    """Attention of this rank's queries to the keys of all ranks; collective over the ring.

    Args:
        q: [B, H, T, D], k and v: [B, G, T, D], where H is a multiple of G.
    Returns:
        [B, H, T, D] in the type of q.
    Wire: see `cost.ring_bytes`.
    Exactness: the right softmax in another order of additions; tests/dist/test_ring_attention.py.
    """
    found: Tensor = _RingAttention.apply(q, k, v, ring)
    return found


class _RingAttention(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, ring: AttentionRing) -> Tensor:
        out = torch.zeros(*q.shape[:-1], v.shape[-1], dtype=to_sum_dtype(q[:0]).dtype, device=q.device)
        lse = torch.full(q.shape[:-1], float("-inf"), dtype=out.dtype, device=q.device)
        passing = _KeyValueRotation(ring, k, v)
        for step in range(ring.group.size):
            keys, values = passing.take(step)
            block = ring.block(step)
            if not block.is_empty:
                own, mine, theirs = _select_block(q, keys, values, block)
                found = choose_attention_kernel(own, theirs).forward(
                    own, mine, theirs, causal=block.causal, scale=ring.scale
                )
                _merge_softmax(out[:, :, block.queries], lse[:, :, block.queries], found)
        result = out.to(q.dtype)
        ctx.save_for_backward(q, k, v, result, lse)
        ctx.ring = ring
        return result

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        q, k, v, out, lse = ctx.saved_tensors
        ring, grad = ctx.ring, grads[0].contiguous()
        grad_q = torch.zeros(q.shape, dtype=lse.dtype, device=q.device)
        passing, gradient_return = _KeyValueRotation(ring, k, v), _GradientReturn(ring, k, v)
        for step in range(ring.group.size):
            keys, values = passing.take(step)
            block, whole = ring.block(step), AttentionOutput(out, lse)
            sums = tuple(torch.zeros(x.shape, dtype=lse.dtype, device=x.device) for x in (keys, values))
            if not block.is_empty:
                found = _backward_block(grad, q, keys, values, whole, block, ring.scale)
                grad_q[:, :, block.queries] += found[0]
                for total, one in zip(sums, found[1:], strict=True):
                    total[:, :, block.keys] += _sum_by_kv_head(one, total.shape[1])
            gradient_return.give(step, sums)
        grad_k, grad_v = gradient_return.home()
        return grad_q.to(q.dtype), grad_k.to(k.dtype), grad_v.to(v.dtype), None


class _KeyValueRotation:
    """Keys and values on their way around; each is asked for while the one before is used."""

    def __init__(self, ring: AttentionRing, k: Tensor, v: Tensor) -> None:
        self._ring, self._shapes = ring, (k.shape, v.shape)
        self._here = (k.detach(), v.detach())
        self._under_way: Handle | None = None

    def take(self, step: int) -> tuple[Tensor, Tensor]:
        """Those of `ring.source(step)`; steps come in order."""
        if self._under_way is not None:
            self._here = _unpack(self._under_way.wait(), self._shapes_at(step))
        self._under_way = None
        if step < self._ring.group.size - 1:
            coming = sum(_numel(shape) for shape in self._shapes_at(step + 1))
            self._under_way = self._ring.shift(_pack(self._here), coming)
        return self._here

    def _shapes_at(self, step: int) -> list[tuple[int, ...]]:
        return _shapes_of(self._ring, self._shapes, self._ring.source(step))


class _GradientReturn:
    """Sums of gradients of keys and values, which follow these around and end where they belong."""

    def __init__(self, ring: AttentionRing, k: Tensor, v: Tensor) -> None:
        self._ring, self._shapes = ring, (k.shape, v.shape)
        self._own: Sequence[Tensor] = ()
        self._under_way: Handle | None = None

    def give(self, step: int, found: Sequence[Tensor]) -> None:
        """What this rank adds to those of `ring.source(step)`."""
        if step == 0:
            self._own = found
            return
        if self._under_way is not None:
            arrived = _unpack(self._under_way.wait(), [x.shape for x in found])
            found = [x + y for x, y in zip(arrived, found, strict=True)]
        last = step == self._ring.group.size - 1
        coming = self._ring.group.rank if last else self._ring.source(step + 1)
        num_values = sum(_numel(shape) for shape in _shapes_of(self._ring, self._shapes, coming))
        self._under_way = self._ring.shift(_pack(found), num_values)

    def home(self) -> Sequence[Tensor]:
        """The sums of this rank's own keys and values."""
        if self._under_way is None:
            return self._own
        arrived = _unpack(self._under_way.wait(), [x.shape for x in self._own])
        return [x + y for x, y in zip(arrived, self._own, strict=True)]


def _select_block(q: Tensor, k: Tensor, v: Tensor, block: AttentionBlock) -> tuple[Tensor, Tensor, Tensor]:
    """The rows of a block, each head of keys and values once for every head of queries."""
    heads = q.shape[1]
    keys, values = (_repeat_heads(x[:, :, block.keys], heads) for x in (k, v))
    return q[:, :, block.queries], keys, values


def _backward_block(
    grad: Tensor, q: Tensor, k: Tensor, v: Tensor, whole: AttentionOutput, block: AttentionBlock, scale: float
) -> tuple[Tensor, Tensor, Tensor]:
    own, keys, values = _select_block(q, k, v, block)
    rows = block.queries
    part = AttentionOutput(whole.out[:, :, rows], whole.lse[:, :, rows])
    kernel = choose_attention_kernel(own, values)
    return kernel.backward(grad[:, :, rows], own, keys, values, part, causal=block.causal, scale=scale)


def _merge_softmax(out: Tensor, lse: Tensor, found: AttentionOutput) -> None:
    """Add a block to what its queries have seen, in place."""
    both = torch.logaddexp(lse, found.lse)
    out.mul_((lse - both).exp()[..., None]).add_(
        to_sum_dtype(found.out) * (found.lse - both).exp()[..., None]
    )
    lse.copy_(both)


def _repeat_heads(x: Tensor, heads: int) -> Tensor:
    return x if x.shape[1] == heads else x.repeat_interleave(heads // x.shape[1], dim=1)


def _sum_by_kv_head(x: Tensor, groups: int) -> Tensor:
    """Gradients of heads [B, H, T, D] added up by the head of keys that they share, [B, G, T, D]."""
    return to_sum_dtype(x) if x.shape[1] == groups else to_sum_dtype(x).unflatten(1, (groups, -1)).sum(2)


def _shapes_of(ring: AttentionRing, shapes: Sequence[torch.Size], rank: int) -> list[tuple[int, ...]]:
    return [(*shape[:2], ring.runs[rank].size, shape[3]) for shape in shapes]


def _numel(shape: Sequence[int]) -> int:
    return torch.Size(shape).numel()


def _pack(tensors: Sequence[Tensor]) -> Tensor:
    return torch.cat([x.reshape(-1) for x in tensors])


def _unpack(flat: Tensor, shapes: Sequence[Sequence[int]]) -> Any:
    parts = flat.split([_numel(shape) for shape in shapes])
    return tuple(part.view(tuple(shape)) for part, shape in zip(parts, shapes, strict=True))
