"""What a rank sends for one call of attention, by closed form, and which way is cheaper. Pure.

With N ranks, a sequence of S positions of which a rank has T, B sequences, H heads of queries and G of keys,
of width D, in types of b bytes and sums of a bytes:

    ring   b B G 2D (S - T) forward; b B G 2D (S - T) + a B G 2D (S - T) backward
    heads  b B (2H + 2G) D (N-1)/N T forward, and as much backward

where S - T is what other ranks have. Where sizes differ, keys and values leave out the next rank's positions,
gradients the own.

A model that recomputes by `torch.utils.checkpoint` itself: under `context=N` that would go wrong.

What it repeats in backward runs outside of the mode in which attention, positions and dropout see the whole
sequence: each rank would go on with its part alone. `memory.recompute` repeats inside of it.

What a model calls while it runs on a part of the positions, and what is done in its place.

`scaled_dot_product_attention` goes over all ranks; `positions`, `KeyedDropout` and PyTorch's dropout see the
places in the whole sequence. All else sees what it is given. It is a mode of one block of code, so nothing is
patched and nothing stays; a block that is recomputed in backward is so inside the same mode (`precision`).

Invariant: what cannot be made right is refused by name.

A model on a part of every sequence: the block in which a micro-batch runs.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from inspect import unwrap
from types import FrameType, FunctionType
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode, _get_current_function_mode, _pop_mode_temporarily
from torch.utils.checkpoint import CheckpointFunction, checkpoint

from paceline.comm.net import Net
from paceline.errors import StrategyError, TaskError
from paceline.job.mesh import RankGroup, duplicate_group
from paceline.models.dropout import (
    KeyedDropout,
    draw_mask,
    keep_mask,
    mask_of_own_positions,
    shape_of_all_positions,
)
from paceline.models.positions import positions
from paceline.parallel.context.ring_attention import AttentionRing, ring_attention, to_sum_dtype
from paceline.parallel.context.sequence_split import PositionRuns, SequencePart
from paceline.parallel.context.ulysses import (
    GatherHeadsScatterPositions,
    HeadExchange,
    ScatterHeadsGatherPositions,
)
from paceline.parallel.placement import ContextTransform
from paceline.parallel.recompute import BlockCall, has_checkpoint_contexts
from paceline.parallel.sharded_model import ModelPartition, refuse_compile
from paceline.task import PositionSlicer

if TYPE_CHECKING:
    from paceline.parallel.session_context import SessionContext, TaskMaterial


@dataclass(frozen=True)
class AttentionSizes:
    """The sizes of one call of attention.

    Args:
        sequences: B.
        heads, groups: of queries, and of keys and values.
        width, value_width: of a head of queries and keys, and of values.
        item_bytes: of a value in its type.
        sum_bytes: of a value in the type in which gradients are added.
    """

    sequences: int
    heads: int
    groups: int
    width: int
    value_width: int
    item_bytes: int
    sum_bytes: int


def ring_bytes(call: AttentionSizes, runs: tuple[PositionRuns, ...], rank: int) -> tuple[int, int]:
    """Bytes that a rank sends in forward and in backward, around the ring."""
    length, num_ranks = sum(one.size for one in runs), len(runs)
    row = call.sequences * call.groups * (call.width + call.value_width)
    forward = (length - runs[(rank + 1) % num_ranks].size) * row * call.item_bytes
    return forward, forward + (length - runs[rank].size) * row * call.sum_bytes


def ulysses_bytes(call: AttentionSizes, runs: tuple[PositionRuns, ...], rank: int) -> tuple[int, int]:
    """Bytes that a rank sends in forward and in backward, by all-to-all over heads."""
    length, num_ranks, mine = sum(one.size for one in runs), len(runs), runs[rank].size
    inputs = call.heads * call.width + call.groups * (call.width + call.value_width)
    outputs = call.heads * call.value_width
    away, home = mine * (num_ranks - 1), length - mine  # rows for others x N, and rows of others
    unit = call.sequences * call.item_bytes
    return unit * (inputs * away + outputs * home) // num_ranks, unit * (
        outputs * away + inputs * home
    ) // num_ranks


def is_ulysses_cheaper(call: AttentionSizes, runs: tuple[PositionRuns, ...]) -> bool:
    """Whether all-to-all is possible and all ranks together send less than around the ring."""
    num_ranks = len(runs)
    if call.heads % num_ranks or call.groups % num_ranks:
        return False
    ring = sum(sum(ring_bytes(call, runs, rank)) for rank in range(num_ranks))
    return sum(sum(ulysses_bytes(call, runs, rank)) for rank in range(num_ranks)) < ring


_REENTRANT_CODE = CheckpointFunction.forward.__code__
_CHECKPOINT_CODE = unwrap(checkpoint).__code__


def refuse_user_checkpoint(frame: FrameType | None) -> None:
    """Look at what has called a function that a mode answers.

    Raises:
        TaskError: a checkpoint of the model's own is among it.
    """
    if any(map(_is_user_checkpoint, _outer_frames(frame))):
        raise TaskError(
            "the model computes a part of itself again in backward by torch.utils.checkpoint, where a rank"
            " under context=N would see its own positions only",
            next_step='leave it out of the model and set memory.recompute = "blocks" (Task(blocks=...) names'
            " them), or choose a strategy without context",
        )


def _outer_frames(frame: FrameType | None) -> Iterator[FrameType]:
    while frame is not None:
        yield frame
        frame = frame.f_back


def _is_user_checkpoint(frame: FrameType) -> bool:
    if frame.f_code is _REENTRANT_CODE:
        return True
    if frame.f_code is not _CHECKPOINT_CODE:
        return False
    given = frame.f_locals
    return not (has_checkpoint_contexts(given["context_fn"]) or isinstance(given["function"], BlockCall))


class ContextParallelMode(TorchFunctionMode):
    """Runs a model on a part of the positions.

    Args:
        part: of the sequences.
        group: the ranks that have the other parts.
    """

    def __init__(self, part: SequencePart, group: RankGroup, net: Net) -> None:
        super().__init__()
        self.part, self._group, self._net = part, group, net

    def __torch_function__(
        self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        """What every function of PyTorch becomes inside the block."""
        if func in _RANDOM_FUNCTIONS:
            raise TaskError(
                f"{func.__name__} draws by position, from a stream that begins anew on every rank",
                next_step="use paceline.models.KeyedDropout, or choose a strategy without context",
            )
        instead = _INSTEAD.get(func)
        if instead is None:
            return func(*args, **(kwargs or {}))
        refuse_user_checkpoint(sys._getframe(1))
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
        q, k, v = (_as_heads(_cast_for_autocast(x)) for x in (query, key, value))
        scale = q.shape[-1] ** -0.5 if scale is None else scale
        call = AttentionSizes(
            q.shape[0], q.shape[1], k.shape[1], q.shape[3], v.shape[3], q.element_size(), _sum_bytes(q)
        )
        if is_ulysses_cheaper(call, self.part.runs):
            found = self._by_heads(q, k, v, is_causal, scale)
        else:
            ring = AttentionRing(self._net, self._group, self.part.runs, is_causal, scale)
            found = ring_attention(q, k, v, ring)
        return found.reshape(*query.shape[:-1], v.shape[-1])

    def _by_heads(self, q: Tensor, k: Tensor, v: Tensor, is_causal: bool, scale: float) -> Tensor:
        heads = HeadExchange(self._net, self._group, self.part.runs)
        whole_q, whole_k, whole_v = ScatterHeadsGatherPositions.apply(heads, q, k, v)
        grouped = q.shape[1] != k.shape[1]
        out = F.scaled_dot_product_attention(
            whole_q, whole_k, whole_v, is_causal=is_causal, scale=scale, enable_gqa=grouped
        )
        found: Tensor = GatherHeadsScatterPositions.apply(heads, out)
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
        shape = shape_of_all_positions(module, x)
        dim = self.part.dim_in(shape, "KeyedDropout")
        mask = draw_mask(module, self.part.whole_shape(shape, dim), x.device)
        return mask_of_own_positions(module, self.part.take(mask, dim))

    def dropout(self, input: Tensor, p: float = 0.5, training: bool = True, inplace: bool = False) -> Tensor:  # noqa: A002
        """PyTorch's, which draws for the whole sequence from the stream, as one process does."""
        x = input
        if not training or p == 0.0:
            return F.dropout(x, p, training, inplace)
        dim = self.part.dim_in(x.shape, "dropout")
        noise = F.dropout(_ones_in_memory_order(x, self.part.whole_shape(x.shape, dim)), p, True)
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
_RANDOM_FUNCTIONS = frozenset(
    (
        *(torch.rand_like, torch.randn_like, torch.bernoulli),
        *(Tensor.bernoulli_, Tensor.uniform_, Tensor.normal_),
        *(F.alpha_dropout, F.feature_alpha_dropout, F.dropout1d, F.dropout2d, F.dropout3d),
    )
)
_INSTEAD: Mapping[Any, Callable[..., Any]] = {
    F.scaled_dot_product_attention: ContextParallelMode.attend,
    F.multi_head_attention_forward: ContextParallelMode.multi_head,
    F.dropout: ContextParallelMode.dropout,
    positions: ContextParallelMode.positions,
    keep_mask: ContextParallelMode.keep_mask,
}


def _as_heads(x: Tensor) -> Tensor:
    """[..., H, T, D] as [B, H, T, D]."""
    return x.reshape(-1, *x.shape[-3:])


def _cast_for_autocast(x: Tensor) -> Tensor:
    """In the type that autocast gives to attention."""
    kind = x.device.type
    lower = torch.is_autocast_enabled(kind) and x.is_floating_point() and x.dtype != torch.float64
    return x.to(torch.get_autocast_dtype(kind)) if lower else x


def _sum_bytes(q: Tensor) -> int:
    return to_sum_dtype(q[:0]).element_size()


def _ones_in_memory_order(x: Tensor, shape: Sequence[int]) -> Tensor:
    """Ones in the order of memory of x, in which masks are drawn."""
    strides = list(x.stride())
    order = sorted(range(x.dim()), key=lambda dim: (-strides[dim], dim))
    lying = torch.ones([shape[dim] for dim in order], dtype=x.dtype, device=x.device)
    back = tuple(order.index(dim) for dim in range(x.dim()))
    return lying.permute(back).requires_grad_(x.requires_grad and x.is_floating_point())


class TrialBatch(NamedTuple):
    """A batch that is run to be looked at, in the parameters' type.

    Args:
        is_whole: every rank runs all positions, as without a cut.
    """

    batch: Any
    is_whole: bool


class SequenceSplitter:
    """Makes such blocks.

    Args:
        sequence: the task's.
        group: the ranks among which sequences are split, on a process group of their own: what attention
            sends has an order of its own.
    """

    def __init__(self, sequence: Callable[[Any, PositionSlicer], Any], group: RankGroup, net: Net) -> None:
        self._sequence, self._group, self._net = sequence, group, net

    @contextmanager
    def seen(self, batch: Any) -> Iterator[Any]:
        """See `ShardedModel.seen`; of a `TrialBatch` all of it, or its part.

        Raises:
            TaskError: the task cuts nothing, or cannot be cut.
        """
        with ExitStack() as around:
            if isinstance(
                _get_current_function_mode(), ContextParallelMode
            ):  # an own loop evaluates on its way
                around.enter_context(_pop_mode_temporarily())
            if not isinstance(batch, TrialBatch):
                yield self._entered(batch, around)
                return
            around.enter_context(_autocast_disabled())
            yield batch.batch if batch.is_whole else self._entered(batch.batch, around)

    def _entered(self, batch: Any, around: ExitStack) -> Any:
        """This rank's part of a batch, whose mode is on from here."""
        part = SequencePart(self._group.size, self._group.rank)
        own = self._sequence(batch, part)
        if not part.length:
            raise TaskError(
                "Task.sequence(batch, part) has not called part(x, dim): every rank would run all positions",
                next_step="return part(x, dim) of each tensor that has positions along a dimension",
            )
        around.enter_context(ContextParallelMode(part, self._group, self._net))
        return own


@contextmanager
def _autocast_disabled() -> Iterator[None]:
    """Without the casts of a lower precision."""
    with ExitStack() as around:
        for kind in filter(torch.is_autocast_enabled, ("cpu", "cuda")):
            around.enter_context(torch.autocast(kind, enabled=False))
        yield


def partition_sequences(context: SessionContext, material: TaskMaterial) -> ModelPartition:
    """Every sequence, by the task's `sequence`; attention goes over the ranks that have its other positions.

    Raises:
        StrategyError: the task does not say where positions are, or the model is compiled.
    """
    refuse_compile(context, "context")
    sequence = material.task.sequence
    if sequence is None:
        raise StrategyError(
            "context splits sequences, and nothing says where the positions of a batch are",
            next_step="pass Task(sequence=lambda batch, part: part(batch, 1)), or leave out context",
        )
    context_group = context.mesh.axes["context"]
    split = SequenceSplitter(
        sequence, replace(duplicate_group(context_group, "ring"), name=context_group.name), context.net
    )
    return ModelPartition(
        ContextTransform(), prepare=lambda sharded_model: replace(sharded_model, seen=split.seen)
    )
