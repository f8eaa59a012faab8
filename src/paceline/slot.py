"""Names and places of tensors: which part of which whole a rank holds.

A part is a span on each dimension, so tensors may be cut along any of them; mostly it is a box. A span may
have several runs: the heads of one rank in a fused query, key and value are three runs of rows.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import product
from math import prod
from typing import Any, Protocol, TypeVar

from torch import Tensor, nn

from paceline.errors import TaskError
from paceline.spans import Span, length_of, place_of, runs_of, selected, stretch


@dataclass(frozen=True)
class Slot:
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
        return Slot, (self.name, self.shape, self.part, self.axes)

    @classmethod
    def whole(cls, name: str, tensor: Tensor) -> Slot:
        """A slot that is held in full."""
        return cls(name, tuple(tensor.shape), tuple((0, n) for n in tensor.shape))

    @property
    def sizes(self) -> tuple[int, ...]:
        """The shape of the part."""
        return tuple(map(length_of, self.part))

    @property
    def numel(self) -> int:
        """How many values the part has."""
        return prod(self.sizes)

    @property
    def is_whole(self) -> bool:
        """Whether the part is all of it."""
        return self.sizes == self.shape

    @property
    def index(self) -> Index:
        """Selects the part from the whole tensor."""
        return tuple(map(selected, self.part))

    def inside(self, outer: Slot) -> tuple[slice, ...]:
        """Selects this part from the tensor of a part that covers it, of which it is one stretch."""
        pairs = zip(self.part, outer.part, self.sizes, strict=True)
        starts = [(place_of(span[0], whole) if size else 0, size) for span, whole, size in pairs]
        return tuple(slice(start, start + size) for start, size in starts)

    def narrow(self, dim: int, span: tuple[int, int], axis: str) -> Slot:
        """The part between two places of this part on one dimension, cut by a mesh axis."""
        return self.take(dim, stretch(self.part[dim], *span), axis)

    def take(self, dim: int, span: Span, axis: str) -> Slot:
        """The part with another span of the whole on one dimension, cut by a mesh axis."""
        spans = (*self.part[:dim], span, *self.part[dim + 1 :])
        return replace(self, part=spans, axes=self.axes | {axis})

    def boxes(self) -> Iterator[Slot]:
        """The same as boxes, each with one run on every dimension."""
        for runs in product(*map(runs_of, self.part)):
            yield replace(self, part=runs)

    def on(self, axis: str) -> Slot:
        """The same part, held by some ranks of a mesh axis only."""
        return replace(self, axes=self.axes | {axis})


@dataclass(frozen=True)
class Piece:
    """A tensor of the state and its place in the whole: what a checkpoint stores and a resize moves."""

    slot: Slot
    tensor: Tensor

    def under(self, word: str) -> Piece:
        """The same, with `word/` before its name."""
        return Piece(replace(self.slot, name=f"{word}/{self.slot.name}"), self.tensor)

    def boxes(self) -> Iterator[Piece]:
        """The same as boxes; they share memory with it."""
        if all(len(span) == 2 for span in self.slot.part):
            yield self
            return
        for slot in self.slot.boxes():
            yield Piece(slot, self.tensor.view(self.slot.sizes)[slot.inside(self.slot)])


_T = TypeVar("_T")

Index = tuple[slice | list[int], ...]
"""Selects a part of a whole tensor; empty: all of it."""


class Source(Protocol):
    """Whole tensors, of which everybody reads the parts that they hold."""

    @property
    def shapes(self) -> Mapping[str, tuple[int, ...]]:
        """What there is, by name."""

    def read(self, wanted: Mapping[str, Index]) -> Mapping[str, Tensor]:
        """Parts of some tensors, all at once; they may share memory with the source."""


@dataclass(frozen=True)
class InMemory:
    """A source of tensors that are here."""

    tensors: Mapping[str, Tensor]

    @property
    def shapes(self) -> Mapping[str, tuple[int, ...]]:
        """See `Source`."""
        return {name: tuple(value.shape) for name, value in self.tensors.items()}

    def read(self, wanted: Mapping[str, Index]) -> Mapping[str, Tensor]:
        """See `Source`."""
        return {name: self.tensors[name][index] for name, index in wanted.items()}


class Keeper(Protocol):
    """Who holds state beside model and optimizer: a rule, a codec's residuals."""

    def pieces(self) -> Sequence[Piece]:
        """Tensors, by names that no other keeper uses."""

    def wanted(self, shapes: Mapping[str, tuple[int, ...]]) -> Mapping[str, Index]:
        """Which parts of what was saved this rank goes on from; all of it, unless a keeper says less.

        Args:
            shapes: of the whole tensors, by the names of `pieces`; the number of ranks may have changed.
        """
        return dict.fromkeys(shapes, ())

    def load(self, tensors: Mapping[str, Tensor]) -> None:
        """Take over the parts that were wanted."""


def below(names: Mapping[str, _T], prefix: str) -> dict[str, _T]:
    """The entries whose names begin with a prefix, without it."""
    return {name.removeprefix(prefix): one for name, one in names.items() if name.startswith(prefix)}


def trained_parameters(model: nn.Module) -> dict[Slot, nn.Parameter]:
    """The parameters that take gradients, by slot, in the model's order; tied weights once.

    Raises:
        TaskError: there are none.
    """
    found = {Slot.whole(name, p): p for name, p in model.named_parameters() if p.requires_grad}
    if not found:
        raise TaskError(
            "the model has no parameter that takes a gradient",
            next_step="unfreeze what should be trained: parameter.requires_grad_(True)",
        )
    return found


def first_names(tensors: Mapping[str, Tensor]) -> dict[str, str]:
    """For each name the first name of the same tensor, which is another one where tensors are tied."""
    seen: dict[tuple[Any, ...], str] = {}
    return {
        name: seen.setdefault((value.untyped_storage()._cdata, value.storage_offset(), value.shape), name)
        if value.numel()
        else name
        for name, value in tensors.items()
    }
