"""Magnitude pruning: masks that set the smallest weights to zero, and gradients that are sent without them.

A mask is a function of the whole tensor after an update and of the number of updates, so ranks with equal
parameters have equal masks; a shard group gathers each tensor first. Masked weights are zero after every
update, and stay masked. Their gradients are zero, so they count neither in the norm nor in the optimizer.

Where buckets are summed once a step (replicas, ZeRO 1) they hold only kept values. ZeRO 2 and 3 scatter
gradients after every micro-batch; there masked gradients are sent as zeros, in whole tensors.

Source: Zhu & Gupta 2017, To Prune, or Not to Prune, arXiv:1710.01878, section 3.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, cast

import torch
from torch import Tensor, nn

from paceline.comm.reduction.bucket_buffers import PartsBySlot, dense_strides
from paceline.comm.reduction.bucket_reducer import BucketReducer, BucketSum
from paceline.comm.reduction.gradients import CombinedReduction, GradientReduction, Gradients
from paceline.errors import TaskError
from paceline.optim import SlotGroup, names_of_kinds
from paceline.parallel.gradient_reduction import build_gradient_reduction
from paceline.parallel.session_context import SessionContext
from paceline.parallel.sharded_model import ShardedModel
from paceline.recipe.sparsity_recipe import SparsityRecipe
from paceline.state.slot import ExtraState, TensorPiece, TensorSlot
from paceline.state.train_state import TrainState
from paceline.sync.update import PendingUpdate, UpdateStep, insert_part_before

MASKS_KEY = "sparsity"
"""The first part of the names of masks in a checkpoint."""


def magnitude_mask(values: Tensor, share: float, before: Tensor) -> Tensor:
    """Return the mask of a tensor: false for the smallest magnitudes.

    Args:
        values: a whole tensor, real or complex; of equal magnitudes the first ones are masked first.
        share: of the values that are masked, from 0 to 1; rounded down to a number of values.
        before: the mask so far, bool, in the shape of `values`; what it masks stays masked.
    Returns:
        A new mask, bool, in the same shape.
    """
    magnitudes = values.detach().abs().masked_fill(~before, -1.0).reshape(-1)
    order = torch.argsort(magnitudes, stable=True)
    mask = torch.ones(values.numel(), dtype=torch.bool, device=values.device)
    mask[order[: int(share * values.numel())]] = False
    return mask.view(values.shape) & before


class MagnitudeMasks(ExtraState):
    """The masks of the tensors of a model, as state of checkpoints; whole on every rank.

    Args:
        schedule: how much is masked after how many updates.
        masked: the whole tensors that have a mask, in an order that is equal on all ranks.
        updates: the parts that this rank updates, by slot.
        group: the ranks that hold the parts of a tensor.
        device: of the masks.
    """

    def __init__(
        self,
        schedule: SparsityRecipe,
        masked: Sequence[TensorSlot],
        updates: Mapping[TensorSlot, nn.Parameter],
        group: SlotGroup,
        device: torch.device,
    ) -> None:
        self._schedule, self._group = schedule, group
        self.masks = {slot.name: torch.ones(slot.shape, dtype=torch.bool, device=device) for slot in masked}
        self._masked = masked
        self._updates = {slot: p for slot, p in updates.items() if slot.name in self.masks}
        self.version = 0

    @property
    def share(self) -> float:
        """Share of the values of all masked tensors that are zero."""
        total = sum(mask.numel() for mask in self.masks.values())
        return sum(int((~mask).sum()) for mask in self.masks.values()) / total

    def clear(self, slot: TensorSlot, values: Tensor) -> None:
        """Set the masked values of a part to zero, in place."""
        if slot.name in self.masks:
            values.masked_fill_(~self.masks[slot.name][slot.index], 0.0)

    @torch.no_grad()
    def prune(self, record: PendingUpdate) -> None:
        """Mask the updated parameters: a part of an update step; collective if the masks change.

        Wire: for each masked tensor of n values in parts, an all_reduce of n values when the masks change.
        """
        if self._schedule.is_due(record.state.num_updates):
            share = self._schedule.share(record.state.num_updates)
            # One after another, so that a shard group needs the memory of the largest tensor only.
            for slot in self._masked:
                parts = [(part, p.detach()) for part, p in self._updates.items() if part.name == slot.name]
                whole = self._group.gather(parts, [slot])[slot.name].to(self.masks[slot.name].device)
                self.masks[slot.name] = magnitude_mask(whole, share, self.masks[slot.name])
            self.version += 1
        for slot, p in self._updates.items():
            self.clear(slot, p)

    def pieces(self) -> Sequence[TensorPiece]:
        return [TensorPiece(TensorSlot.whole(name, mask), mask) for name, mask in self.masks.items()]

    def load(self, tensors: Mapping[str, Tensor]) -> None:
        """Load the masks; a tensor without a saved one is not masked yet."""
        for name, mask in self.masks.items():
            if name in tensors:
                mask.copy_(tensors[name])
            else:
                mask.fill_(True)
        self.version += 1


class MaskedReduction(CombinedReduction):
    """A reduction of gradients that are zero where the masks are.

    Args:
        inner: sums them.
        slots: what this rank computes with.
    """

    def __init__(self, inner: GradientReduction, slots: Sequence[TensorSlot], masks: MagnitudeMasks) -> None:
        super().__init__(dict.fromkeys(slots, inner), [inner])
        self._masks = masks

    def ready(self, slot: TensorSlot, grad: Tensor | None) -> None:
        """Clear the masked values of a gradient, in place, and hand it on."""
        if grad is not None:
            self._masks.clear(slot, grad)
        super().ready(slot, grad)


@dataclass(frozen=True)
class _KeptValues:
    """The kept values of one tensor, as a tensor of one dimension.

    Args:
        slot: their slot, which has the name of the tensor.
        places: for each part of the tensor that has kept values, its slot and their positions in it.
        part: the kept values of this rank's part; None if there are none.
        mask: of this rank's part.
        summed: memory for the sum of this rank's part, in its shape and strides; None if it has no part.
    """

    slot: TensorSlot
    places: Sequence[tuple[TensorSlot, Tensor]]
    part: TensorSlot | None
    mask: Tensor | None
    summed: Tensor | None


class KeptValuesReducer(CombinedReduction):
    """A bucket reducer that sends only the kept values of masked tensors.

    After a change of the masks it builds its buckets again, at the beginning of the next step, which is
    collective. The other arguments are those of `BucketReducer`.

    Wire: that of `BucketReducer`, for the kept values.
    """

    def __init__(
        self,
        masks: MagnitudeMasks,
        build: Callable[..., BucketReducer],
        tensors: Mapping[TensorSlot, Tensor],
        parts: PartsBySlot,
        sums: BucketSum,
        bucket_bytes: int,
        **options: Any,
    ) -> None:
        self._masks, self._tensors, self._parts, self._row = masks, tensors, parts, sums.row
        self._build = partial(build, sums=sums, bucket_bytes=bucket_bytes, **options)
        inner = self._build_buckets()
        super().__init__(dict.fromkeys(tensors, inner), [inner])

    def _build_buckets(self) -> GradientReduction:
        self._version = self._masks.version
        kept = {slot: self._kept_values(slot, p) for slot, p in self._tensors.items()}
        self._kept = {slot: values for slot, values in kept.items() if values is not None}
        tensors, parts = dict[TensorSlot, Tensor](), dict[TensorSlot, Sequence[TensorSlot | None]]()
        for slot, p in self._tensors.items():
            values = self._kept.get(slot)
            if values is None:
                tensors[slot], parts[slot] = p, self._parts[slot]
                continue
            # Buckets read shape, dtype and device; the stride of 0 needs no memory.
            tensors[values.slot] = torch.empty(1, dtype=p.dtype, device=p.device).expand(values.slot.shape)
            parts[values.slot] = _compact_parts(values, self._parts[slot])
        return cast("GradientReduction", self._build(tensors, parts))

    def _kept_values(self, slot: TensorSlot, p: Tensor) -> _KeptValues | None:
        """Return the kept values of a tensor; None if all are kept."""
        mask = self._masks.masks.get(slot.name)
        if mask is None or bool(mask.all()):
            return None
        places = [
            (part, mask[part.inside(slot)].reshape(-1).nonzero().view(-1))
            for part in self._parts[slot]
            if part is not None
        ]
        count = sum(len(positions) for _, positions in places)
        kept = TensorSlot(slot.name, (count,), ((0, count),), slot.axes)
        places = [(part, positions) for part, positions in places if len(positions)]
        own = self._parts[slot][self._row]
        if own is None:
            return _KeptValues(kept, places, None, None, None)
        index = own.inside(slot)
        like = torch.empty_strided(p.shape, p.stride(), dtype=p.dtype, device="meta")[index]
        summed = torch.empty_strided(like.shape, dense_strides(like), dtype=p.dtype, device=p.device).zero_()
        values = _KeptValues(kept, places, None, mask[index], summed)
        return replace(values, part=_compact_parts(values, self._parts[slot])[self._row])

    def begin(self, num_micro_batches: int | None = None) -> None:
        """Open a step; collective if the masks have changed."""
        if self._version != self._masks.version:
            inner = self._build_buckets()
            self._by_slot, self._all = dict.fromkeys(self._tensors, inner), [inner]
        super().begin(num_micro_batches)

    def ready(self, slot: TensorSlot, grad: Tensor | None) -> None:
        values, inner = self._kept.get(slot), self._all[0]
        if values is None:
            inner.ready(slot, grad)
        elif grad is None:
            inner.ready(values.slot, None)
        else:
            packed = [
                grad[part.inside(slot)].reshape(-1).index_select(0, positions)
                for part, positions in values.places
            ]
            inner.ready(values.slot, packed[0] if len(packed) == 1 else torch.cat(packed))

    def finish(self) -> Gradients:
        """Wait for the sums, and write them into tensors that are zero where the masks are."""
        sums = super().finish()
        tensors, flats = dict(sums.tensors), [*sums.flats]
        for slot, values in self._kept.items():
            own = self._parts[slot][self._row]
            if own is None or values.summed is None or values.mask is None:
                continue
            if values.part is not None:
                summed = tensors.pop(values.part)
                assert summed is not None, "a bucket has a sum of every slot"
                values.summed.masked_scatter_(values.mask, summed)
            tensors[own] = values.summed
            flats.append(values.summed)
        return replace(sums, tensors=tensors, flats=flats)


def _compact_parts(values: _KeptValues, parts: Sequence[TensorSlot | None]) -> list[TensorSlot | None]:
    """Return the slot of the kept values in each part of a tensor; None where there are none."""
    if len(parts) == 1:
        return [values.slot]
    counts, start, compact = dict(values.places), 0, list[TensorSlot | None]()
    for part in parts:
        count = len(counts[part]) if part in counts else 0
        axis = next(iter(part.axes - values.slot.axes), "shard") if part is not None else "shard"
        compact.append(values.slot.narrow(0, (start, start + count), axis) if count else None)
        start += count
    return compact


def install_masks(
    update_step: UpdateStep, context: SessionContext, sharded_model: ShardedModel, group: SlotGroup
) -> None:
    """Let an update step mask what it has updated, and keep the masks in its state.

    Raises:
        TaskError: the model has no tensor that can be masked.
    """
    schedule = context.recipe.sparsity
    excluded = names_of_kinds(sharded_model.model, schedule.exclude)
    masked = [slot for slot in sharded_model.slots if slot.name not in excluded]
    if not masked:
        raise TaskError(
            f"sparsity.target = {schedule.target:g}, but no tensor of the model can be masked:"
            f" {', '.join(schedule.exclude)} are excluded",
            next_step="change sparsity.exclude, or leave out sparsity.target",
        )
    masks = MagnitudeMasks(schedule, masked, sharded_model.updates, group, sharded_model.device)
    update_step.state.extra_states[MASKS_KEY] = masks
    update_step.parts = insert_part_before(update_step.parts, "gather", "prune", masks.prune)
    if sharded_model.frees_gradients and context.mesh.data.size > 1:
        context.warn(
            "sparsity: with zero=2 and zero=3 masked gradients are sent as zeros; zero=1 and replicas leave"
            " them out"
        )


def build_masked_reduction(
    context: SessionContext, sharded_model: ShardedModel, state: TrainState
) -> GradientReduction:
    """Return the reduction of all gradients of this rank, without what is masked; collective."""
    masks = state.extra_states.get(MASKS_KEY)
    if not isinstance(masks, MagnitudeMasks):
        return build_gradient_reduction(context, sharded_model)
    components = replace(
        context.components,
        reducer=cast("Any", partial(KeptValuesReducer, masks, context.components.reducer)),
    )
    inner = build_gradient_reduction(replace(context, components=components), sharded_model)
    return MaskedReduction(inner, [*sharded_model.computes], masks)
