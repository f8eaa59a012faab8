"""Placement of a model: which rank holds, updates and sums which part of every tensor.

A placement begins with every tensor whole on every rank, its gradient summed over all ranks that run samples
of their own. Transforms are applied in order, each to what the ones before it have left: a pipeline keeps a
tensor or drops it, a tensor plan keeps a span of one dimension, a shard updates a part of what is computed
with. No product of transforms has code of its own.

Pure: no tensor is read and no group is used, so the memory planner places models that were never allocated.
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
        computes: the part that this rank computes with.
        parts: of `computes`, what each rank of the shard axis updates; None where a rank updates nothing.
        place: this rank's index in `parts`.
        sums: axes over which its gradient still has to be summed; the reduction sums over exactly these.
        holders: stages that hold the tensor, if there are several.
        counts: whether this rank counts what it updates in the norm of the whole gradient.
        kept: whether the rank keeps in memory what it computes with; otherwise only the part that it updates.
        frees_gradients: whether it frees the gradient of what it computes with, keeping that of its own part.
        chunk: index of the chunk of its stage that uses the tensor.
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
        """Return the placement of a tensor that every rank holds and updates in full."""
        return cls(slot, (slot,))

    @property
    def updates(self) -> TensorSlot | None:
        """Part of the tensor that this rank updates, or None."""
        return self.parts[self.place]


class PlacementTransform(Protocol):
    """Transform of what a rank holds, by its coordinate on one mesh axis."""

    @property
    def axis(self) -> str:
        """Mesh axis along which ranks hold different parts."""

    def cut(self, held: TensorPlacement, coordinate: int) -> TensorPlacement | None:
        """Return what is left of a tensor on the rank at `coordinate`, or None if it holds nothing of it."""


@dataclass(frozen=True)
class ModelPlacement:
    """Placement of all trained tensors of a model.

    Args:
        slots: the whole trained tensors, in the order of the model.
        transforms: in the order in which they are applied.
    """

    slots: tuple[TensorSlot, ...]
    transforms: tuple[PlacementTransform, ...] = ()

    def cut(self, transform: PlacementTransform) -> ModelPlacement:
        """Return the placement after one more transform."""
        return replace(self, transforms=(*self.transforms, transform))

    def at(self, coordinates: Mapping[str, int]) -> dict[str, TensorPlacement]:
        """Return what the rank at these mesh coordinates holds, by name, in the order of the model."""
        placements: dict[str, TensorPlacement] = {}
        for slot in self.slots:
            held: TensorPlacement | None = TensorPlacement.whole(slot)
            for transform in self.transforms:
                if held is not None:
                    held = transform.cut(held, coordinates.get(transform.axis, 0))
            if held is not None:
                placements[slot.name] = held
        return placements


@dataclass(frozen=True)
class PipelineTransform:
    """Consecutive layers on consecutive ranks.

    Args:
        holders: by name, the stages that use a tensor, ascending.
        homes: by name, the chunk of this rank's stage that uses a tensor; 0 if not named.
    Source: Huang et al. 2019, GPipe, arXiv:1811.06965, section 2.1.
    """

    holders: Mapping[str, tuple[int, ...]]
    homes: Mapping[str, int] = field(default_factory=dict)
    axis = "pipeline"

    def cut(self, held: TensorPlacement, coordinate: int) -> TensorPlacement | None:
        """Keep the tensors that the layers of a stage use.

        The gradient of a tensor that several stages use is summed over these stages before it is summed over
        replicas, and the first of them counts it in the norm.
        """
        stages = self.holders[held.computes.name]
        if coordinate not in stages:
            return None
        shared = stages if len(stages) > 1 else ()
        return replace(
            held,
            computes=held.computes.on(self.axis),
            parts=tuple(slot.on(self.axis) if slot else None for slot in held.parts),
            sums=(self.axis, *held.sums) if shared else held.sums,
            holders=shared,
            chunk=self.homes.get(held.computes.name, 0),
            counts=held.counts and coordinate == stages[0],
        )


@dataclass(frozen=True)
class TensorTransform:
    """Large tensors, each split along one dimension over the ranks of the tensor axis.

    Args:
        dims: by name, the dimension that is split; tensors without an entry are whole on all ranks.
        degree: number of ranks.
        spans: by name, the span of each rank, where spans are not even.
        summed: names of whole tensors of whose gradient each rank has a part; the gradients of all other
            whole tensors are equal on all ranks.
    Source: Shoeybi et al. 2019, Megatron-LM, arXiv:1909.08053, section 3.
    """

    dims: Mapping[str, int]
    degree: int
    spans: Mapping[str, Sequence[Span]] = field(default_factory=dict)
    summed: frozenset[str] = frozenset()
    axis = "tensor"

    def cut(self, held: TensorPlacement, coordinate: int) -> TensorPlacement | None:
        """Keep a span of the planned dimension; even spans differ in length by at most one."""
        name = held.computes.name
        dim = self.dims.get(name)
        if dim is None:
            sums = (self.axis, *held.sums) if name in self.summed else held.sums
            # Whole tensors are equal on all tensor ranks: one of them counts for the norm.
            return replace(held, sums=sums, counts=held.counts and coordinate == 0)
        if name in self.spans:
            local_slot = held.computes.take(dim, self.spans[name][coordinate], self.axis)
        else:
            span = even_span(held.computes.sizes[dim], self.degree, coordinate)
            local_slot = held.computes.narrow(dim, span, self.axis)
        return replace(held, computes=local_slot, parts=(local_slot,))


@dataclass(frozen=True)
class ContextTransform:
    """Positions of sequences, split over the ranks of the context axis; every rank holds the tensors whole.

    Source: Liu et al. 2023, Ring Attention with Blockwise Transformers, arXiv:2310.01889.
    """

    axis = "context"

    def cut(self, held: TensorPlacement, coordinate: int) -> TensorPlacement | None:
        """Keep the tensor and sum its gradient over the axis: each rank has that of its own positions."""
        return replace(held, sums=(*held.sums, self.axis), counts=held.counts and coordinate == 0)


@dataclass(frozen=True)
class ShardTransform:
    """Updated tensors, split over the ranks of the shard axis; each of these ranks runs samples of its own.

    Args:
        degree: number of ranks.
        dims: by name, the dimension that is split; the first if not named.
        keeps: whether a rank keeps all that it computes with (ZeRO 1 and 2), or only its part (ZeRO 3).
        frees_gradients: whether it keeps only the gradient of its part (ZeRO 2 and 3).
        is_central: the first rank updates all of every tensor, and the others nothing.
    Source: Rajbhandari et al. 2020, ZeRO, arXiv:1910.02054, section 5.
    """

    degree: int
    dims: Mapping[str, int]
    keeps: bool = True
    frees_gradients: bool = False
    is_central: bool = False
    axis = "shard"

    def cut(self, held: TensorPlacement, coordinate: int) -> TensorPlacement | None:
        """Let every rank of the axis compute with the same tensor and update one part of it."""
        slot = held.computes
        slots = tuple(self._part(slot, shard_rank) for shard_rank in range(self.degree))
        return replace(
            held, parts=slots, place=coordinate, kept=self.keeps, frees_gradients=self.frees_gradients
        )

    def _part(self, slot: TensorSlot, shard_rank: int) -> TensorSlot | None:
        if self.is_central:
            return slot.on(self.axis) if shard_rank == 0 else None
        if not slot.shape:
            # A scalar cannot be split: exactly one rank has it.
            return slot.on(self.axis) if even_span(1, self.degree, shard_rank) == (0, 1) else None
        dim = self.dims.get(slot.name, 0)
        span = even_span(slot.sizes[dim], self.degree, shard_rank)
        local_slot = slot.narrow(dim, span, self.axis)
        return local_slot if local_slot.numel else None


def even_span(num_items: int, num_parts: int, index: int) -> tuple[int, int]:
    """Return [start, stop) of one of `num_parts` contiguous parts; their sizes differ by at most one."""
    return num_items * index // num_parts, num_items * (index + 1) // num_parts


@dataclass(frozen=True)
class ParameterBytes:
    """Bytes of the trained tensors of one rank.

    Args:
        computes: tensors that it computes with.
        updates: tensors that it updates.
        shared: tensors that it computes with and that another stage uses, too.
        largest: the largest single tensor that it computes with.
    """

    computes: int
    updates: int
    shared: int
    largest: int


def count_parameter_bytes(held: Iterable[TensorPlacement], item_bytes: Mapping[str, int]) -> ParameterBytes:
    """Sum the bytes of what a rank holds.

    Args:
        held: placements of the tensors of one rank.
        item_bytes: bytes of one value, by the name of the tensor.
    """
    computes = updates = shared = largest = 0
    for placement in held:
        num_bytes = slot_bytes(placement.computes, item_bytes)
        computes += num_bytes
        updates += 0 if placement.updates is None else slot_bytes(placement.updates, item_bytes)
        shared += num_bytes if placement.holders else 0
        largest = max(largest, num_bytes)
    return ParameterBytes(computes, updates, shared, largest)


def slot_bytes(slot: TensorSlot, item_bytes: Mapping[str, int]) -> int:
    """Return the bytes of one part of a tensor."""
    return slot.numel * item_bytes[slot.name]
