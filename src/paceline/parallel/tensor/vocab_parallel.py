"""A vocabulary cut by rows: embeddings look up their own tokens, and the sum over ranks has all of them.

Logits of which a rank has a part, and a cross-entropy that never has them all.

Source: Shoeybi et al. 2019, Megatron-LM, arXiv:1909.08053, section 3 (the parallel cross-entropy).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from paceline.comm.collectives.collective_protocol import Collective
from paceline.errors import TaskError
from paceline.parallel.tensor.mappings import reduce_from_tensor_region, summed
from paceline.parallel.tensor.module_swap import swap_forward
from paceline.state.slot import Span, take_span


@dataclass(frozen=True)
class VocabularyPartition:
    """A vocabulary, and the part of it that this rank has.

    Args:
        spans: of the tokens, by rank, one run each.
        collective: over the tensor ranks.
        key: names its buffers.
    """

    spans: Sequence[Span]
    collective: Collective
    key: str

    @property
    def size(self) -> int:
        """How many tokens there are."""
        return self.spans[-1][-1]

    @property
    def own(self) -> tuple[int, int]:
        """First token of this rank, and the one after its last."""
        first, last = self.spans[self.collective.group.rank]
        return first, last

    def place(self, tokens: Tensor) -> tuple[Tensor, Tensor]:
        """Where tokens lie in this rank's part (0 for those of others), and which are others'.

        Raises:
            IndexError: one is none of the vocabulary.
        """
        if tokens.numel() and (int(tokens.min()) < 0 or int(tokens.max()) >= self.size):
            raise IndexError(f"a token is not in the vocabulary of {self.size}")
        first, last = self.own
        others = (tokens < first) | (tokens >= last)
        return (tokens - first).masked_fill(others, 0), others


def make_vocab_embedding(module: nn.Embedding, vocabulary: VocabularyPartition) -> None:
    """Let an embedding that is cut by rows look up its own tokens; the sum over ranks has all."""

    def forward(self: nn.Embedding, tokens: Tensor) -> Tensor:
        weight = take_span(self.weight, 0, vocabulary.own)
        places, others = vocabulary.place(tokens)
        first, last = vocabulary.own
        padding = self.padding_idx
        own_padding = padding - first if padding is not None and first <= padding < last else None
        found = F.embedding(places, weight, own_padding).masked_fill(others.unsqueeze(-1), 0.0)
        return reduce_from_tensor_region(found, vocabulary.collective, vocabulary.key)

    swap_forward(module, "Cut", forward)


def refuse_unsupported_embedding(name: str, module: nn.Embedding) -> None:
    """Raises: TaskError: its gradient or its rows depend on all tokens of a batch in other ways."""
    odd = [key for key in ("max_norm", "scale_grad_by_freq", "sparse") if getattr(module, key)]
    if odd:
        raise TaskError(
            f"the tensor plan cuts the embedding '{name}', and it has {odd[0]}",
            next_step=f"leave out {odd[0]}, or leave '{name}' out of the tensor plan",
        )


class VocabParallelLogits:
    """Logits of which this rank has a part of the vocabulary; a loss may use them as if they were whole.

    What keeps the last dimension (casts, views and selections of the others) works on the part, and so does
    `torch.nn.functional.cross_entropy` with a class for each row. Anything else gets the whole logits,
    which are then gathered.

    Args:
        part: [..., own tokens].
    """

    def __init__(self, part: Tensor, vocabulary: VocabularyPartition) -> None:
        self.part, self.vocabulary = part, vocabulary

    @property
    def shape(self) -> torch.Size:
        """As if they were whole."""
        return torch.Size((*self.part.shape[:-1], self.vocabulary.size))

    def size(self, dim: int | None = None) -> Any:
        """As if they were whole."""
        return self.shape if dim is None else self.shape[dim]

    def numel(self) -> int:
        """As if they were whole."""
        return self.shape.numel()

    def whole(self) -> Tensor:
        """All logits, gathered."""
        found: Tensor = _GatherLogits.apply(self.part, self.vocabulary)
        return found

    def flatten(self, start_dim: int = 0, end_dim: int = -1) -> Any:
        """See `Tensor.flatten`."""
        if end_dim % self.part.dim() == self.part.dim() - 1 != start_dim % self.part.dim():
            return self.whole().flatten(start_dim, end_dim)
        return VocabParallelLogits(self.part.flatten(start_dim, end_dim), self.vocabulary)

    def reshape(self, *shape: Any) -> Any:
        """See `Tensor.reshape`."""
        sizes = tuple(shape[0]) if len(shape) == 1 and not isinstance(shape[0], int) else shape
        last = self.vocabulary.size
        if not sizes or sizes[-1] != last:
            return self.whole().reshape(*shape)
        return VocabParallelLogits(self.part.reshape(*sizes[:-1], self.part.shape[-1]), self.vocabulary)

    view = reshape

    def __getitem__(self, index: Any) -> Any:
        entries = index if isinstance(index, tuple) else (index,)
        taken = sum(
            getattr(one, "ndim", 1) if one is not Ellipsis else 0 for one in entries if one is not None
        )
        keeps = taken < self.part.dim() and Ellipsis not in [
            one for one in entries if not torch.is_tensor(one)
        ]
        if not keeps and isinstance(entries[-1], slice) and entries[-1] == slice(None):
            keeps = True
        return VocabParallelLogits(self.part[index], self.vocabulary) if keeps else self.whole()[index]

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        if name in _PART_METHODS:
            return lambda *args, **kwargs: VocabParallelLogits(
                getattr(self.part, name)(*args, **kwargs), self.vocabulary
            )
        if name in _PART_ATTRIBUTES:
            return getattr(self.part, name)
        return getattr(self.whole(), name)

    def __mul__(self, other: Any) -> Any:
        return (
            VocabParallelLogits(self.part * other, self.vocabulary)
            if _is_number(other)
            else self.whole() * other
        )

    def __truediv__(self, other: Any) -> Any:
        return (
            VocabParallelLogits(self.part / other, self.vocabulary)
            if _is_number(other)
            else self.whole() / other
        )

    @classmethod
    def __torch_function__(cls, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if function is F.cross_entropy:
            found = _cross_entropy(*args, **kwargs)
            if found is not None:
                return found
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
    return isinstance(value, int | float) or (torch.is_tensor(value) and value.dim() == 0)


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
    """The cross-entropy of cut logits [n, V] and classes [n]; None: this one needs them whole."""
    if not isinstance(logits, VocabParallelLogits) or logits.part.dim() != 2 or target.dim() != 1:
        return None
    if target.is_floating_point() or weight is not None or label_smoothing or size_average or reduce:
        return None
    part = logits.part if logits.part.dtype == torch.float64 else logits.part.float()
    left_out = target == ignore_index
    losses: Tensor = _VocabParallelCrossEntropy.apply(
        part, target.masked_fill(left_out, 0), logits.vocabulary
    )
    losses = losses.masked_fill(left_out, 0.0)
    if reduction == "none":
        return losses
    return losses.sum() if reduction == "sum" else losses.sum() / (~left_out).sum()


class _VocabParallelCrossEntropy(torch.autograd.Function):
    """Losses [n] of parts of logits [n, own tokens]: the largest logit, then two sums of n values travel."""

    @staticmethod
    def forward(ctx: Any, part: Tensor, target: Tensor, vocabulary: VocabularyPartition) -> Tensor:
        places, others = vocabulary.place(target)
        shifted = part - _largest(part, vocabulary).unsqueeze(-1)
        own = shifted.gather(1, places.unsqueeze(-1)).squeeze(-1).masked_fill(others, 0.0)
        exponents = shifted.exp_()
        sums = torch.stack([exponents.sum(-1), own])
        total, chosen = summed(sums, vocabulary.collective, f"{vocabulary.key}.sums")
        ctx.save_for_backward(exponents.div_(total.unsqueeze(-1)), places, others)
        return total.log() - chosen

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        probabilities, places, others = ctx.saved_tensors
        grad = probabilities * grads[0].unsqueeze(-1)
        grad.scatter_add_(1, places.unsqueeze(-1), -grads[0].masked_fill(others, 0.0).unsqueeze(-1))
        return grad, None, None


def _largest(part: Tensor, vocabulary: VocabularyPartition) -> Tensor:
    """The largest logit of each row over all ranks, [n]."""
    own = part.detach().amax(-1)
    found: Tensor = vocabulary.collective.all_gather(own.contiguous(), f"{vocabulary.key}.largest").wait()
    return found.amax(0)


class _GatherLogits(torch.autograd.Function):
    """All parts, side by side; each rank goes on with the same, so its own part has its gradient."""

    @staticmethod
    def forward(ctx: Any, part: Tensor, vocabulary: VocabularyPartition) -> Tensor:
        ctx.own = vocabulary.own
        widths = [last - first for first, last in vocabulary.spans]
        padded = part.new_zeros(*part.shape[:-1], max(widths))
        padded[..., : part.shape[-1]] = part.detach()
        rows = vocabulary.collective.all_gather(padded.reshape(-1), f"{vocabulary.key}.whole").wait()
        parts = [row.view(padded.shape)[..., :width] for row, width in zip(rows, widths, strict=True)]
        return torch.cat(parts, -1)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        return grads[0][..., slice(*ctx.own)], None
