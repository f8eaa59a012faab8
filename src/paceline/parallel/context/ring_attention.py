"""Ring attention: keys and values travel around a ring of ranks, past the queries of every rank.

While a block is computed the next one is in flight. Blocks are merged with an online softmax in float32 or
wider: a kernel also returns the logarithm of the denominator of each row (lse), from which blocks of a row
are combined exactly, in any order. In backward keys and values travel once more, followed by the sums of
their gradients, which end on the rank that they belong to.

Sources: Liu, Zaharia, Abbeel 2023, Ring Attention with Blockwise Transformers for Near-Infinite Context,
arXiv:2310.01889, section 3; Dao et al. 2022, FlashAttention, arXiv:2205.14135, section 3.1; Milakov &
Gimelshein 2018, arXiv:1805.02867.

Shapes: B sequences, H query heads, G key and value heads, T positions of this rank, Q queries and K keys of
a block, D width of a head.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from paceline.comm.group_collectives import all_to_all_v
from paceline.comm.handle import Handle
from paceline.comm.net import Net
from paceline.job.mesh import RankGroup
from paceline.parallel.context.sequence_split import AttentionBlock, PositionRuns, attention_block

_aten = torch.ops.aten


class AttentionOutput(NamedTuple):
    """Output of attention and the logarithm of its softmax denominator.

    Args:
        out: [B, H, Q, D] in the dtype of the queries.
        lse: [B, H, Q], float32 or wider.
    """

    out: Tensor
    lse: Tensor


class BlockInputs(NamedTuple):
    """Queries, keys and values of one block, with one key and value head for each query head.

    Args:
        q: [B, H, Q, D].
        k, v: [B, H, K, D].
        causal: a query attends to no later key; only if queries and keys are the same positions.
        scale: factor of the scores.
    """

    q: Tensor
    k: Tensor
    v: Tensor
    causal: bool
    scale: float


BlockGradients = tuple[Tensor, Tensor, Tensor]


class AttentionKernel(Protocol):
    """Attention of one block, forward and backward."""

    def forward(self, block: BlockInputs) -> AttentionOutput:
        """Return the attention of a block."""

    def backward(self, grad: Tensor, block: BlockInputs, whole: AttentionOutput) -> BlockGradients:
        """Return the gradients of q, k and v of a block; `whole` is the output over all blocks of keys."""


class FlashCpuKernel:
    """Kernel of PyTorch's flash attention for CPUs, which allocates no [Q, K] tensor."""

    def forward(self, block: BlockInputs) -> AttentionOutput:
        q, k, v, causal, scale = block
        return AttentionOutput(
            *_aten._scaled_dot_product_flash_attention_for_cpu(q, k, v, 0.0, causal, scale=scale)
        )

    def backward(self, grad: Tensor, block: BlockInputs, whole: AttentionOutput) -> BlockGradients:
        q, k, v, causal, scale = block
        grads: BlockGradients = _aten._scaled_dot_product_flash_attention_for_cpu_backward(
            grad, q, k, v, whole.out, whole.lse, 0.0, causal, scale=scale
        )
        return grads


class MatmulKernel:
    """Kernel of matrix products for all devices, in float32 or wider; allocates [B, H, Q, K]."""

    def forward(self, block: BlockInputs) -> AttentionOutput:
        scores = _scores(block)
        lse = scores.logsumexp(-1)
        out = (scores - lse[..., None]).exp() @ to_sum_dtype(block.v)
        return AttentionOutput(out.to(block.q.dtype), lse)

    def backward(self, grad: Tensor, block: BlockInputs, whole: AttentionOutput) -> BlockGradients:
        q, k, v, _, scale = block
        grad = to_sum_dtype(grad)
        probabilities = (_scores(block) - whole.lse[..., None]).exp()
        # From the whole output, since the softmax is normalised over the keys of all blocks.
        delta = (grad * to_sum_dtype(whole.out)).sum(-1, keepdim=True)
        score_grad = probabilities * (grad @ to_sum_dtype(v).mT - delta) * scale
        return score_grad @ to_sum_dtype(k), score_grad.mT @ to_sum_dtype(q), probabilities.mT @ grad


def choose_attention_kernel(q: Tensor, v: Tensor) -> AttentionKernel:
    """Return the kernel that needs the least memory for these tensors."""
    return FlashCpuKernel() if q.device.type == "cpu" and q.shape[-1] == v.shape[-1] else MatmulKernel()


def to_sum_dtype(x: Tensor) -> Tensor:
    """Cast to the dtype in which blocks are summed: float64 stays, all else becomes float32."""
    return x if x.dtype == torch.float64 else x.float()


def _scores(block: BlockInputs) -> Tensor:
    scores = to_sum_dtype(block.q) @ to_sum_dtype(block.k).mT * block.scale
    if block.causal:
        later = torch.ones(scores.shape[-2:], dtype=torch.bool, device=scores.device).triu(1)
        scores = scores.masked_fill(later, float("-inf"))
    return scores


@dataclass(frozen=True)
class AttentionRing:
    """Ring of ranks in one call of attention.

    Args:
        runs: positions of every rank.
        causal: a position attends only to itself and earlier ones.
        scale: factor of the scores.
    """

    net: Net
    group: RankGroup
    runs: tuple[PositionRuns, ...]
    causal: bool
    scale: float

    def source(self, step: int) -> int:
        """Return the rank whose keys are here after `step` rotations."""
        return (self.group.rank - step) % self.group.size

    def block(self, step: int) -> AttentionBlock:
        """Return which of these keys this rank's queries attend to."""
        return attention_block(self.runs, self.group.rank, self.source(step), causal=self.causal)

    def shift(self, x: Tensor, num_values: int) -> Handle:
        """Send a flat tensor to the next rank, and receive `num_values` from the previous one."""
        size, rank = self.group.size, self.group.rank
        tensors, sizes = [x.new_empty(0)] * size, [0] * size
        tensors[(rank + 1) % size], sizes[(rank - 1) % size] = x, num_values
        # One call for both directions: separate sends around a ring could wait for each other.
        handle = all_to_all_v(self.net, tensors, sizes, self.group)
        return handle.then(lambda received: received[(rank - 1) % size])


def ring_attention(q: Tensor, k: Tensor, v: Tensor, ring: AttentionRing) -> Tensor:
    """Attend from this rank's queries to the keys of all ranks; collective over the ring.

    Args:
        q: [B, H, T, D], where H is a multiple of G.
        k, v: [B, G, T, D].
    Returns:
        [B, H, T, D] in the dtype of q.
    Wire: see `context_attention.ring_bytes`.
    Exactness: softmax attention with another order of additions; tests/dist/test_ring_attention.py.
    """
    out: Tensor = _RingAttention.apply(q, k, v, ring)
    return out


class _RingAttention(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, ring: AttentionRing) -> Tensor:
        out = torch.zeros(*q.shape[:-1], v.shape[-1], dtype=to_sum_dtype(q[:0]).dtype, device=q.device)
        # exp(-inf) is 0, so the first block of a row is taken as it is.
        lse = torch.full(q.shape[:-1], float("-inf"), dtype=out.dtype, device=q.device)
        rotation = _KeyValueRotation(ring, k, v)
        for step in range(ring.group.size):
            keys, values = rotation.take(step)
            block = ring.block(step)
            if not block.is_empty:
                inputs = _select_block(q, keys, values, block, ring.scale)
                output = choose_attention_kernel(inputs.q, inputs.v).forward(inputs)
                _merge_softmax(out[:, :, block.queries], lse[:, :, block.queries], output)
        result = out.to(q.dtype)
        ctx.save_for_backward(q, k, v, result, lse)
        ctx.ring = ring
        return result

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Any) -> Any:
        q, k, v, out, lse = ctx.saved_tensors
        ring, grad = ctx.ring, grads[0].contiguous()
        grad_q = torch.zeros(q.shape, dtype=lse.dtype, device=q.device)
        rotation, gradient_return = _KeyValueRotation(ring, k, v), _GradientReturn(ring, k, v)
        for step in range(ring.group.size):
            keys, values = rotation.take(step)
            block, whole = ring.block(step), AttentionOutput(out, lse)
            sums = tuple(torch.zeros(x.shape, dtype=lse.dtype, device=x.device) for x in (keys, values))
            if not block.is_empty:
                block_grads = _backward_block(grad, q, keys, values, whole, block, ring.scale)
                grad_q[:, :, block.queries] += block_grads[0]
                for total, block_grad in zip(sums, block_grads[1:], strict=True):
                    total[:, :, block.keys] += _sum_by_kv_head(block_grad, total.shape[1])
            gradient_return.give(step, sums)
        grad_k, grad_v = gradient_return.home()
        return grad_q.to(q.dtype), grad_k.to(k.dtype), grad_v.to(v.dtype), None


class _KeyValueRotation:
    """Keys and values on their way around the ring; the next ones are requested while the last are used."""

    def __init__(self, ring: AttentionRing, k: Tensor, v: Tensor) -> None:
        self._ring, self._shapes = ring, (k.shape, v.shape)
        self._current = (k.detach(), v.detach())
        self._in_flight: Handle | None = None

    def take(self, step: int) -> tuple[Tensor, Tensor]:
        """Return the keys and values of `ring.source(step)`; steps must come in order."""
        if self._in_flight is not None:
            self._current = _unpack(self._in_flight.wait(), self._shapes_at(step))
        self._in_flight = None
        if step < self._ring.group.size - 1:
            num_values = sum(_numel(shape) for shape in self._shapes_at(step + 1))
            # Sent on before they are used, so that the transfer runs during the computation.
            self._in_flight = self._ring.shift(_pack(self._current), num_values)
        return self._current

    def _shapes_at(self, step: int) -> list[tuple[int, ...]]:
        return _shapes_of(self._ring, self._shapes, self._ring.source(step))


class _GradientReturn:
    """Sums of the gradients of keys and values, which follow these around the ring and end on their rank."""

    def __init__(self, ring: AttentionRing, k: Tensor, v: Tensor) -> None:
        self._ring, self._shapes = ring, (k.shape, v.shape)
        self._own: Sequence[Tensor] = ()
        self._in_flight: Handle | None = None

    def give(self, step: int, sums: Sequence[Tensor]) -> None:
        """Add this rank's gradients of the keys and values of `ring.source(step)` and send the sum on."""
        # The rank's own keys come first, but their sum arrives only after the last step.
        if step == 0:
            self._own = sums
            return
        if self._in_flight is not None:
            arrived = _unpack(self._in_flight.wait(), [x.shape for x in sums])
            sums = [x + y for x, y in zip(arrived, sums, strict=True)]
        last = step == self._ring.group.size - 1
        source = self._ring.group.rank if last else self._ring.source(step + 1)
        num_values = sum(_numel(shape) for shape in _shapes_of(self._ring, self._shapes, source))
        self._in_flight = self._ring.shift(_pack(sums), num_values)

    def home(self) -> Sequence[Tensor]:
        """Return the gradients of this rank's own keys and values."""
        if self._in_flight is None:
            return self._own
        arrived = _unpack(self._in_flight.wait(), [x.shape for x in self._own])
        return [x + y for x, y in zip(arrived, self._own, strict=True)]


def _select_block(q: Tensor, k: Tensor, v: Tensor, block: AttentionBlock, scale: float) -> BlockInputs:
    """Return the rows of a block, with each key and value head repeated for every query head."""
    heads = q.shape[1]
    keys, values = (_repeat_heads(x[:, :, block.keys], heads) for x in (k, v))
    return BlockInputs(q[:, :, block.queries], keys, values, block.causal, scale)


def _backward_block(
    grad: Tensor, q: Tensor, k: Tensor, v: Tensor, whole: AttentionOutput, block: AttentionBlock, scale: float
) -> BlockGradients:
    inputs = _select_block(q, k, v, block, scale)
    rows = block.queries
    output = AttentionOutput(whole.out[:, :, rows], whole.lse[:, :, rows])
    kernel = choose_attention_kernel(inputs.q, inputs.v)
    return kernel.backward(grad[:, :, rows], inputs, output)


def _merge_softmax(out: Tensor, lse: Tensor, block: AttentionOutput) -> None:
    """Merge the output of a block into that of the blocks before it, in place."""
    merged_lse = torch.logaddexp(lse, block.lse)
    out.mul_((lse - merged_lse).exp()[..., None]).add_(
        to_sum_dtype(block.out) * (block.lse - merged_lse).exp()[..., None]
    )
    lse.copy_(merged_lse)


def _repeat_heads(x: Tensor, heads: int) -> Tensor:
    return x if x.shape[1] == heads else x.repeat_interleave(heads // x.shape[1], dim=1)


def _sum_by_kv_head(x: Tensor, groups: int) -> Tensor:
    """Sum gradients of heads [B, H, T, D] over the query heads that share a key head, [B, G, T, D]."""
    return to_sum_dtype(x) if x.shape[1] == groups else to_sum_dtype(x).unflatten(1, (groups, -1)).sum(2)


def _shapes_of(ring: AttentionRing, shapes: Sequence[torch.Size], rank: int) -> list[tuple[int, ...]]:
    return [(*shape[:2], ring.runs[rank].size, shape[3]) for shape in shapes]


def _numel(shape: Sequence[int]) -> int:
    return torch.Size(shape).numel()


def _pack(tensors: Sequence[Tensor]) -> Tensor:
    return torch.cat([x.reshape(-1) for x in tensors])


def _unpack(flat: Tensor, shapes: Sequence[Sequence[int]]) -> Any:
    pieces = flat.split([_numel(shape) for shape in shapes])
    return tuple(piece.view(tuple(shape)) for piece, shape in zip(pieces, shapes, strict=True))
