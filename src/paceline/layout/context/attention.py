"""What a model calls while it runs on a part of the positions, and what is done in its place.

`scaled_dot_product_attention` goes over all ranks; `positions`, `KeyedDropout` and PyTorch's dropout see the
places in the whole sequence. All else sees what it is given. It is a mode of one block of code, so nothing is
patched and nothing stays; a block that is recomputed in backward is so inside the same mode (`precision`).

Invariant: what cannot be made right is refused by name.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping, Sequence
from types import FunctionType
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode

from paceline.comm import Net
from paceline.errors import TaskError
from paceline.layout.context.cost import Call, goes_by_heads
from paceline.layout.context.heads import GatherPositions, Heads, ScatterPositions
from paceline.layout.context.kernels import wide
from paceline.layout.context.own_checkpoint import require_no_own_checkpoint
from paceline.layout.context.part import Part
from paceline.layout.context.ring import Ring, ring_attention
from paceline.mesh import Group
from paceline.models.dropout import KeyedDropout, at_own_positions, drawn_mask, keep_mask, shared_shape
from paceline.models.positions import positions


class OverAllRanks(TorchFunctionMode):
    """Runs a model on a part of the positions.

    Args:
        part: of the sequences.
        group: the ranks that have the other parts.
    """

    def __init__(self, part: Part, group: Group, net: Net) -> None:
        super().__init__()
        self.part, self._group, self._net = part, group, net

    def __torch_function__(
        self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        """What every function of PyTorch becomes inside the block."""
        if func in _DRAWS:
            raise TaskError(
                f"{func.__name__} draws by position, from a stream that begins anew on every rank",
                next_step="use paceline.models.KeyedDropout, or choose a strategy without context",
            )
        instead = _INSTEAD.get(func)
        if instead is None:
            return func(*args, **(kwargs or {}))
        require_no_own_checkpoint(sys._getframe(1))
        return instead(self, *args, **(kwargs or {}))

    def attend(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attn_mask: Tensor | None = None,
        dropout_p: float = 0.0,
        is_causal: bool = False,
        scale: float | None = None,
        enable_gqa: bool = False,
    ) -> Tensor:
        """`scaled_dot_product_attention` of this rank's queries to all keys; leading dimensions are any.

        Raises:
            TaskError: what is asked for is not right on a part of the positions.
        """
        self._require_right(query, key, value, attn_mask, dropout_p)
        q, k, v = (_as_heads(_cast(x)) for x in (query, key, value))
        scale = q.shape[-1] ** -0.5 if scale is None else scale
        call = Call(
            q.shape[0], q.shape[1], k.shape[1], q.shape[3], v.shape[3], q.element_size(), _sum_bytes(q)
        )
        if goes_by_heads(call, self.part.runs):
            found = self._by_heads(q, k, v, is_causal, scale)
        else:
            ring = Ring(self._net, self._group, self.part.runs, is_causal, scale)
            found = ring_attention(q, k, v, ring)
        return found.reshape(*query.shape[:-1], v.shape[-1])

    def _by_heads(self, q: Tensor, k: Tensor, v: Tensor, is_causal: bool, scale: float) -> Tensor:
        heads = Heads(self._net, self._group, self.part.runs)
        whole_q, whole_k, whole_v = GatherPositions.apply(heads, q, k, v)
        grouped = q.shape[1] != k.shape[1]
        out = F.scaled_dot_product_attention(
            whole_q, whole_k, whole_v, is_causal=is_causal, scale=scale, enable_gqa=grouped
        )
        found: Tensor = ScatterPositions.apply(heads, out)
        return found

    def _require_right(
        self, query: Tensor, key: Tensor, value: Tensor, attn_mask: Tensor | None, dropout_p: float
    ) -> None:
        found = [x.shape[-2] for x in (query, key, value)]
        why = ""
        if attn_mask is not None:
            why = f"a mask of shape {tuple(attn_mask.shape)} knows some positions: use is_causal, or none"
        elif dropout_p > 0:
            why = f"dropout_p={dropout_p:g} drops by a stream inside the kernel: set attention dropout to 0"
        elif found != [self.part.size] * 3:
            why = f"queries, keys and values of {found} positions, where this rank has {self.part.size}"
        elif query.dim() < 3 or query.shape[:-3] != key.shape[:-3] or key.shape[:-2] != value.shape[:-2]:
            why = f"queries of shape {tuple(query.shape)} and keys of {tuple(key.shape)}"
        elif query.shape[-3] % key.shape[-3]:
            why = f"{query.shape[-3]} heads of queries share {key.shape[-3]} of keys"
        if why:
            raise TaskError(
                f"scaled_dot_product_attention under context={self._group.size}: {why}",
                next_step="change the model, or choose a strategy without context",
            )

    def positions(self, x: Tensor, dim: int) -> Tensor:
        """See `paceline.models.positions`."""
        if x.shape[dim] != self.part.size:
            raise TaskError(
                f"positions() is asked of dimension {dim} of a tensor of shape {tuple(x.shape)}, and this"
                f" rank has {self.part.size} of {self.part.length} positions",
                next_step="name the dimension that Task.sequence cuts",
            )
        return self.part.positions(x.device)

    def keep_mask(self, module: KeyedDropout, x: Tensor) -> Tensor:
        """The mask of the whole sequence, at this rank's positions."""
        shape = shared_shape(module, x)
        dim = self.part.dim_in(shape, "KeyedDropout")
        mask = drawn_mask(module, self.part.whole_shape(shape, dim), x.device)
        return at_own_positions(module, self.part.take(mask, dim))

    def dropout(self, input: Tensor, p: float = 0.5, training: bool = True, inplace: bool = False) -> Tensor:  # noqa: A002
        """PyTorch's, which draws for the whole sequence from the stream, as one process does."""
        x = input
        if not training or p == 0.0:
            return F.dropout(x, p, training, inplace)
        dim = self.part.dim_in(x.shape, "dropout")
        noise = F.dropout(_ones_lying_as(x, self.part.whole_shape(x.shape, dim)), p, True)
        noise = self.part.take(noise.detach(), dim)
        return x.mul_(noise) if inplace else x * noise

    def multi_head(self, *args: Any, **kwargs: Any) -> Any:
        """The body of `nn.MultiheadAttention`, in which this mode sees the attention.

        Raises:
            TaskError: it would return attention weights, which no rank has.
        """
        if kwargs.get("need_weights", True):
            raise TaskError(
                "nn.MultiheadAttention is asked for its weights, and context=N computes none",
                next_step="call it with need_weights=False",
            )
        with self:
            return _BODY(*args, **kwargs)


_GUARD = {"has_torch_function": lambda tensors: False}
_BODY = FunctionType(  # PyTorch hands the whole function to a mode, which then does not see what is in it
    F.multi_head_attention_forward.__code__,
    {**vars(F), **_GUARD},
    argdefs=F.multi_head_attention_forward.__defaults__,
)
_DRAWS = frozenset(
    (
        *(torch.rand_like, torch.randn_like, torch.bernoulli),
        *(Tensor.bernoulli_, Tensor.uniform_, Tensor.normal_),
        *(F.alpha_dropout, F.feature_alpha_dropout, F.dropout1d, F.dropout2d, F.dropout3d),
    )
)
_INSTEAD: Mapping[Any, Callable[..., Any]] = {
    F.scaled_dot_product_attention: OverAllRanks.attend,
    F.multi_head_attention_forward: OverAllRanks.multi_head,
    F.dropout: OverAllRanks.dropout,
    positions: OverAllRanks.positions,
    keep_mask: OverAllRanks.keep_mask,
}


def _as_heads(x: Tensor) -> Tensor:
    """[..., H, T, D] as [B, H, T, D]."""
    return x.reshape(-1, *x.shape[-3:])


def _cast(x: Tensor) -> Tensor:
    """In the type that autocast gives to attention."""
    kind = x.device.type
    lower = torch.is_autocast_enabled(kind) and x.is_floating_point() and x.dtype != torch.float64
    return x.to(torch.get_autocast_dtype(kind)) if lower else x


def _sum_bytes(q: Tensor) -> int:
    return wide(q[:0]).element_size()


def _ones_lying_as(x: Tensor, shape: Sequence[int]) -> Tensor:
    """Ones in the order of memory of x, in which masks are drawn."""
    strides = list(x.stride())
    order = sorted(range(x.dim()), key=lambda dim: (-strides[dim], dim))
    lying = torch.ones([shape[dim] for dim in order], dtype=x.dtype, device=x.device)
    back = tuple(order.index(dim) for dim in range(x.dim()))
    return lying.permute(back).requires_grad_(x.requires_grad and x.is_floating_point())
