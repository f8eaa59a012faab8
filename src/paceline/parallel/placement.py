"""Where the parts of a model lie: an ordered list of transforms of a placement. Pure: no tensor, no group.

A placement begins with every tensor whole on every rank, its gradient to be summed over all ranks that run
samples of their own. Each transform cuts what the ones before it have left: stages keep a tensor or not, a
tensor plan keeps a span of one dimension, a shard updates a part of what is computed with. No product of
transforms has a name.

Bytes of the trained tensors of one rank, as a placement says what it holds of them. Pure.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Protocol

from paceline.job.mesh import DATA_AXES
from paceline.state.slot import Span, TensorSlot


@dataclass(frozen=True)
class TensorPlacement:
    """One tensor as one rank holds it.

    Args:
        computes: what the rank computes with.
        parts: of that, what each rank of the shard axis updates; None: nothing.
        place: this rank's place among them.
        sums: axes over which its gradient is still to be summed: the reduction does exactly that.
        holders: if several stages hold it, which.
        counts: whether this rank counts what it updates in the norm of the whole.
        kept: whether the rank keeps in memory what it computes with; else its own part only.
        frees_gradients: whether it keeps no gradient of what it computes with, but of its own part.
        chunk: which of its stage's chunks of the model uses it.
    """

    computes: TensorSlot
    parts: tuple[TensorSlot | None, ...]
    place: int = 0
    sums: tuple[str, ...] = DATA_AXES
    holders: tuple[int, ...] = ()
    counts: bool = True
    kept: bool = True
    frees_gradients: bool = False
    chunk: int = 0

    @classmethod
    def whole(cls, slot: TensorSlot) -> TensorPlacement:
        """On every rank in full."""
        return cls(slot, (slot,))

    @property
    def updates(self) -> TensorSlot | None:
        """What this rank updates of it."""
        return self.parts[self.place]


class PlacementTransform(Protocol):
    """Cuts what a rank holds, by its coordinate on one axis."""

    @property
    def axis(self) -> str:
        """The mesh axis along which ranks come to hold different parts."""

    def cut(self, held: TensorPlacement, coordinate: int) -> TensorPlacement | None:
        """What is left of a tensor; None: the rank holds nothing of it."""


@dataclass(frozen=True)
class ModelPlacement:
    """What every rank holds of a model.

    Args:
        slots: the trained tensors, whole, in the model's order.
        transforms: in the order in which they cut.
    """

    slots: tuple[TensorSlot, ...]
    transforms: tuple[PlacementTransform, ...] = ()

    def cut(self, transform: PlacementTransform) -> ModelPlacement:
        """The placement after one more transform."""
        return replace(self, transforms=(*self.transforms, transform))

    def at(self, coordinates: Mapping[str, int]) -> dict[str, TensorPlacement]:
        """What the rank at some coordinates holds, by name, in the model's order."""
        found: dict[str, TensorPlacement] = {}
        for slot in self.slots:
            held: TensorPlacement | None = TensorPlacement.whole(slot)
            for transform in self.transforms:
                if held is not None:
                    held = transform.cut(held, coordinates.get(transform.axis, 0))
            if held is not None:
                found[slot.name] = held
        return found


@dataclass(frozen=True)
class PipelineTransform:
    """Consecutive layers on consecutive ranks.

    Args:
        holders: by name, the stages that use a tensor, ascending.
        homes: by name, which chunk of this rank's stage uses a tensor; 0 where none is named.
    Source: Huang et al. 2019, GPipe, arXiv:1811.06965, section 2.1.
    """

    holders: Mapping[str, tuple[int, ...]]
    homes: Mapping[str, int] = field(default_factory=dict)
    axis = "pipeline"

    def cut(self, held: TensorPlacement, coordinate: int) -> TensorPlacement | None:
        """A stage holds what its layers use; what several use meets before it is summed over replicas."""
        stages = self.holders[held.computes.name]
        if coordinate not in stages:
            return None
        shared = stages if len(stages) > 1 else ()
        return replace(
            held,
            computes=held.computes.on(self.axis),
            parts=tuple(part.on(self.axis) if part else None for part in held.parts),
            sums=(self.axis, *held.sums) if shared else held.sums,
            holders=shared,
            chunk=self.homes.get(held.computes.name, 0),
            counts=held.counts and coordinate == stages[0],
        )


@dataclass(frozen=True)
class TensorTransform:
    """Large tensors, each cut along one dimension among the ranks of the tensor axis.

    Args:
        dims: by name, the dimension; what is not named is whole on all.
        degree: how many ranks.
        spans: by name, the span of each rank, where those are not even.
        summed: names of what is whole on all and of whose gradient each rank has a part; the gradients of the
            rest are equal.
    Source: Shoeybi et al. 2019, Megatron-LM, arXiv:1909.08053, section 3.
    """

    dims: Mapping[str, int]
    degree: int
    spans: Mapping[str, Sequence[Span]] = field(default_factory=dict)
    summed: frozenset[str] = frozenset()
    axis = "tensor"

    def cut(self, held: TensorPlacement, coordinate: int) -> TensorPlacement | None:
        """A span of the planned dimension; even ones differ by one at most."""
        name = held.computes.name
        dim = self.dims.get(name)
        if dim is None:
            sums = (self.axis, *held.sums) if name in self.summed else held.sums
            return replace(held, sums=sums, counts=held.counts and coordinate == 0)
        if name in self.spans:
            part = held.computes.take(dim, self.spans[name][coordinate], self.axis)
        else:
            span = even_span(held.computes.sizes[dim], self.degree, coordinate)
            part = held.computes.narrow(dim, span, self.axis)
        return replace(held, computes=part, parts=(part,))


@dataclass(frozen=True)
class ContextTransform:
    """Positions of sequences, cut among the ranks of the context axis; tensors are whole on each.

    Source: Liu et al. 2023, Ring Attention with Blockwise Transformers, arXiv:2310.01889.
    """

    axis = "context"

    def cut(self, held: TensorPlacement, coordinate: int) -> TensorPlacement | None:
        """Every rank has the gradient of its own positions, so these are summed too."""
        return replace(held, sums=(*held.sums, self.axis), counts=held.counts and coordinate == 0)


@dataclass(frozen=True)
class ShardTransform:
    """What is updated, cut among the ranks of the shard axis; each of these runs samples of its own.

    Args:
        degree: how many ranks.
        dims: by name, the dimension that is cut; the first where none is named.
        keeps: whether a rank keeps whole what it computes with (ZeRO 1 and 2), or its part only (ZeRO 3).
        frees_gradients: whether it keeps the gradient of its part only (ZeRO 2 and 3).
    Source: Rajbhandari et al. 2020, ZeRO, arXiv:1910.02054, section 5.
    """

    degree: int
    dims: Mapping[str, int]
    keeps: bool = True
    frees_gradients: bool = False
    axis = "shard"

    def cut(self, held: TensorPlacement, coordinate: int) -> TensorPlacement | None:
        """Every rank of the axis computes with the same and updates a part of it."""
        slot = held.computes
        parts = tuple(self._part(slot, place) for place in range(self.degree))
        return replace(
            held, parts=parts, place=coordinate, kept=self.keeps, frees_gradients=self.frees_gradients
        )

    def _part(self, slot: TensorSlot, place: int) -> TensorSlot | None:
        if not slot.shape:  # one number: one of the ranks has it
            return slot.on(self.axis) if even_span(1, self.degree, place) == (0, 1) else None
        dim = self.dims.get(slot.name, 0)
        span = even_span(slot.sizes[dim], self.degree, place)
        part = slot.narrow(dim, span, self.axis)
        return part if part.numel else None


def even_span(num_items: int, num_parts: int, part: int) -> tuple[int, int]:
    """The contiguous share of one part; sizes differ by one at most; pure."""
    return num_items * part // num_parts, num_items * (part + 1) // num_parts


@dataclass(frozen=True)
class ParameterBytes:
    """Bytes of one rank's trained tensors.

    Args:
        computes: of what it computes with.
        updates: of what it updates.
        shared: of what it computes with and another stage too.
        largest: of one tensor that it computes with.
    """

    computes: int
    updates: int
    shared: int
    largest: int


def count_parameter_bytes(held: Iterable[TensorPlacement], item_bytes: Mapping[str, int]) -> ParameterBytes:
    """Add up what a rank holds.

    Args:
        item_bytes: by name, of one value.
    """
    computes = updates = shared = largest = 0
    for one in held:
        own = slot_bytes(one.computes, item_bytes)
        computes += own
        updates += 0 if one.updates is None else slot_bytes(one.updates, item_bytes)
        shared += own if one.holders else 0
        largest = max(largest, own)
    return ParameterBytes(computes, updates, shared, largest)


def slot_bytes(slot: TensorSlot, item_bytes: Mapping[str, int]) -> int:
    """Of one part of a tensor."""
    return slot.numel * item_bytes[slot.name]
