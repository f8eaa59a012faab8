"""Gradient buckets of a rank, laid out as in a run, on tensors without memory; pure.

A bucket holds whole tensors, and its rows are as wide as the widest of them, so the number of values does not
say what is allocated. `GradientReduction` says which gradients a rank reduces, over how many ranks and on
which paths; `zero_memory` computes bytes from it.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Literal, NamedTuple

import torch
from torch import Tensor

from paceline.comm.reduction.bucket_buffers import PartBuffer, bucket_bytes_of, plan_buckets
from paceline.comm.reduction.scatter_schedule import unconfirmed_bytes
from paceline.data.work import split_evenly
from paceline.parallel.placement import ParameterBytes, TensorPlacement, slot_bytes
from paceline.recipe.recipe import Recipe
from paceline.state.slot import TensorSlot

_DTYPES_BY_BYTES = {
    1: torch.uint8,
    2: torch.bfloat16,
    4: torch.float32,
    8: torch.float64,
    16: torch.complex128,
}


class BucketPath(NamedTuple):
    """The path of buckets that use the same temporary memory one after another.

    Args:
        number: number of their reduction, in the order of a run.
        item_bytes: bytes of one value.
        axes: mesh axes over which they are summed.
        meets: ranks of a replica sum their parts first (tied stages, tensor shards).
    """

    number: int
    item_bytes: int
    axes: tuple[str, ...] = ()
    meets: bool = False


class BucketBytes(NamedTuple):
    """The bytes of all rows of a bucket, and of one row."""

    whole: int
    row: int
    way: BucketPath


class BucketLayout(NamedTuple):
    """The buckets of one reduction.

    Args:
        members: tensors that it sums, in the order of the model.
        buffers: buckets in the order of their launch.
        axes, meets: as in `BucketPath`.
    """

    members: Sequence[TensorPlacement]
    buffers: Sequence[PartBuffer]
    axes: tuple[str, ...]
    meets: bool


def plan_reductions(
    recipe: Recipe,
    held: Iterable[TensorPlacement],
    item_bytes: Mapping[str, int],
    *,
    often: bool,
    multiple: int = 1,
) -> list[BucketLayout]:
    """Return all reductions of a rank, in the order of a run.

    Args:
        held: tensors of the rank, in the order of the model.
        item_bytes: bytes of one value, by name.
        often: gradients leave with every micro-batch.
        multiple: factor of the width of rows, as in `PartBuffer`.
    """
    groups = dict[tuple[tuple[str, ...], tuple[int, ...], tuple[str, ...], int], list[TensorPlacement]]()
    for placement in held:
        key = (
            placement.sums,
            placement.holders,
            tuple(sorted(placement.computes.axes)),
            placement.chunk if often else 0,
        )
        groups.setdefault(key, []).append(placement)
    layouts, bucket_bytes = [], recipe.runtime.bucket_bytes
    # The order of `build_gradient_reduction`, since buckets take turns in the same memory.
    for (axes, holders, *_), members in sorted(groups.items()):
        meets = bool(holders) or "tensor" in axes
        buffers = _plan_part_buffers(
            members, item_bytes, bucket_bytes, in_turn=often and not meets, multiple=multiple
        )
        layouts.append(BucketLayout(members, buffers, axes, meets))
    return layouts


def planned_bucket_bytes(reductions: Sequence[BucketLayout]) -> list[BucketBytes]:
    """Return the bytes of all buckets."""
    return [
        BucketBytes(
            buffer.flat.nbytes,
            buffer.rows[0].nbytes,
            BucketPath(number, buffer.flat.element_size(), reduction.axes, reduction.meets),
        )
        for number, reduction in enumerate(reductions)
        for buffer in reduction.buffers
    ]


def gather_buckets(
    held: Sequence[TensorPlacement], item_bytes: Mapping[str, int], most_bytes: int
) -> list[PartBuffer]:
    """Return the buckets through which parameters are gathered after an update, in order.

    Args:
        most_bytes: upper limit of a bucket, as in `bucket_bytes_of`.
    """
    return _plan_part_buffers(held, item_bytes, most_bytes, in_turn=True)


def _plan_part_buffers(
    placements: Sequence[TensorPlacement],
    item_bytes: Mapping[str, int],
    most_bytes: int,
    *,
    in_turn: bool,
    multiple: int = 1,
) -> list[PartBuffer]:
    tensors = meta_tensors(placements, item_bytes)
    parts = {placement.computes: placement.parts for placement in placements}
    together = bucket_bytes_of(tensors.values(), most_bytes) if in_turn else most_bytes
    return [
        PartBuffer(slots, tensors, parts, _meta_buffer, multiple) for slots in plan_buckets(tensors, together)
    ]


def meta_tensors(held: Iterable[TensorPlacement], item_bytes: Mapping[str, int]) -> dict[TensorSlot, Tensor]:
    """Return meta tensors like those with which a rank computes, by slot."""
    slots = [placement.computes for placement in held]
    return {
        slot: torch.empty(slot.sizes, dtype=_DTYPES_BY_BYTES[item_bytes[slot.name]], device="meta")
        for slot in slots
    }


def _meta_buffer(num_values: int, like: Tensor) -> Tensor:
    return like.new_empty(num_values, device="meta")


ReceiveMemory = Literal["caller", "route"]
"""Owner of the memory in which a reduce_scatter receives: its caller, or the route for each call."""


def receive_memory_of(recipe: Recipe, trained: Iterable[Tensor]) -> ReceiveMemory:
    """Return the owner of the receive memory of reduce_scatters, as in `NativeCollective.reduce_scatter`.

    Args:
        trained: tensors whose gradients are scattered.
    """
    shards = recipe.strategy.shard
    # The native route adds rows itself, in memory of the caller, where that loses no precision.
    adds = all(p.is_floating_point() and (p.element_size() > 2 or shards == 2) for p in trained)
    in_caller = recipe.strategy.route_spec.is_default and adds and recipe.runtime.device != "cuda"
    return "caller" if in_caller else "route"


@dataclass(frozen=True)
class GradientReduction:
    """The reduction of the gradients of a rank.

    Args:
        recipe: its strategy has its replicas filled in.
        held: tensors of the rank, in the order of the model.
        item_bytes: bytes of one value, by name.
        sizes: bytes of `held`.
        shards: micro-batches of a step over all ranks.
        common: sums are made in memory that all ranks share.
        receives: owner of the receive memory of reduce_scatters.
        completes: names of tensors in the order in which a backward completes their gradients.
        blocks: names of the parameters that are gathered together in backward; empty: none are.
    """

    recipe: Recipe
    held: Sequence[TensorPlacement]
    item_bytes: Mapping[str, int]
    sizes: ParameterBytes
    shards: int
    common: bool
    receives: ReceiveMemory
    completes: Sequence[str] = ()
    blocks: Sequence[Collection[str]] = ()

    @property
    def sharers(self) -> int:
        """Return the number of ranks that sum the gradients of different samples of a step."""
        strategy = self.recipe.strategy
        copies = strategy.degrees["replica"] if strategy.sync_spec.agrees == "world" else 1
        return strategy.shard * copies

    @property
    def runners(self) -> int:
        """Return the number of ranks among which the micro-batches of a step are divided."""
        strategy = self.recipe.strategy
        return strategy.shard * (strategy.replicas or 1)

    @property
    def has_other_ranks(self) -> bool:
        """Return whether gradients of other ranks are added."""
        return self.sharers * self.recipe.strategy.context > 1

    @property
    def leaves_often(self) -> bool:
        """Return whether gradients leave with every micro-batch (ZeRO 2 and 3)."""
        frees_gradients = any(placement.frees_gradients for placement in self.held)
        return frees_gradients and self.has_other_ranks and not self.recipe.is_ordered

    @property
    def most_micro_batches(self) -> int:
        """Return the micro-batches of a step on the rank that has most."""
        return max(len(split_evenly(self.shards, self.runners, rank)) for rank in range(self.runners))

    @property
    def is_even(self) -> bool:
        """Return whether all ranks run the same number of micro-batches."""
        return self.shards % self.runners == 0

    @cached_property
    def reductions(self) -> list[BucketLayout]:
        """Return all reductions in the order of a run."""
        recipe, often = self.recipe, self.leaves_often
        multiple = self.sharers // recipe.strategy.shard if recipe.is_ordered else 1
        return plan_reductions(recipe, self.held, self.item_bytes, often=often, multiple=multiple)

    @property
    def often(self) -> list[BucketLayout]:
        """Return the reductions that run with every micro-batch; others are summed in a replica first."""
        return [layout for layout in self.reductions if self.leaves_often and not layout.meets]

    @property
    def scattered_once_per_step(self) -> list[PartBuffer]:
        """Return the buckets that are scattered once a step, a few at a time (ZeRO 1 between hosts)."""
        strategy = self.recipe.strategy
        at_end = self.recipe.batch.sync_batchnorm or self.recipe.is_ordered
        sends = strategy.shard > 1 and not (self.common or self.leaves_often)
        return (
            [buffer for layout in self.reductions for buffer in layout.buffers]
            if sends and not at_end
            else []
        )

    @property
    def by_block(self) -> tuple[list[int], int]:
        """Return the bytes of each gathered block, and of all other parameters."""
        sizes = {
            placement.computes.name: slot_bytes(placement.computes, self.item_bytes)
            for placement in self.held
        }
        blocks = [sum(sizes[name] for name in block) for block in self.blocks]
        return blocks, sum(sizes.values()) - sum(blocks)

    @property
    def behind(self) -> int:
        """Return how many bytes of scatters can be unconfirmed, where ranks gather in backward."""
        return unconfirmed_bytes(*self.by_block)

    @property
    def passing(self) -> float:
        """Return the bytes of temporary memory of a scatter, per byte of its bucket."""
        if self.common:
            return 0.0
        if self.receives == "route":
            return 1.0
        shards = self.recipe.strategy.shard
        return (shards - 1) / shards if self.blocks else 0.0

    @property
    def allocates_own_row(self) -> bool:
        """Return whether the route allocates the result of a reduce_scatter."""
        return bool(self.passing) and self.receives == "route"

    @property
    def keeps(self) -> bool:
        """Return whether whole parameters stay in memory (not with ZeRO 3)."""
        return all(placement.kept for placement in self.held)

    @cached_property
    def buckets(self) -> list[BucketBytes]:
        """Return the bytes of the buckets of all reductions."""
        return planned_bucket_bytes(self.reductions)
