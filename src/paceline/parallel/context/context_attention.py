"""Context parallelism: run a model on a part of the positions of every sequence.

`ContextParallelMode` is active around a micro-batch. In it, `scaled_dot_product_attention` attends to the
positions of all ranks, by a ring or by an all-to-all over heads, whichever sends less; `positions`,
`KeyedDropout` and PyTorch's dropout use the places in the whole sequence. All other functions see the local
part. Nothing is patched, and nothing stays changed afterwards. Invariant: what cannot be made right is
refused by name. A block that memory.recompute repeats in backward runs in the same mode; the model's own use
of `torch.utils.checkpoint` would not, so it is refused.

Bytes of one call of attention, in closed form. With N ranks, a sequence of S positions of which a rank has T,
B sequences, H query heads and G key heads of width D, values of b bytes and sums of a bytes:

    ring   b B G 2D (S - T) forward; b B G 2D (S - T) + a B G 2D (S - T) backward
    heads  b B (2H + 2G) D (N-1)/N T forward, and as much backward

where S - T is what other ranks have. Where sizes differ, keys and values leave out the next rank's
positions, and gradients the rank's own.
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
from paceline.parallel.rng_state import dropout_noise
from paceline.parallel.sharded_model import ModelPartition, refuse_compile
from paceline.task import PositionSlicer

if TYPE_CHECKING:
    from paceline.parallel.session_context import SessionContext, TaskMaterial


@dataclass(frozen=True)
class AttentionSizes:
    """Sizes of one call of attention.

    Args:
        sequences: B.
        heads, groups: number of heads of queries, and of keys and values.
        width, value_width: width of a head of queries and keys, and of values.
        item_bytes: bytes of a value in its dtype.
        sum_bytes: bytes of a value in the dtype in which gradients are summed.
    """

    sequences: int
    heads: int
    groups: int
    width: int
    value_width: int
    item_bytes: int
    sum_bytes: int


def ring_bytes(call: AttentionSizes, runs: tuple[PositionRuns, ...], rank: int) -> tuple[int, int]:
    """Return the bytes that a rank sends in forward and in backward of ring attention."""
    length, num_ranks = sum(positions.size for positions in runs), len(runs)
    row = call.sequences * call.groups * (call.width + call.value_width)
    forward = (length - runs[(rank + 1) % num_ranks].size) * row * call.item_bytes
    return forward, forward + (length - runs[rank].size) * row * call.sum_bytes


def ulysses_bytes(call: AttentionSizes, runs: tuple[PositionRuns, ...], rank: int) -> tuple[int, int]:
    """Return the bytes that a rank sends in forward and in backward of an all-to-all over heads."""
    length, num_ranks, local_length = sum(positions.size for positions in runs), len(runs), runs[rank].size
    inputs = call.heads * call.width + call.groups * (call.width + call.value_width)
    outputs = call.heads * call.value_width
    # Rows for other ranks, times N, and rows of other ranks.
    outgoing, incoming = local_length * (num_ranks - 1), length - local_length
    unit = call.sequences * call.item_bytes
    return unit * (inputs * outgoing + outputs * incoming) // num_ranks, unit * (
        outputs * outgoing + inputs * incoming
    ) // num_ranks


def is_ulysses_cheaper(call: AttentionSizes, runs: tuple[PositionRuns, ...]) -> bool:
    """Return whether an all-to-all is possible and all ranks together send less than around the ring."""
    num_ranks = len(runs)
    if call.heads % num_ranks or call.groups % num_ranks:
        return False
    # Over all ranks, so that every rank makes the same choice.
    ring = sum(sum(ring_bytes(call, runs, rank)) for rank in range(num_ranks))
    return sum(sum(ulysses_bytes(call, runs, rank)) for rank in range(num_ranks)) < ring


_REENTRANT_CODE = CheckpointFunction.forward.__code__
_CHECKPOINT_CODE = unwrap(checkpoint).__code__


def refuse_user_checkpoint(frame: FrameType | None) -> None:
    """Search the callers of a function for a checkpoint of the model's own.

    Raises:
        TaskError: there is one. What it repeats in backward would run outside of the mode.
    """
    if any(map(_is_user_checkpoint, _outer_frames(frame))):
        raise TaskError(
            "the model uses torch.utils.checkpoint, whose recomputation under context=N would see only the"
            " positions of its rank",
            next_step='remove it and set memory.recompute = "blocks" (Task(blocks=...) names the blocks), or'
            " choose a strategy without context",
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
    arguments = frame.f_locals
    return not (
        has_checkpoint_contexts(arguments["context_fn"]) or isinstance(arguments["function"], BlockCall)
    )


class ContextParallelMode(TorchFunctionMode):
    """Function mode in which a model runs on a part of the positions.

    Args:
        sequence_part: this rank's part of the sequences.
        group: ranks that have the other parts.
    """

    def __init__(self, sequence_part: SequencePart, group: RankGroup, net: Net) -> None:
        super().__init__()
        self.part, self._group, self._net = sequence_part, group, net

    def __torch_function__(
        self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        """Call a function of PyTorch, or what replaces it in this mode."""
        if func in _RANDOM_FUNCTIONS:
            raise TaskError(
                f"{func.__name__} draws a number for each position, and every rank would draw the same ones",
                next_step="use paceline.models.KeyedDropout, or choose a strategy without context",
            )
        replacement = _INSTEAD.get(func)
        if replacement is None:
            return func(*args, **(kwargs or {}))
        # The stack is the only place where the forward of a checkpoint can be recognised.
        refuse_user_checkpoint(sys._getframe(1))
        return replacement(self, *args, **(kwargs or {}))

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
        """Attend from this rank's queries to the keys of all ranks; replaces `scaled_dot_product_attention`.

        Args:
            query, key, value: [..., heads, local positions, width], with any leading dimensions.
        Raises:
            TaskError: the arguments have no right answer on a part of the positions.
        """
        self._require_right(query, key, value, attn_mask, dropout_p)
        q, k, v = (_as_heads(_cast_for_autocast(x)) for x in (query, key, value))
        scale = q.shape[-1] ** -0.5 if scale is None else scale
        call = AttentionSizes(
            q.shape[0], q.shape[1], k.shape[1], q.shape[3], v.shape[3], q.element_size(), _sum_bytes(q)
        )
        if is_ulysses_cheaper(call, self.part.runs):
            out = self._by_heads(q, k, v, is_causal, scale)
        else:
            ring = AttentionRing(self._net, self._group, self.part.runs, is_causal, scale)
            out = ring_attention(q, k, v, ring)
        return out.reshape(*query.shape[:-1], v.shape[-1])

    def _by_heads(self, q: Tensor, k: Tensor, v: Tensor, is_causal: bool, scale: float) -> Tensor:
        heads = HeadExchange(self._net, self._group, self.part.runs)
        whole_q, whole_k, whole_v = ScatterHeadsGatherPositions.apply(heads, q, k, v)
        is_grouped = q.shape[1] != k.shape[1]
        # PyTorch suspends a mode while its own function runs, so this is the plain attention.
        out = F.scaled_dot_product_attention(
            whole_q, whole_k, whole_v, is_causal=is_causal, scale=scale, enable_gqa=is_grouped
        )
        local_out: Tensor = GatherHeadsScatterPositions.apply(heads, out)
        return local_out

    def _require_right(
        self, query: Tensor, key: Tensor, value: Tensor, attn_mask: Tensor | None, dropout_p: float
    ) -> None:
        """Raise TaskError for arguments that would give a wrong result on a part of the positions."""
        lengths = [x.shape[-2] for x in (query, key, value)]
        reason = ""
        if attn_mask is not None:
            reason = (
                f"a mask of shape {tuple(attn_mask.shape)} covers local positions: use is_causal, or none"
            )
        elif dropout_p > 0:
            reason = f"dropout_p={dropout_p:g} draws its mask inside the kernel: set attention dropout to 0"
        elif lengths != [self.part.size] * 3:
            reason = f"queries, keys and values have {lengths} positions, but this rank has {self.part.size}"
        elif query.dim() < 3 or query.shape[:-3] != key.shape[:-3] or key.shape[:-2] != value.shape[:-2]:
            reason = f"queries of shape {tuple(query.shape)} do not match keys of {tuple(key.shape)}"
        elif query.shape[-3] % key.shape[-3]:
            reason = f"{query.shape[-3]} query heads cannot share {key.shape[-3]} key heads evenly"
        if reason:
            raise TaskError(
                f"scaled_dot_product_attention under context={self._group.size}: {reason}",
                next_step="change the model, or choose a strategy without context",
            )

    def positions(self, x: Tensor, dim: int) -> Tensor:
        if x.shape[dim] != self.part.size:
            raise TaskError(
                f"positions() was called for dimension {dim} of a tensor of shape {tuple(x.shape)}, but this"
                f" rank has {self.part.size} of {self.part.length} positions",
                next_step="pass the dimension that Task.sequence splits",
            )
        return self.part.positions(x.device)

    def keep_mask(self, module: KeyedDropout, x: Tensor) -> Tensor:
        """Draw the dropout mask for the whole sequence and return the part at this rank's positions."""
        shape = shape_of_all_positions(module, x)
        dim = self.part.dim_in(shape, "KeyedDropout")
        mask = draw_mask(module, self.part.whole_shape(shape, dim), x.device)
        return mask_of_own_positions(module, self.part.take(mask, dim))

    def dropout(self, input: Tensor, p: float = 0.5, training: bool = True, inplace: bool = False) -> Tensor:  # noqa: A002
        """Apply PyTorch's dropout with a mask that is drawn for the whole sequence, as in one process."""
        x = input
        if not training or p == 0.0:
            return F.dropout(x, p, training, inplace)
        dim = self.part.dim_in(x.shape, "dropout")
        # The scaled mask of the whole sequence, of which the rank takes its positions.
        noise = self.part.take(dropout_noise(x, self.part.whole_shape(x.shape, dim), p), dim)
        return x.mul_(noise) if inplace else x * noise

    def multi_head(self, *args: Any, **kwargs: Any) -> Any:
        """Run the body of `nn.MultiheadAttention` such that this mode sees the attention inside it.

        Raises:
            TaskError: it should return attention weights, which no rank has.
        """
        if kwargs.get("need_weights", True):
            raise TaskError(
                "nn.MultiheadAttention should return attention weights, which context=N does not compute",
                next_step="call it with need_weights=False",
            )
        # Active again, since PyTorch suspends a mode while its own function runs.
        with self:
            return MULTI_HEAD_BODY(*args, **kwargs)


_GUARD = {"has_torch_function": lambda tensors: False}
# PyTorch hands the whole function to a mode, which then does not see the attention inside it. A copy whose
# global has_torch_function is always False runs the body instead.
MULTI_HEAD_BODY = FunctionType(
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
    """Return [..., H, T, D] as [B, H, T, D]."""
    return x.reshape(-1, *x.shape[-3:])


def _cast_for_autocast(x: Tensor) -> Tensor:
    """Cast to the dtype in which autocast runs attention."""
    kind = x.device.type
    # Autocast acts on PyTorch's attention, which is not called here.
    lower = torch.is_autocast_enabled(kind) and x.is_floating_point() and x.dtype != torch.float64
    return x.to(torch.get_autocast_dtype(kind)) if lower else x


def _sum_bytes(q: Tensor) -> int:
    return to_sum_dtype(q[:0]).element_size()


class TrialBatch(NamedTuple):
    """Batch that is run only to compare results, in the dtype of the parameters.

    Args:
        is_whole: every rank runs all positions, as without a split.
    """

    batch: Any
    is_whole: bool


class SequenceSplitter:
    """Factory of the context manager in which a micro-batch runs on this rank's positions.

    Args:
        sequence: of the task; splits a batch.
        group: ranks over which sequences are split, on a process group of their own, since what attention
            sends has its own order.
    """

    def __init__(self, sequence: Callable[[Any, PositionSlicer], Any], group: RankGroup, net: Net) -> None:
        self._sequence, self._group, self._net = sequence, group, net

    @contextmanager
    def seen(self, batch: Any) -> Iterator[Any]:
        """Run a block on this rank's part of a batch, or on all of a whole `TrialBatch`.

        Raises:
            TaskError: the task splits nothing, or cannot be split.
        """
        with ExitStack() as stack:
            if isinstance(
                _get_current_function_mode(),
                ContextParallelMode,
            ):
                # The user's own loop may evaluate in the middle of a micro-batch.
                stack.enter_context(_pop_mode_temporarily())
            if not isinstance(batch, TrialBatch):
                yield self._enter_mode(batch, stack)
                return
            stack.enter_context(_autocast_disabled())
            yield batch.batch if batch.is_whole else self._enter_mode(batch.batch, stack)

    def _enter_mode(self, batch: Any, stack: ExitStack) -> Any:
        """Activate the mode and return this rank's part of a batch."""
        sequence_part = SequencePart(self._group.size, self._group.rank)
        local_batch = self._sequence(batch, sequence_part)
        if not sequence_part.length:
            raise TaskError(
                "Task.sequence(batch, part) did not call part(x, dim), so every rank would run all positions",
                next_step="return part(x, dim) for each tensor that has positions along a dimension",
            )
        stack.enter_context(ContextParallelMode(sequence_part, self._group, self._net))
        return local_batch


@contextmanager
def _autocast_disabled() -> Iterator[None]:
    """Disable autocast on all devices."""
    with ExitStack() as stack:
        for kind in filter(torch.is_autocast_enabled, ("cpu", "cuda")):
            stack.enter_context(torch.autocast(kind, enabled=False))
        yield


def partition_sequences(context: SessionContext, material: TaskMaterial) -> ModelPartition:
    """Return the partition of context=N: every sequence is split by the task's `sequence`.

    Raises:
        StrategyError: the task does not say where positions are, or the model is compiled.
    """
    refuse_compile(context, "context")
    sequence = material.task.sequence
    if sequence is None:
        raise StrategyError(
            "context splits sequences, but the task does not say where the positions of a batch are",
            next_step="pass Task(sequence=lambda batch, part: part(batch, 1)), or leave out context",
        )
    context_group = context.mesh.axes["context"]
    # A process group of its own, since attention sends while gradients are reduced over the same ranks.
    split = SequenceSplitter(
        sequence, replace(duplicate_group(context_group, "ring"), name=context_group.name), context.net
    )
    return ModelPartition(
        ContextTransform(), prepare=lambda sharded_model: replace(sharded_model, seen=split.seen)
    )
