"""Vocabulary parallelism: embeddings and output layers that are split by tokens.

An embedding looks up its own tokens, and the sum over ranks has all of them. An output layer returns a part
of the logits (`VocabParallelLogits`), and the cross-entropy is computed without ever gathering them.

Source: Shoeybi et al. 2019, Megatron-LM, arXiv:1909.08053, section 3 (the parallel cross-entropy).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.nn import functional as F

from paceline.comm.collectives.collective_protocol import Collective
from paceline.errors import TaskError
from paceline.parallel.tensor.mappings import gather_from_tensor_region, reduce_from_tensor_region, summed
from paceline.parallel.tensor.module_swap import swap_forward
from paceline.state.slot import Span, take_span


@dataclass(frozen=True)
class VocabularyPartition:
    """Vocabulary, and the part of it that this rank has.

    Args:
        spans: of the tokens, by rank, one run each.
        collective: over the tensor ranks.
        key: prefix of buffer names.
    """

    spans: Sequence[Span]
    collective: Collective
    key: str

    @property
    def size(self) -> int:
        """Number of tokens."""
        return self.spans[-1][-1]

    @property
    def own(self) -> tuple[int, int]:
        """First token of this rank, and the one after its last."""
        first, last = self.spans[self.collective.group.rank]
        return first, last

    def place(self, tokens: Tensor) -> tuple[Tensor, Tensor]:
        """Return the indices of tokens in this rank's part, 0 for tokens of other ranks, and a mask of these.

        Raises:
            IndexError: a token is not in the vocabulary.
        """
        # The mask would hide such a token: every rank would take it for a token of another rank.
        if tokens.numel() and (int(tokens.min()) < 0 or int(tokens.max()) >= self.size):
            raise IndexError(f"a token is not in the vocabulary of {self.size}")
        first, last = self.own
        others = (tokens < first) | (tokens >= last)
        return (tokens - first).masked_fill(others, 0), others


def make_vocab_embedding(module: nn.Embedding, vocabulary: VocabularyPartition) -> None:
    """Let an embedding that is split by rows look up its own tokens; the sum over ranks has all of them."""

    def forward(self: nn.Embedding, tokens: Tensor) -> Tensor:
        weight = take_span(self.weight, 0, vocabulary.own)
        places, others = vocabulary.place(tokens)
        first, last = vocabulary.own
        padding = self.padding_idx
        local_padding = padding - first if padding is not None and first <= padding < last else None
        y = F.embedding(places, weight, local_padding).masked_fill(others.unsqueeze(-1), 0.0)
        return reduce_from_tensor_region(y, vocabulary.collective, vocabulary.key)

    swap_forward(module, "Cut", forward)


def refuse_unsupported_embedding(name: str, module: nn.Embedding) -> None:
    """Raise TaskError if the gradient or the rows of an embedding depend on all tokens of a batch."""
    unsupported = [key for key in ("max_norm", "scale_grad_by_freq", "sparse") if getattr(module, key)]
    if unsupported:
        raise TaskError(
            f"the tensor plan splits the embedding '{name}', which has {unsupported[0]}",
            next_step=f"remove {unsupported[0]}, or leave '{name}' out of the tensor plan",
        )


class VocabParallelLogits:
    """Logits of which this rank has a part of the vocabulary; a loss can use them as if they were whole.

    Operations that keep the last dimension (casts, views, and selections in the other dimensions) work on
    the part, and so does `torch.nn.functional.cross_entropy` with a class for each row. Everything else gets
    the whole logits, which are then gathered. An operation that changes them in place changes the gathered
    logits, and from then on all others use these.

    Args:
        local_logits: [..., local tokens].
    """

    def __init__(self, local_logits: Tensor, vocabulary: VocabularyPartition) -> None:
        self.local_logits, self.vocabulary = local_logits, vocabulary
        self._changed: Tensor | None = None

    @property
    def shape(self) -> torch.Size:
        """Shape of the whole logits."""
        return torch.Size((*self.local_logits.shape[:-1], self.vocabulary.size))

    def size(self, dim: int | None = None) -> Any:
        """Return the shape of the whole logits, or one of its dimensions."""
        return self.shape if dim is None else self.shape[dim]

    def numel(self) -> int:
        """Return the number of values of the whole logits."""
        return self.shape.numel()

    def whole(self) -> Tensor:
        """Return all logits, gathered."""
        if self._changed is not None:
            return self._changed
        vocabulary = self.vocabulary
        return gather_from_tensor_region(
            self.local_logits, vocabulary.spans, vocabulary.collective, f"{vocabulary.key}.whole"
        )

    @property
    def is_partial(self) -> bool:
        """Return whether only this rank's part is in memory; false after a change in place."""
        return self._changed is None

    def flatten(self, start_dim: int = 0, end_dim: int = -1) -> Any:
        """Flatten the part if the last dimension stays, else the whole logits."""
        if not self.is_partial or (
            end_dim % self.local_logits.dim()
            == self.local_logits.dim() - 1
            != start_dim % self.local_logits.dim()
        ):
            return self.whole().flatten(start_dim, end_dim)
        return VocabParallelLogits(self.local_logits.flatten(start_dim, end_dim), self.vocabulary)

    def reshape(self, *shape: Any) -> Any:
        """Reshape the part if the last dimension stays, else the whole logits."""
        sizes = tuple(shape[0]) if len(shape) == 1 and not isinstance(shape[0], int) else shape
        last = self.vocabulary.size
        if not self.is_partial or not sizes or sizes[-1] != last:
            return self.whole().reshape(*shape)
        return VocabParallelLogits(
            self.local_logits.reshape(*sizes[:-1], self.local_logits.shape[-1]), self.vocabulary
        )

    view = reshape

    def __getitem__(self, index: Any) -> Any:
        entries = index if isinstance(index, tuple) else (index,)
        num_indexed = sum(
            getattr(entry, "ndim", 1) if entry is not Ellipsis else 0
            for entry in entries
            if entry is not None
        )
        # The part is enough if no entry of the index can reach the last dimension.
        keeps = num_indexed < self.local_logits.dim() and Ellipsis not in [
            entry for entry in entries if not torch.is_tensor(entry)
        ]
        if not keeps and isinstance(entries[-1], slice) and entries[-1] == slice(None):
            keeps = True
        if not self.is_partial or not keeps:
            return self.whole()[index]
        return VocabParallelLogits(self.local_logits[index], self.vocabulary)

    def __setitem__(self, index: Any, value: Any) -> None:
        self._change_in_place()[index] = _gather_if_partial(value)

    def _change_in_place(self) -> Tensor:
        """Return the whole logits, which stand for these from now on, to be changed in place."""
        if self._changed is None:
            self._changed = self.whole()
        return self._changed

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            # Python and copy look special methods up on the type and must not get those of a tensor.
            raise AttributeError(name)
        if name in _PART_METHODS and self.is_partial:
            return lambda *args, **kwargs: VocabParallelLogits(
                getattr(self.local_logits, name)(*args, **kwargs), self.vocabulary
            )
        if name in _PART_ATTRIBUTES:
            return getattr(self.local_logits, name)
        if name.endswith("_"):
            return self._method_in_place(name)
        return getattr(self.whole(), name)

    def _method_in_place(self, name: str) -> Any:
        """Return a method that changes these logits, such as `masked_fill_`, and returns them."""
        method = getattr(self._change_in_place(), name)

        def change(*args: Any, **kwargs: Any) -> VocabParallelLogits:
            method(*map(_gather_if_partial, args), **kwargs)
            return self

        return change

    def __mul__(self, other: Any) -> Any:
        if self.is_partial and _is_number(other):
            return VocabParallelLogits(self.local_logits * other, self.vocabulary)
        return self.whole() * _gather_if_partial(other)

    def __truediv__(self, other: Any) -> Any:
        if self.is_partial and _is_number(other):
            return VocabParallelLogits(self.local_logits / other, self.vocabulary)
        return self.whole() / _gather_if_partial(other)

    __rmul__ = __mul__

    @classmethod
    def __torch_function__(cls, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if kwargs.get("inplace") and args and isinstance(args[0], VocabParallelLogits):
            args = (args[0]._change_in_place(), *args[1:])
        if function is F.cross_entropy:
            losses = _cross_entropy(*args, **kwargs)
            if losses is not None:
                return losses
        return function(
            *map(_gather_if_partial, args),
            **{name: _gather_if_partial(value) for name, value in kwargs.items()},
        )


_PART_METHODS = frozenset(
    {"float", "double", "half", "bfloat16", "to", "type", "contiguous", "clone", "detach", "cpu"}
)
_PART_ATTRIBUTES = frozenset(
    {"dtype", "device", "requires_grad", "ndim", "dim", "is_cuda", "is_floating_point", "layout"}
)


def _is_number(value: Any) -> bool:
    """Return whether a factor has one value and no gradient: that of a learned scale needs all logits."""
    if isinstance(value, int | float):
        return True
    return torch.is_tensor(value) and value.dim() == 0 and not value.requires_grad


def _whole_operator(name: str) -> Any:
    """Return an operator of tensors that works on the whole logits; Python looks it up on the type."""

    def operator(self: VocabParallelLogits, *others: Any) -> Any:
        return getattr(self.whole(), name)(*map(_gather_if_partial, others))

    return operator


_OPERATORS: dict[str, Any] = {
    name: _whole_operator(name)
    for name in (
        *("__add__", "__radd__", "__sub__", "__rsub__", "__rtruediv__", "__pow__", "__rpow__", "__neg__"),
        *("__matmul__", "__rmatmul__", "__abs__", "__mod__", "__floordiv__", "__len__"),
        *("__lt__", "__le__", "__gt__", "__ge__", "__ne__", "__eq__"),
    )
}
# `==` compares values, as that of tensors does; the hash is that of the object, as that of tensors is.
for _name, _operator in {**_OPERATORS, "__hash__": object.__hash__}.items():
    setattr(VocabParallelLogits, _name, _operator)


def _gather_if_partial(value: Any) -> Any:
    return value.whole() if isinstance(value, VocabParallelLogits) else value


def _cross_entropy(
    logits: Any,
    target: Tensor,
    weight: Tensor | None = None,
    size_average: None = None,
    ignore_index: int = -100,
    reduce: None = None,
    reduction: str = "mean",
    label_smoothing: float = 0.0,
) -> Tensor | None:
    """Return the cross-entropy of split logits [n, V] and classes [n], or None if it needs whole logits."""
    if not isinstance(logits, VocabParallelLogits) or not logits.is_partial:
        return None
    if logits.local_logits.dim() != 2 or target.dim() != 1:
        return None
    if target.is_floating_point() or weight is not None or label_smoothing or size_average or reduce:
        return None
    # In float32, as autocast runs a cross-entropy.
    local_logits = (
        logits.local_logits if logits.local_logits.dtype == torch.float64 else logits.local_logits.float()
    )
    left_out = target == ignore_index
    losses: Tensor = _VocabParallelCrossEntropy.apply(
        local_logits, target.masked_fill(left_out, 0), logits.vocabulary
    )
    losses = losses.masked_fill(left_out, 0.0)
    if reduction == "none":
        return losses
    return losses.sum() if reduction == "sum" else losses.sum() / (~left_out).sum()


class _VocabParallelCrossEntropy(torch.autograd.Function):
    """Losses [n] of parts of logits [n, local tokens].

    Wire: an all_gather of n values for the largest logits, and an all_reduce of 2 n values for the sums.
    """

    @staticmethod
    def forward(ctx: Any, local_logits: Tensor, target: Tensor, vocabulary: VocabularyPartition) -> Tensor:
        places, others = vocabulary.place(target)
        # Minus the largest logit of all ranks, so that no exponential overflows.
        shifted = local_logits - _largest(local_logits, vocabulary).unsqueeze(-1)
        target_logits = shifted.gather(1, places.unsqueeze(-1)).squeeze(-1).masked_fill(others, 0.0)
        # In place: the shifted logits are not needed again.
        exponents = shifted.exp_()
        sums = torch.stack([exponents.sum(-1), target_logits])
        total, chosen = summed(sums, vocabulary.collective, f"{vocabulary.key}.sums")
        ctx.save_for_backward(exponents.div_(total.unsqueeze(-1)), places, others)
        return total.log() - chosen

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Any) -> Any:
        probabilities, places, others = ctx.saved_tensors
        grad = probabilities * grads[0].unsqueeze(-1)
        grad.scatter_add_(1, places.unsqueeze(-1), -grads[0].masked_fill(others, 0.0).unsqueeze(-1))
        return grad, None, None


def _largest(local_logits: Tensor, vocabulary: VocabularyPartition) -> Tensor:
    """Return the largest logit of each row over all ranks, [n]."""
    local_max = local_logits.detach().amax(-1)
    maxima: Tensor = vocabulary.collective.all_gather(
        local_max.contiguous(), f"{vocabulary.key}.largest"
    ).wait()
    return maxima.amax(0)
