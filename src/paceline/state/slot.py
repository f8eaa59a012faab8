"""Slots: the name of a tensor and the part of it that a rank holds, and the protocols of state that is saved.

A part is one span of indices for each dimension, so a tensor can be split along any of them; usually the part
is a box. A span can have several runs: the heads of one rank in a fused query, key and value are three runs
of rows.

Invariant: a checkpoint, a resize and a parameter server know tensors as `TensorPiece`s only, and the parts of
all ranks of an axis cover the whole tensor. This module does not decide which rank holds which part
(`parallel.placement`).
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property, lru_cache
from itertools import product
from math import prod
from typing import Any, Protocol, TypeVar

import torch
from torch import Tensor, nn

from paceline.errors import TaskError

Span = tuple[int, ...]
"""Starts and ends of runs of indices, ascending: (2, 5) is one run, (0, 2, 6, 8) are two."""


def span_runs(span: Span) -> list[tuple[int, int]]:
    """Return the start and the end of each run."""
    return list(zip(span[::2], span[1::2], strict=True))


def span_length(span: Span) -> int:
    """Return the number of indices in a span."""
    return span[1] - span[0] if len(span) == 2 else sum(span[1::2]) - sum(span[::2])


def join_runs(runs: Iterable[tuple[int, int]]) -> Span:
    """Return the span of ascending runs; empty runs are left out, and runs that touch are joined."""
    ends: list[int] = []
    for start, stop in runs:
        if start == stop:
            continue
        if ends and ends[-1] == start:
            ends[-1] = stop
        else:
            ends += [start, stop]
    return tuple(ends) or (0, 0)


def index_of_span(span: Span) -> slice | list[int]:
    """Return the index that selects a span from a dimension: a slice if it is one run, else a list."""
    return slice(*span) if len(span) == 2 else [i for run in span_runs(span) for i in range(*run)]


def span_of_index(index: slice | list[int], size: int) -> Span:
    """Return the span that an index selects from a dimension of this size; inverse of `index_of_span`."""
    if isinstance(index, slice):
        start, stop, _ = index.indices(size)
        return start, max(start, stop)
    return join_runs((i, i + 1) for i in index)


def take_span(tensor: Tensor, dim: int, span: Span) -> Tensor:
    """Return the span of a tensor along a dimension; a tensor that has only the span is returned as it is."""
    if tensor.shape[dim] == span_length(span):
        return tensor
    return tensor[(slice(None),) * dim + (index_of_span(span),)]


def offset_in_span(index: int, span: Span) -> int:
    """Return how many indices of a span come before one of its indices."""
    return sum(max(0, min(stop, index) - start) for start, stop in span_runs(span))


def sub_span(span: Span, start: int, stop: int) -> Span:
    """Return the indices with numbers `start` to `stop` - 1 of a span, counted from its first index."""
    runs, before = [], 0
    for first, last in span_runs(span):
        a, b = max(start - before, 0), min(stop - before, last - first)
        runs.append((first + a, first + max(a, b)))
        before += last - first
    joined = join_runs(runs)
    return joined if span_length(joined) else (span[0] + start, span[0] + start)


@dataclass(frozen=True)
class TensorSlot:
    """The logical name of a tensor, and the part of it that a rank holds.

    Slots are the keys of gradients, optimizer states, checkpoints and messages.

    Args:
        name: the parameter's first name in the model; tied weights are one slot.
        shape: of the whole tensor.
        part: one span for each dimension.
        axes: mesh axes along which ranks hold different parts; empty: all ranks hold the same.
    """

    name: str
    shape: tuple[int, ...]
    part: tuple[Span, ...]
    axes: frozenset[str] = frozenset()
    _hash: int = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        # Name and part tell slots apart; a frozen dataclass can only set a field like this.
        object.__setattr__(self, "_hash", hash((self.name, self.part)))

    def __hash__(self) -> int:
        # Computed once: slots are looked up for every gradient of every step.
        return self._hash

    def __reduce__(self) -> tuple[Any, ...]:
        # String hashes differ between processes, so a pickled slot computes its hash again.
        return TensorSlot, (self.name, self.shape, self.part, self.axes)

    @classmethod
    def whole(cls, name: str, tensor: Tensor) -> TensorSlot:
        """Return the slot of a tensor that is held in full."""
        return cls(name, tuple(tensor.shape), tuple((0, n) for n in tensor.shape))

    @cached_property
    def sizes(self) -> tuple[int, ...]:
        """The shape of the part."""
        return tuple(map(span_length, self.part))

    @property
    def numel(self) -> int:
        """Return the number of values in the part."""
        return prod(self.sizes)

    @property
    def is_whole(self) -> bool:
        """Return whether the part is the whole tensor."""
        return self.sizes == self.shape

    @property
    def index(self) -> SlotIndex:
        """Return the index that selects the part from the whole tensor."""
        return tuple(map(index_of_span, self.part))

    def inside(self, outer: TensorSlot) -> tuple[slice, ...]:
        """Return the slices of this part in the tensor of `outer`, a part in which it is contiguous."""
        pairs = zip(self.part, outer.part, self.sizes, strict=True)
        starts = [(offset_in_span(span[0], whole) if size else 0, size) for span, whole, size in pairs]
        return tuple(slice(start, start + size) for start, size in starts)

    def narrow(self, dim: int, span: tuple[int, int], axis: str) -> TensorSlot:
        """Return the range `span` of this part along a dimension, split by a mesh axis."""
        return self.take(dim, sub_span(self.part[dim], *span), axis)

    def take(self, dim: int, span: Span, axis: str) -> TensorSlot:
        """Return this part with another span of the whole along a dimension, split by a mesh axis."""
        spans = (*self.part[:dim], span, *self.part[dim + 1 :])
        return replace(self, part=spans, axes=self.axes | {axis})

    def boxes(self) -> Iterator[TensorSlot]:
        """Yield the boxes of this part, each with one run along every dimension."""
        for runs in product(*map(span_runs, self.part)):
            yield replace(self, part=runs)

    def on(self, axis: str) -> TensorSlot:
        """Return the same part, held by some ranks of a mesh axis only."""
        return replace(self, axes=self.axes | {axis})


@dataclass(frozen=True)
class TensorPiece:
    """A tensor of the state with its slot: what a checkpoint stores and a resize moves."""

    slot: TensorSlot
    tensor: Tensor

    def under(self, word: str) -> TensorPiece:
        """Return the same piece with `word/` in front of its name."""
        return TensorPiece(_slot_under(word, self.slot), self.tensor)

    def boxes(self) -> Iterator[TensorPiece]:
        """Yield the boxes of this piece; they share its memory."""
        if all(len(span) == 2 for span in self.slot.part):
            yield self
            return
        for slot in self.slot.boxes():
            yield TensorPiece(slot, self.tensor.view(self.slot.sizes)[slot.inside(self.slot)])


@lru_cache(2**14)
def _slot_under(word: str, slot: TensorSlot) -> TensorSlot:
    return replace(slot, name=f"{word}/{slot.name}")


_T = TypeVar("_T")

SlotIndex = tuple[slice | list[int], ...]
"""The index of a part in the whole tensor; empty: all of it."""


class TensorSource(Protocol):
    """A source of whole tensors, from which each rank reads the parts that it holds."""

    @property
    def shapes(self) -> Mapping[str, tuple[int, ...]]:
        """Return the shapes of all tensors by name."""

    def read(self, wanted: Mapping[str, SlotIndex]) -> Mapping[str, Tensor]:
        """Read parts of tensors, all at once; they may share memory with the source."""


@dataclass(frozen=True)
class InMemorySource:
    """A source of tensors that are in memory."""

    tensors: Mapping[str, Tensor]

    @property
    def shapes(self) -> Mapping[str, tuple[int, ...]]:
        return {name: tuple(value.shape) for name, value in self.tensors.items()}

    def read(self, wanted: Mapping[str, SlotIndex]) -> Mapping[str, Tensor]:
        return {name: self.tensors[name][index] for name, index in wanted.items()}


class ExtraState(Protocol):
    """State besides that of model and optimizer: of a sync rule, or the residuals of a codec."""

    def pieces(self) -> Sequence[TensorPiece]:
        """Return the tensors; their names are unique within this state."""

    def wanted(self, shapes: Mapping[str, tuple[int, ...]]) -> Mapping[str, SlotIndex]:
        """Return the parts of a saved state from which this rank continues; by default all of it.

        Args:
            shapes: of the whole tensors, by the names of `pieces`; the number of ranks may have changed.
        """
        return dict.fromkeys(shapes, ())

    def load(self, tensors: Mapping[str, Tensor]) -> None:
        """Load the parts that `wanted` returned."""


class PlacedTensor(Protocol):
    """One tensor as one rank holds it, as far as its state needs to know; see `parallel.placement`.

    Attributes:
        computes: the part with which the rank computes.
        kept: that part stays in memory; else only the part that the rank updates.
    """

    @property
    def computes(self) -> TensorSlot: ...
    @property
    def kept(self) -> bool: ...
    @property
    def parts(self) -> Sequence[TensorSlot | None]: ...
    @property
    def updates(self) -> TensorSlot | None: ...


class ModelShard(Protocol):
    """The part of a model that a rank holds, as state and optimizers see it.

    `parallel.ShardedModel` implements it; state does not import the packages that split a model.

    Attributes:
        model: the modules of the whole model; what the rank does not hold is on the `meta` device.
        slots: all trained tensors of the whole model, in its order.
        held: what this rank holds of them, by name.
        computes: the parameters with which it computes.
        updates: the parameters that its optimizer updates.
        buffer_axes: mesh axes along which only some ranks hold buffers.
        frozen_axes: mesh axes along which this rank holds some of the frozen parameters; empty: all.
        updates_partially: a rank updates less than the whole of some tensor.
        is_on_servers: several servers each hold a part of the model.
        device: where the rank computes.
    """

    @property
    def model(self) -> nn.Module: ...
    @property
    def slots(self) -> Sequence[TensorSlot]: ...
    @property
    def held(self) -> Mapping[str, PlacedTensor]: ...
    @property
    def computes(self) -> Mapping[TensorSlot, nn.Parameter]: ...
    @property
    def updates(self) -> Mapping[TensorSlot, nn.Parameter]: ...
    @property
    def buffer_axes(self) -> frozenset[str]: ...
    @property
    def frozen_axes(self) -> frozenset[str]: ...
    @property
    def updates_partially(self) -> bool: ...
    @property
    def is_on_servers(self) -> bool: ...
    @property
    def device(self) -> torch.device: ...


def strip_prefix(names: Mapping[str, _T], prefix: str) -> dict[str, _T]:
    """Return the entries whose names begin with a prefix, without the prefix."""
    return {name.removeprefix(prefix): value for name, value in names.items() if name.startswith(prefix)}


def trained_parameters(model: nn.Module) -> dict[TensorSlot, nn.Parameter]:
    """Return the parameters that take gradients, by slot, in the model's order; tied weights once.

    Raises:
        TaskError: there are none.
    """
    parameters = {TensorSlot.whole(name, p): p for name, p in model.named_parameters() if p.requires_grad}
    if not parameters:
        raise TaskError(
            "the model has no parameter that takes a gradient",
            next_step="unfreeze what should be trained: parameter.requires_grad_(True)",
        )
    return parameters


def first_tied_names(tensors: Mapping[str, Tensor]) -> dict[str, str]:
    """Return for each name the first name of the same tensor; the two differ where tensors are tied."""
    seen: dict[tuple[Any, ...], str] = {}
    return {
        # By memory and not by identity: tied names can be different tensor objects.
        name: seen.setdefault((value.untyped_storage()._cdata, value.storage_offset(), value.shape), name)
        if value.numel()
        else name
        for name, value in tensors.items()
    }
