"""Spans: places on one dimension of a tensor, in one run or several. Pure.

The heads of one rank in a fused query, key and value are three runs of rows.

Names and places of tensors: which part of which whole a rank holds.

A part is a span on each dimension, so tensors may be cut along any of them; mostly it is a box. A span may
have several runs: the heads of one rank in a fused query, key and value are three runs of rows.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import product
from math import prod
from typing import Any, Protocol, TypeVar

from torch import Tensor, nn

from paceline.errors import TaskError

Span = tuple[int, ...]
"""Where each run begins and ends, in turn and ascending: (2, 5) is one run, (0, 2, 6, 8) two."""


def span_runs(span: Span) -> list[tuple[int, int]]:
    """First place of each run, and the place after its last one."""
    return list(zip(span[::2], span[1::2], strict=True))


def span_length(span: Span) -> int:
    """How many places a span has."""
    return sum(span[1::2]) - sum(span[::2])


def join_runs(runs: Iterable[tuple[int, int]]) -> Span:
    """The span of ascending runs; empty ones are left out, and runs that touch are one."""
    found: list[int] = []
    for start, stop in runs:
        if start == stop:
            continue
        if found and found[-1] == start:
            found[-1] = stop
        else:
            found += [start, stop]
    return tuple(found) or (0, 0)


def index_of_span(span: Span) -> slice | list[int]:
    """What selects a span from a dimension: a slice, if it is one run."""
    return slice(*span) if len(span) == 2 else [i for run in span_runs(span) for i in range(*run)]


def span_of_index(index: slice | list[int], size: int) -> Span:
    """The inverse of `index_of_span`, of a dimension of some size."""
    if isinstance(index, slice):
        start, stop, _ = index.indices(size)
        return start, max(start, stop)
    return join_runs((i, i + 1) for i in index)


def take_span(tensor: Tensor, dim: int, span: Span) -> Tensor:
    """The part of a tensor of which this rank may hold all: what is frozen, or repeated, is."""
    if tensor.shape[dim] == span_length(span):
        return tensor
    return tensor[(slice(None),) * dim + (index_of_span(span),)]


def offset_in_span(index: int, span: Span) -> int:
    """How many places of a span lie before one of its places."""
    return sum(max(0, min(stop, index) - start) for start, stop in span_runs(span))


def sub_span(span: Span, start: int, stop: int) -> Span:
    """Some neighbouring places of a span, by their number in it."""
    found, before = [], 0
    for first, last in span_runs(span):
        a, b = max(start - before, 0), min(stop - before, last - first)
        found.append((first + a, first + max(a, b)))
        before += last - first
    kept = join_runs(found)
    return kept if span_length(kept) else (span[0] + start, span[0] + start)


@dataclass(frozen=True)
class TensorSlot:
    """A tensor by its logical name, and the part of it that somebody holds: the key of everything.

    Args:
        name: the parameter's first name in the model; tied weights are one slot.
        shape: of the whole tensor.
        part: what is held of it: a span for each dimension.
        axes: mesh axes that cut the state, so that other ranks hold other parts; empty: all hold all.
    """

    name: str
    shape: tuple[int, ...]
    part: tuple[Span, ...]
    axes: frozenset[str] = frozenset()
    _hash: int = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "_hash", hash((self.name, self.part)))

    def __hash__(self) -> int:  # it is a key in every gradient's way
        return self._hash

    def __reduce__(self) -> tuple[Any, ...]:  # each process hashes texts in its own way
        return TensorSlot, (self.name, self.shape, self.part, self.axes)

    @classmethod
    def whole(cls, name: str, tensor: Tensor) -> TensorSlot:
        """A slot that is held in full."""
        return cls(name, tuple(tensor.shape), tuple((0, n) for n in tensor.shape))

    @property
    def sizes(self) -> tuple[int, ...]:
        """The shape of the part."""
        return tuple(map(span_length, self.part))

    @property
    def numel(self) -> int:
        """How many values the part has."""
        return prod(self.sizes)

    @property
    def is_whole(self) -> bool:
        """Whether the part is all of it."""
        return self.sizes == self.shape

    @property
    def index(self) -> SlotIndex:
        """Selects the part from the whole tensor."""
        return tuple(map(index_of_span, self.part))

    def inside(self, outer: TensorSlot) -> tuple[slice, ...]:
        """Selects this part from the tensor of a part that covers it, of which it is one stretch."""
        pairs = zip(self.part, outer.part, self.sizes, strict=True)
        starts = [(offset_in_span(span[0], whole) if size else 0, size) for span, whole, size in pairs]
        return tuple(slice(start, start + size) for start, size in starts)

    def narrow(self, dim: int, span: tuple[int, int], axis: str) -> TensorSlot:
        """The part between two places of this part on one dimension, cut by a mesh axis."""
        return self.take(dim, sub_span(self.part[dim], *span), axis)

    def take(self, dim: int, span: Span, axis: str) -> TensorSlot:
        """The part with another span of the whole on one dimension, cut by a mesh axis."""
        spans = (*self.part[:dim], span, *self.part[dim + 1 :])
        return replace(self, part=spans, axes=self.axes | {axis})

    def boxes(self) -> Iterator[TensorSlot]:
        """The same as boxes, each with one run on every dimension."""
        for runs in product(*map(span_runs, self.part)):
            yield replace(self, part=runs)

    def on(self, axis: str) -> TensorSlot:
        """The same part, held by some ranks of a mesh axis only."""
        return replace(self, axes=self.axes | {axis})


@dataclass(frozen=True)
class TensorPiece:
    """A tensor of the state and its place in the whole: what a checkpoint stores and a resize moves."""

    slot: TensorSlot
    tensor: Tensor

    def under(self, word: str) -> TensorPiece:
        """The same, with `word/` before its name."""
        return TensorPiece(replace(self.slot, name=f"{word}/{self.slot.name}"), self.tensor)

    def boxes(self) -> Iterator[TensorPiece]:
        """The same as boxes; they share memory with it."""
        if all(len(span) == 2 for span in self.slot.part):
            yield self
            return
        for slot in self.slot.boxes():
            yield TensorPiece(slot, self.tensor.view(self.slot.sizes)[slot.inside(self.slot)])


_T = TypeVar("_T")

SlotIndex = tuple[slice | list[int], ...]
"""Selects a part of a whole tensor; empty: all of it."""


class TensorSource(Protocol):
    """Whole tensors, of which everybody reads the parts that they hold."""

    @property
    def shapes(self) -> Mapping[str, tuple[int, ...]]:
        """What there is, by name."""

    def read(self, wanted: Mapping[str, SlotIndex]) -> Mapping[str, Tensor]:
        """Parts of some tensors, all at once; they may share memory with the source."""


@dataclass(frozen=True)
class InMemorySource:
    """A source of tensors that are here."""

    tensors: Mapping[str, Tensor]

    @property
    def shapes(self) -> Mapping[str, tuple[int, ...]]:
        """See `TensorSource`."""
        return {name: tuple(value.shape) for name, value in self.tensors.items()}

    def read(self, wanted: Mapping[str, SlotIndex]) -> Mapping[str, Tensor]:
        """See `TensorSource`."""
        return {name: self.tensors[name][index] for name, index in wanted.items()}


class ExtraState(Protocol):
    """Who holds state beside model and optimizer: a rule, a codec's residuals."""

    def pieces(self) -> Sequence[TensorPiece]:
        """Tensors, by names that no other keeper uses."""

    def wanted(self, shapes: Mapping[str, tuple[int, ...]]) -> Mapping[str, SlotIndex]:
        """Which parts of what was saved this rank goes on from; all of it, unless a keeper says less.

        Args:
            shapes: of the whole tensors, by the names of `pieces`; the number of ranks may have changed.
        """
        return dict.fromkeys(shapes, ())

    def load(self, tensors: Mapping[str, Tensor]) -> None:
        """Take over the parts that were wanted."""


def strip_prefix(names: Mapping[str, _T], prefix: str) -> dict[str, _T]:
    """The entries whose names begin with a prefix, without it."""
    return {name.removeprefix(prefix): one for name, one in names.items() if name.startswith(prefix)}


def trained_parameters(model: nn.Module) -> dict[TensorSlot, nn.Parameter]:
    """The parameters that take gradients, by slot, in the model's order; tied weights once.

    Raises:
        TaskError: there are none.
    """
    found = {TensorSlot.whole(name, p): p for name, p in model.named_parameters() if p.requires_grad}
    if not found:
        raise TaskError(
            "the model has no parameter that takes a gradient",
            next_step="unfreeze what should be trained: parameter.requires_grad_(True)",
        )
    return found


def first_tied_names(tensors: Mapping[str, Tensor]) -> dict[str, str]:
    """For each name the first name of the same tensor, which is another one where tensors are tied."""
    seen: dict[tuple[Any, ...], str] = {}
    return {
        name: seen.setdefault((value.untyped_storage()._cdata, value.storage_offset(), value.shape), name)
        if value.numel()
        else name
        for name, value in tensors.items()
    }
