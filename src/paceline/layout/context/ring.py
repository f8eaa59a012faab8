"""Ring attention: keys and values pass from rank to rank, and every rank adds up what its queries see.

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
from typing import Any

import torch
from torch import Tensor

from paceline.comm import Net
from paceline.comm.exchange import exchange
from paceline.comm.handle import Handle
from paceline.layout.context.kernels import Attended, kernel_for, wide
from paceline.layout.context.spans import Block, Runs, block_of
from paceline.mesh import Group


@dataclass(frozen=True)
class Ring:
    """What the ranks of a ring have in common in one call of attention.

    Args:
        runs: the positions of every rank.
        causal: a position sees those up to its own.
        scale: of the scores.
    """

    net: Net
    group: Group
    runs: tuple[Runs, ...]
    causal: bool
    scale: float

    def source(self, step: int) -> int:
        """Whose keys are here after so many passes."""
        return (self.group.rank - step) % self.group.size

    def block(self, step: int) -> Block:
        """What this rank's queries see of them."""
        return block_of(self.runs, self.group.rank, self.source(step), causal=self.causal)

    def shift(self, x: Tensor, num_values: int) -> Handle:
        """Send a flat tensor on, and receive `num_values` from the rank before."""
        size, rank = self.group.size, self.group.rank
        parts, sizes = [x.new_empty(0)] * size, [0] * size
        parts[(rank + 1) % size], sizes[(rank - 1) % size] = x, num_values
        handle = exchange(self.net, parts, sizes, self.group)
        return handle.then(lambda found: found[(rank - 1) % size])


def ring_attention(q: Tensor, k: Tensor, v: Tensor, ring: Ring) -> Tensor:
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
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, ring: Ring) -> Tensor:
        out = torch.zeros(*q.shape[:-1], v.shape[-1], dtype=wide(q[:0]).dtype, device=q.device)
        lse = torch.full(q.shape[:-1], float("-inf"), dtype=out.dtype, device=q.device)
        passing = _Passing(ring, k, v)
        for step in range(ring.group.size):
            keys, values = passing.take(step)
            block = ring.block(step)
            if not block.is_empty:
                own, mine, theirs = _cut(q, keys, values, block)
                found = kernel_for(own, theirs).forward(
                    own, mine, theirs, causal=block.causal, scale=ring.scale
                )
                _merge(out[:, :, block.queries], lse[:, :, block.queries], found)
        result = out.to(q.dtype)
        ctx.save_for_backward(q, k, v, result, lse)
        ctx.ring = ring
        return result

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        q, k, v, out, lse = ctx.saved_tensors
        ring, grad = ctx.ring, grads[0].contiguous()
        grad_q = torch.zeros(q.shape, dtype=lse.dtype, device=q.device)
        passing, homing = _Passing(ring, k, v), _Homing(ring, k, v)
        for step in range(ring.group.size):
            keys, values = passing.take(step)
            block, whole = ring.block(step), Attended(out, lse)
            sums = tuple(torch.zeros(x.shape, dtype=lse.dtype, device=x.device) for x in (keys, values))
            if not block.is_empty:
                found = _backward(grad, q, keys, values, whole, block, ring.scale)
                grad_q[:, :, block.queries] += found[0]
                for total, one in zip(sums, found[1:], strict=True):
                    total[:, :, block.keys] += _by_group(one, total.shape[1])
            homing.give(step, sums)
        grad_k, grad_v = homing.home()
        return grad_q.to(q.dtype), grad_k.to(k.dtype), grad_v.to(v.dtype), None


class _Passing:
    """Keys and values on their way around; each is asked for while the one before is used."""

    def __init__(self, ring: Ring, k: Tensor, v: Tensor) -> None:
        self._ring, self._shapes = ring, (k.shape, v.shape)
        self._here = (k.detach(), v.detach())
        self._under_way: Handle | None = None

    def take(self, step: int) -> tuple[Tensor, Tensor]:
        """Those of `ring.source(step)`; steps come in order."""
        if self._under_way is not None:
            self._here = _unpacked(self._under_way.wait(), self._shapes_at(step))
        self._under_way = None
        if step < self._ring.group.size - 1:
            coming = sum(_numel(shape) for shape in self._shapes_at(step + 1))
            self._under_way = self._ring.shift(_packed(self._here), coming)
        return self._here

    def _shapes_at(self, step: int) -> list[tuple[int, ...]]:
        return _shapes_of(self._ring, self._shapes, self._ring.source(step))


class _Homing:
    """Sums of gradients of keys and values, which follow these around and end where they belong."""

    def __init__(self, ring: Ring, k: Tensor, v: Tensor) -> None:
        self._ring, self._shapes = ring, (k.shape, v.shape)
        self._own: Sequence[Tensor] = ()
        self._under_way: Handle | None = None

    def give(self, step: int, found: Sequence[Tensor]) -> None:
        """What this rank adds to those of `ring.source(step)`."""
        if step == 0:
            self._own = found
            return
        if self._under_way is not None:
            arrived = _unpacked(self._under_way.wait(), [x.shape for x in found])
            found = [x + y for x, y in zip(arrived, found, strict=True)]
        last = step == self._ring.group.size - 1
        coming = self._ring.group.rank if last else self._ring.source(step + 1)
        num_values = sum(_numel(shape) for shape in _shapes_of(self._ring, self._shapes, coming))
        self._under_way = self._ring.shift(_packed(found), num_values)

    def home(self) -> Sequence[Tensor]:
        """The sums of this rank's own keys and values."""
        if self._under_way is None:
            return self._own
        arrived = _unpacked(self._under_way.wait(), [x.shape for x in self._own])
        return [x + y for x, y in zip(arrived, self._own, strict=True)]


def _cut(q: Tensor, k: Tensor, v: Tensor, block: Block) -> tuple[Tensor, Tensor, Tensor]:
    """The rows of a block, each head of keys and values once for every head of queries."""
    heads = q.shape[1]
    keys, values = (_repeated(x[:, :, block.keys], heads) for x in (k, v))
    return q[:, :, block.queries], keys, values


def _backward(
    grad: Tensor, q: Tensor, k: Tensor, v: Tensor, whole: Attended, block: Block, scale: float
) -> tuple[Tensor, Tensor, Tensor]:
    own, keys, values = _cut(q, k, v, block)
    rows = block.queries
    part = Attended(whole.out[:, :, rows], whole.lse[:, :, rows])
    kernel = kernel_for(own, values)
    return kernel.backward(grad[:, :, rows], own, keys, values, part, causal=block.causal, scale=scale)


def _merge(out: Tensor, lse: Tensor, found: Attended) -> None:
    """Add a block to what its queries have seen, in place."""
    both = torch.logaddexp(lse, found.lse)
    out.mul_((lse - both).exp()[..., None]).add_(wide(found.out) * (found.lse - both).exp()[..., None])
    lse.copy_(both)


def _repeated(x: Tensor, heads: int) -> Tensor:
    return x if x.shape[1] == heads else x.repeat_interleave(heads // x.shape[1], dim=1)


def _by_group(x: Tensor, groups: int) -> Tensor:
    """Gradients of heads [B, H, T, D] added up by the head of keys that they share, [B, G, T, D]."""
    return wide(x) if x.shape[1] == groups else wide(x).unflatten(1, (groups, -1)).sum(2)


def _shapes_of(ring: Ring, shapes: Sequence[torch.Size], rank: int) -> list[tuple[int, ...]]:
    return [(*shape[:2], ring.runs[rank].size, shape[3]) for shape in shapes]


def _numel(shape: Sequence[int]) -> int:
    return torch.Size(shape).numel()


def _packed(tensors: Sequence[Tensor]) -> Tensor:
    return torch.cat([x.reshape(-1) for x in tensors])


def _unpacked(flat: Tensor, shapes: Sequence[Sequence[int]]) -> Any:
    parts = flat.split([_numel(shape) for shape in shapes])
    return tuple(part.view(tuple(shape)) for part, shape in zip(parts, shapes, strict=True))
