"""Build the reduction of a rank's gradients: slots that are summed over the same ranks share buckets.

A reduction sums over the replica and shard axes, and over further axes where a placement says so. Gradients
of tensors that several stages or tensor ranks hold are summed inside a replica first. Replicas that train
alone sum their parameter deltas in the same way (`build_delta_reduction`).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from torch import Tensor

from paceline.comm.reduction.bucket_buffers import scatter_buffer_prefix
from paceline.comm.reduction.bucket_reducer import (
    BucketReducer,
    BucketSum,
    TreeReducer,
    UnorderedSum,
)
from paceline.comm.reduction.gradient_norm import CanonicalNorm, SharedNorm, local_norm
from paceline.comm.reduction.gradients import CombinedReduction, GradientReduction, LocalReducer
from paceline.comm.reduction.scatter_reducer import ScatterOrder
from paceline.comm.reduction.scatter_schedule import ScatterPaths, ScatterWindow
from paceline.comm.reduction.summation_tree import (
    TreeNodeOwners,
    TreeSumByMessages,
    TreeSumInMemory,
    covering_nodes,
)
from paceline.comm.reduction.tied_gradients import TiedGradientReduction
from paceline.comm.routes.shared_memory import SharedMemoryCollective
from paceline.data.work import split_evenly
from paceline.errors import StrategyError
from paceline.job.mesh import AXES, DATA_AXES, RankGroup, duplicate_group
from paceline.parallel.placement import TensorPlacement
from paceline.parallel.session_context import SessionContext
from paceline.parallel.sharded_model import ShardedModel
from paceline.state.slot import TensorSlot

if TYPE_CHECKING:
    from paceline.sync.update import GradientNorm

_ReductionKey = tuple[tuple[str, ...], tuple[int, ...], tuple[str, ...], int]
"""Properties that slots of one reduction share: axes of the sum, holders, axes that split them, and chunk.

The chunk matters where gradients are reduced after every micro-batch, because chunks of a stage end a
micro-batch one after another. All ranks that hold a tensor have the same key for it, so that it is in the
same bucket on all of them.
"""


def build_gradient_reduction(context: SessionContext, sharded_model: ShardedModel) -> GradientReduction:
    """Return the reduction of all gradients of this rank; collective."""
    placements_by_key: dict[_ReductionKey, list[TensorPlacement]] = {}
    every_micro_batch, sums = (
        _reduces_every_micro_batch(context, sharded_model),
        dict[tuple[str, ...], BucketSum | None](),
    )
    window = None if every_micro_batch else _scatter_order(context)
    scatterers = _ScatterBuilder(context, sharded_model)
    for placement in sharded_model.held.values():
        chunk = placement.chunk if every_micro_batch else 0
        key = placement.sums, placement.holders, tuple(sorted(placement.computes.axes)), chunk
        placements_by_key.setdefault(key, []).append(placement)
    axes_of = {key: _summed_axes(context, key, members[0]) for key, members in placements_by_key.items()}
    built: list[tuple[list[TensorPlacement], GradientReduction]] = []
    # Sorted by key, as building one is collective: ranks of a pipeline hold tensors in different orders.
    for key, members in sorted(placements_by_key.items()):
        axes = axes_of[key]
        if axes not in sums:
            sums[axes] = _build_sums(context, sharded_model, axes, window)
        scatters = every_micro_batch and not _pre_reduced_axes(key)
        reduction = (
            scatterers.build(axes, key, members)
            if scatters
            else _build_one(context, sharded_model, sums[axes], key, members)
        )
        built.append((members, reduction))
    # Everything that this rank holds is frozen.
    if not built:
        return _build_local_reduction(context, {}, counts=True)
    if len(built) == 1:
        return built[0][1]
    by_slot = {placement.computes: reduction for members, reduction in built for placement in members}
    return CombinedReduction(by_slot, [reduction for _, reduction in built])


def _bucket_prefix(key: _ReductionKey) -> str:
    """Return the prefix of the keys of a reduction's buffers.

    Random numbers of a codec are seeded from it, so it must be equal on all holders of a tied tensor,
    whatever else each of them holds.
    """
    axes, holders, cut_along, chunk = key
    over = [f"over-{axis}" for axis in axes if axis not in DATA_AXES]
    words = [*over, *(f"cut-{axis}" for axis in cut_along), *(f"of-{stage}" for stage in holders)]
    return "".join(f"{word}/" for word in [*words, *([f"chunk-{chunk}"] if chunk else [])])


def _build_one(
    context: SessionContext,
    sharded_model: ShardedModel,
    sums: BucketSum | None,
    key: _ReductionKey,
    members: Sequence[TensorPlacement],
) -> GradientReduction:
    """Build a reduction that sums once a step.

    Args:
        sums: over the ranks that share the samples; None if there is a single one.
    """
    counts_in_norm, name = members[0].counts, _bucket_prefix(key)
    tensors = {placement.computes: sharded_model.computes[placement.computes] for placement in members}
    parts_by_slot = {placement.computes: placement.parts for placement in members}
    every_micro_batch = _reduces_every_micro_batch(context, sharded_model)
    inner: GradientReduction
    if sums is not None:
        inner = context.components.reducer(
            tensors,
            parts_by_slot,
            sums,
            context.bucket_bytes,
            counts=counts_in_norm,
            name=name,
            activity=context.net.activity,
        )
    else:
        inner = _build_local_reduction(context, tensors, counts_in_norm)
    for group in _pre_reduction_groups(context, key):
        inner = TiedGradientReduction(inner, tensors, group, context.net, by_micro_batch=every_micro_batch)
    return inner


def _pre_reduced_axes(key: _ReductionKey) -> set[str]:
    """Return the axes along which the ranks of a replica sum their parts of a gradient first."""
    axes, holders, *_ = key
    return ({"pipeline"} if holders else set()) | ({"tensor"} & {*axes})


def _pre_reduction_groups(context: SessionContext, key: _ReductionKey) -> Iterator[RankGroup]:
    if key[1]:
        yield context.mesh.subgroup_along("pipeline", key[1])
    if "tensor" in _pre_reduced_axes(key):
        yield context.mesh.axes["tensor"]


def _summed_axes(context: SessionContext, key: _ReductionKey, first: TensorPlacement) -> tuple[str, ...]:
    """Return the axes over which a gradient is summed besides the shard axis, in the order of the mesh.

    A gradient is summed over the ranks that hold the same part of the tensor, and over no others.

    Raises:
        StrategyError: a partition asks for a sum over ranks that hold other parts, or for one that no
            reduction supports.
    """
    axes, cut_along, pre_reduced = key[0], key[2], _pre_reduced_axes(key)
    always = {*DATA_AXES}
    supported = always if context.recipe.is_ordered else {*AXES} - {"pipeline", "tensor"}
    # A rank that holds another part of the tensor must not add its gradient.
    holding_other_parts = {*axes} & {*cut_along} - {"pipeline"}
    if holding_other_parts or not always <= {*axes} - pre_reduced <= supported:
        why = (
            f"ranks along {', '.join(holding_other_parts)} hold other parts of it"
            if holding_other_parts
            else "no reduction supports that"
        )
        raise StrategyError(
            f"the gradient of '{first.computes.name}' should be summed over {', '.join(axes)}, but {why}",
            next_step="let the partition sum over replica, shard and axes whose ranks hold the same part",
        )
    return tuple(axis for axis in AXES if axis in axes and axis not in {"shard", *pre_reduced})


def _build_local_reduction(
    context: SessionContext, tensors: Mapping[TensorSlot, Tensor], counts: bool
) -> GradientReduction:
    """Return the reduction of a rank that shares its samples with no other rank."""
    if context.recipe.is_ordered:
        return TreeReducer(tensors, [_whole_tree(context.shards)])
    return LocalReducer(tensors, counts)


def _scatter_order(context: SessionContext) -> ScatterWindow | None:
    """Return the order in which gradients are scattered once a step, or None if the order is free.

    Shared memory needs no order. Under SyncBatchNorm ranks wait for each other inside backward, and a rank
    without a gradient for a bucket launches it late: no other rank may wait for that.
    """
    recipe, is_alone = context.recipe, context.mesh.axes["shard"].size == 1
    if is_alone or recipe.is_ordered or recipe.strategy.is_coded or recipe.batch.sync_batchnorm:
        return None
    return ScatterWindow(context.workspace)


def _build_sums(
    context: SessionContext, sharded_model: ShardedModel, axes: Sequence[str], window: ScatterWindow | None
) -> BucketSum | None:
    """Return how buckets are summed over the shard axis and others, or None if there is a single rank.

    Args:
        window: order of the scatters; see `UnorderedSum`.
    """
    mesh, data = context.mesh, context.mesh.data
    shard, other_axes = mesh.axes["shard"], mesh.group_over(axes)
    if shard.size * other_axes.size == 1:
        return None
    if not context.recipe.is_ordered:
        path = context.collective(shard)
        in_memory = isinstance(path, SharedMemoryCollective)
        return UnorderedSum(path, context.collective(other_axes), None if in_memory else window)
    if sharded_model.use.pace is not None:
        # Ranks gather parameters meanwhile, each as often as it has micro-batches: the sums need their own
        # group.
        data = replace(duplicate_group(data, "tree"), name=data.name)
    return _build_tree_sum(context, data)


def _build_tree_sum(
    context: SessionContext, data: RankGroup, blocks: Sequence[range] | None = None
) -> BucketSum:
    """Return the sum in the tree over shards; collective.

    Args:
        context: of an ordered run.
        data: the ranks that share the shards, each a contiguous block.
        blocks: the shards of each rank; None: as even as possible.
    """
    if blocks is None:
        blocks = [split_evenly(context.shards, data.size, rank) for rank in range(data.size)]
    owners = TreeNodeOwners([covering_nodes(block) for block in blocks], data, context.mesh.replica)
    path = context.collective(data)
    return (
        TreeSumInMemory(owners, path)
        if isinstance(path, SharedMemoryCollective)
        else TreeSumByMessages(owners, context.net)
    )


def _reduces_every_micro_batch(context: SessionContext, sharded_model: ShardedModel) -> bool:
    """Return whether gradients are reduced after every micro-batch.

    Ordered sums and lossy codecs need the whole gradient of a step on each rank.
    """
    recipe = context.recipe
    return sharded_model.frees_gradients and not recipe.is_ordered and recipe.strategy.codec_spec.exact


class _ScatterBuilder:
    """Builder of the reductions that scatter gradients after every micro-batch, on a process group of their
    own.
    """

    def __init__(self, context: SessionContext, sharded_model: ShardedModel) -> None:
        self._context, self._sharded_model = context, sharded_model
        self._chunks = {placement.chunk for placement in sharded_model.held.values()}
        self._orders: dict[int, tuple[ScatterPaths, ScatterOrder]] = {}
        self._num_built = 0

    def build(
        self, axes: Sequence[str], key: _ReductionKey, members: Sequence[TensorPlacement]
    ) -> GradientReduction:
        """Build one reduction; collective.

        Args:
            axes: over which the parts of this rank are summed once a step.
        """
        context, shared = self._context, self._sharded_model
        tensors = {placement.computes: shared.computes[placement.computes] for placement in members}
        parts_by_slot = {placement.computes: placement.parts for placement in members}
        paths, order = self._paths_and_order(number=key[-1])
        # Codecs draw nothing here, so the name is free to be that of the gathers: they share memory.
        name, self._num_built = scatter_buffer_prefix(self._num_built), self._num_built + 1
        reduction: GradientReduction = context.components.scatterer(
            tensors,
            parts_by_slot,
            replace(paths, replica=context.collective(context.mesh.group_over(axes))),
            context.bucket_bytes,
            counts=members[0].counts,
            name=name,
            order=order,
        )
        return reduction

    def _paths_and_order(self, number: int) -> tuple[ScatterPaths, ScatterOrder]:
        """Return the paths and the order of the scatters of a chunk of the model, which are built once.

        Ranks with different numbers of micro-batches end those of several chunks in different orders, so each
        chunk has an order of its own, in which no rank waits during backward.
        """
        if number not in self._orders:
            shard, context = self._context.mesh.axes["shard"], self._context
            own_group = replace(duplicate_group(shard, "scatter"), name=shard.name)
            paths = ScatterPaths(
                context.collective(own_group),
                context.collective(context.mesh.replica),
                shard,
                context.net,
                self._sharded_model.use.pace,
                context.workspace,
                waits=len(self._chunks) == 1,
            )
            self._orders[number] = paths, ScatterOrder(paths, self._sharded_model.computes)
        return self._orders[number]


def build_gradient_norm(context: SessionContext, sharded_model: ShardedModel) -> GradientNorm:
    """Return the norm of the whole gradient, counting each value once in a replica.

    Under rules without agreement in a step it is the norm of the local part: the sum would wait for other
    ranks.
    """
    inside = context.mesh.inside
    if not context.recipe.is_ordered:
        is_local = context.recipe.strategy.sync_spec.agrees == "nobody"
        return local_norm if is_local else SharedNorm(inside, context.net)
    counted = [
        placement.updates
        for placement in sharded_model.held.values()
        if placement.counts and placement.updates is not None
    ]
    return CanonicalNorm(sharded_model.slots, counted, inside, context.net)


def _whole_tree(shards: int) -> range:
    """Return the root of the summation tree over `shards` shards."""
    return range(1 << (shards - 1).bit_length())


def build_client_reduction(
    context: SessionContext, tensors: Mapping[TensorSlot, Tensor]
) -> GradientReduction:
    """Return the reduction of the updates of clients, each of which is a leaf of the tree; collective.

    Args:
        tensors: by slot, equal on all ranks, in the dtype of the sums.
    Wire: that of the tree; it does not grow with the number of clients.
    Exactness: bitwise on any number of ranks, also in a run that is not reproducible otherwise.
    """
    data = context.mesh.data
    if data.size == 1:
        return TreeReducer(tensors, [_whole_tree(context.shards)])
    ordered = replace(context, recipe=context.recipe.model_copy(update={"reproducible": True}))
    clients = context.recipe.federated
    blocks = [clients.block(split_evenly(clients.num_groups, data.size, rank)) for rank in range(data.size)]
    sums = _build_tree_sum(ordered, data, blocks)
    return BucketReducer(tensors, {slot: (slot,) for slot in tensors}, sums, context.bucket_bytes)


def build_delta_reduction(
    context: SessionContext, sharded_model: ShardedModel, tensors: Mapping[TensorSlot, Tensor], name: str = ""
) -> GradientReduction:
    """Return the reduction over replicas of the parts that each rank updates.

    Collective over ranks that update the same parts.

    Args:
        tensors: by the slot that this rank updates; may be empty.
        name: prefix of buffer names; see `BucketReducer`.
    """
    replicas, path = context.mesh.replica, None
    if replicas.size > 1:
        # No scatter: each rank passes only what it updates, so the sum runs over replicas alone.
        path = UnorderedSum(context.collective(context.mesh.group_over(())), context.collective(replicas))
    by_slot, built = dict[TensorSlot, GradientReduction](), list[GradientReduction]()
    for label, counts, slots in _by_holders(sharded_model, tensors):
        local_tensors, prefix = {slot: tensors[slot] for slot in slots}, f"{name}{label}/" if label else name
        reduction: GradientReduction = LocalReducer(local_tensors, counts)
        if path is not None:
            parts_by_slot = {slot: (slot,) for slot in slots}
            reduction = BucketReducer(
                local_tensors,
                parts_by_slot,
                path,
                context.bucket_bytes,
                counts=counts,
                name=prefix,
                activity=context.net.activity,
            )
        built.append(reduction)
        by_slot |= dict.fromkeys(slots, reduction)
    return CombinedReduction(by_slot, built) if len(built) > 1 else next(iter(built), LocalReducer({}))


def _by_holders(
    sharded_model: ShardedModel, tensors: Mapping[TensorSlot, Tensor]
) -> Iterator[tuple[str, bool, list[TensorSlot]]]:
    """Yield the slots that the same ranks of a replica hold: label, whether this rank counts them, and slots.

    They are in buckets of their own, equal on all of these ranks, so that copies of a tensor get the same
    sums.
    """
    slots_by_holders: dict[tuple[tuple[int, ...], tuple[str, ...]], list[tuple[bool, TensorSlot]]] = {}
    for placement in sharded_model.held.values():
        slot = placement.updates
        if slot is not None and slot in tensors:
            key = placement.holders, tuple(sorted(slot.axes))
            slots_by_holders.setdefault(key, []).append((placement.counts, slot))
    for (holders, axes), members in sorted(slots_by_holders.items(), key=lambda entry: entry[0]):
        yield "-".join([*axes, *map(str, holders)]), members[0][0], [slot for _, slot in members]
