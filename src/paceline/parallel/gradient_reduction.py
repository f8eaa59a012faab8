"""The reduction of what a rank holds: slots that are summed over the same ranks go together.

Sums of how replicas that train alone have moved.
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
"""What slots that are reduced together agree in: axes of the sum, holders, axes that cut them, and the chunk
of a stage where gradients leave with every micro-batch, since chunks end a micro-batch one after another.

All of it is equal on ranks that hold the same, so that a tensor lies in the same bucket on all of them.
"""

_SumPath = tuple[tuple[str, ...], BucketSum | None]
"""Axes of a sum beside the shard axis, and how it is made; None: its ranks are one."""


def build_gradient_reduction(context: SessionContext, sharded_model: ShardedModel) -> GradientReduction:
    """The reduction of all gradients of this rank; collective."""
    together: dict[_ReductionKey, list[TensorPlacement]] = {}
    leaves_often, sums = (
        _reduces_every_micro_batch(context, sharded_model),
        dict[tuple[str, ...], BucketSum | None](),
    )
    turns = None if leaves_often else _scatter_order(context)
    num_scatterers = 0
    for held in sharded_model.held.values():
        chunk = held.chunk if leaves_often else 0
        alike = held.sums, held.holders, tuple(sorted(held.computes.axes)), chunk
        together.setdefault(alike, []).append(held)
    axes_of = {alike: _summed_axes(context, alike, members[0]) for alike, members in together.items()}
    built: list[tuple[list[TensorPlacement], GradientReduction]] = []
    for alike, members in sorted(together.items()):
        axes = axes_of[alike]
        if axes not in sums:
            sums[axes] = _build_sums(context, sharded_model, axes, turns)
        name = _bucket_prefix(alike)
        if leaves_often and not _pre_reduced_axes(
            alike
        ):  # nothing is drawn; what the first has is that of gathers
            name, num_scatterers = scatter_buffer_prefix(num_scatterers), num_scatterers + 1
        built.append((members, _build_one(context, sharded_model, (axes, sums[axes]), alike, members, name)))
    if not built:  # all that this rank holds is frozen
        return _build_local_reduction(context, {}, counts=True)
    if len(built) == 1:
        return built[0][1]
    by_slot = {held.computes: one for members, one in built for held in members}
    return CombinedReduction(by_slot, [one for _, one in built])


def _bucket_prefix(alike: _ReductionKey) -> str:
    """In front of the keys of its buffers: what coding draws follows from them, so that all holders of a tied
    tensor have the same, whatever else each of them holds.
    """
    axes, holders, cut_along, chunk = alike
    over = [f"over-{axis}" for axis in axes if axis not in DATA_AXES]
    words = [*over, *(f"cut-{axis}" for axis in cut_along), *(f"of-{stage}" for stage in holders)]
    return "".join(f"{word}/" for word in [*words, *([f"chunk-{chunk}"] if chunk else [])])


def _build_one(
    context: SessionContext,
    sharded_model: ShardedModel,
    way: _SumPath,
    alike: _ReductionKey,
    members: Sequence[TensorPlacement],
    name: str,
) -> GradientReduction:
    counts, (axes, sums) = members[0].counts, way
    tensors = {held.computes: sharded_model.computes[held.computes] for held in members}
    parts = {held.computes: held.parts for held in members}
    leaves_often = _reduces_every_micro_batch(context, sharded_model)
    inner: GradientReduction
    if leaves_often and not _pre_reduced_axes(alike):
        ways = _scatter_paths(context, sharded_model, axes)
        inner = context.components.scatterer(
            tensors, parts, ways, context.bucket_bytes, counts=counts, name=name
        )
    elif sums is not None:
        inner = context.components.reducer(
            tensors, parts, sums, context.bucket_bytes, counts=counts, name=name
        )
    else:
        inner = _build_local_reduction(context, tensors, counts)
    for group in _pre_reduction_groups(context, alike):
        inner = TiedGradientReduction(inner, tensors, group, context.net, by_micro_batch=leaves_often)
    return inner


def _pre_reduced_axes(alike: _ReductionKey) -> set[str]:
    """Axes along which the ranks of a replica put their parts of these gradients together first."""
    axes, holders, *_ = alike
    return ({"pipeline"} if holders else set()) | ({"tensor"} & {*axes})


def _pre_reduction_groups(context: SessionContext, alike: _ReductionKey) -> Iterator[RankGroup]:
    if alike[1]:
        yield context.mesh.among("pipeline", alike[1])
    if "tensor" in _pre_reduced_axes(alike):
        yield context.mesh.axes["tensor"]


def _summed_axes(context: SessionContext, alike: _ReductionKey, first: TensorPlacement) -> tuple[str, ...]:
    """Over which axes a gradient is summed beside the shard axis, in the order of the mesh.

    Gradients are summed over the ranks that hold the same piece, and over no others.

    Raises:
        StrategyError: a cut asks for a sum over ranks that hold other pieces, or for one that nobody makes.
    """
    axes, cut_along, met = alike[0], alike[2], _pre_reduced_axes(alike)
    always = {*DATA_AXES}
    made = always if context.recipe.is_ordered else {*AXES} - {"pipeline", "tensor"}
    apart = {*axes} & {*cut_along} - {"pipeline"}  # who has another part must not add it
    if apart or not always <= {*axes} - met <= made:
        why = f"ranks along {', '.join(apart)} hold other pieces" if apart else "no reduction does that"
        raise StrategyError(
            f"the gradient of '{first.computes.name}' is to be summed over {', '.join(axes)}, and {why}",
            next_step="a cut sums over axes whose ranks hold the same, and over replica and shard always",
        )
    return tuple(axis for axis in AXES if axis in axes and axis not in {"shard", *met})


def _build_local_reduction(
    context: SessionContext, tensors: Mapping[TensorSlot, Tensor], counts: bool
) -> GradientReduction:
    """Where no other rank runs samples of its own."""
    if context.recipe.is_ordered:
        return TreeReducer(tensors, [_whole_tree(context.shards)])
    return LocalReducer(tensors, counts)


def _scatter_order(context: SessionContext) -> ScatterWindow | None:
    """Of what is scattered once a step, as it is, by messages: memory of a host has no use for turns.

    Under SyncBatchNorm ranks wait for each other within backward, and one that has no gradient for a bucket
    launches it behind: another must not wait for that.
    """
    recipe, is_alone = context.recipe, context.mesh.axes["shard"].size == 1
    if is_alone or recipe.is_ordered or recipe.strategy.is_coded or recipe.batch.sync_batchnorm:
        return None
    return ScatterWindow(context.workspace)


def _build_sums(
    context: SessionContext, sharded_model: ShardedModel, axes: Sequence[str], turns: ScatterWindow | None
) -> BucketSum | None:
    """How buckets are summed over the shard axis and others; None: there is one rank.

    Args:
        turns: see `UnorderedSum`.
    """
    mesh, data = context.mesh, context.mesh.data
    shard, rest = mesh.axes["shard"], mesh.over(axes)
    if shard.size * rest.size == 1:
        return None
    if not context.recipe.is_ordered:
        path = context.collective(shard)
        in_memory = isinstance(path, SharedMemoryCollective)
        return UnorderedSum(path, context.collective(rest), None if in_memory else turns)
    if sharded_model.use.pace is not None:  # meanwhile ranks gather, each as often as it has micro-batches
        data = replace(duplicate_group(data, "tree"), name=data.name)
    blocks = [split_evenly(context.shards, data.size, rank) for rank in range(data.size)]
    dealt = TreeNodeOwners([covering_nodes(block) for block in blocks], data, mesh.replica)
    path = context.collective(data)
    return (
        TreeSumInMemory(dealt, path)
        if isinstance(path, SharedMemoryCollective)
        else TreeSumByMessages(dealt, context.net)
    )


def _reduces_every_micro_batch(context: SessionContext, sharded_model: ShardedModel) -> bool:
    """Whether gradients leave with every micro-batch.

    Where sums have one order, or coding loses something, a rank needs the whole gradient of a step.
    """
    recipe = context.recipe
    return sharded_model.frees_gradients and not recipe.is_ordered and recipe.strategy.form.exact


def _scatter_paths(context: SessionContext, sharded_model: ShardedModel, axes: Sequence[str]) -> ScatterPaths:
    """On a process group of its own: a rank fills up with zeros for one group of slots after another."""
    shard = context.mesh.axes["shard"]
    return ScatterPaths(
        context.collective(replace(duplicate_group(shard, "scatter"), name=shard.name)),
        context.collective(context.mesh.over(axes)),
        shard,
        context.net,
        sharded_model.use.pace,
        context.workspace,
    )


def build_gradient_norm(context: SessionContext, sharded_model: ShardedModel) -> GradientNorm:
    """The norm of the whole gradient, each value counted once in a replica.

    Where nobody agrees in a step it is that of the own part: to ask others would be to wait for them.
    """
    inside = context.mesh.inside
    if not context.recipe.is_ordered:
        alone = context.recipe.strategy.rule.agrees == "nobody"
        return local_norm if alone else SharedNorm(inside, context.net)
    counted = [
        held.updates for held in sharded_model.held.values() if held.counts and held.updates is not None
    ]
    return CanonicalNorm(sharded_model.slots, counted, inside, context.net)


def _whole_tree(shards: int) -> range:
    """The root of the tree over so many shards."""
    return range(1 << (shards - 1).bit_length())


def build_delta_reduction(
    context: SessionContext, sharded_model: ShardedModel, tensors: Mapping[TensorSlot, Tensor], name: str = ""
) -> GradientReduction:
    """Sums over replicas of what each rank updates; collective over the ranks that update the same.

    Args:
        tensors: by the part that this rank updates; there may be none.
        name: see `BucketReducer`.
    """
    replicas, path = context.mesh.replica, None
    if replicas.size > 1:
        path = UnorderedSum(context.collective(context.mesh.over(())), context.collective(replicas))
    by_slot, built = dict[TensorSlot, GradientReduction](), list[GradientReduction]()
    for label, counts, slots in _by_holders(sharded_model, tensors):
        own, prefix = {slot: tensors[slot] for slot in slots}, f"{name}{label}/" if label else name
        one: GradientReduction = LocalReducer(own, counts)
        if path is not None:
            parts = {slot: (slot,) for slot in slots}
            one = BucketReducer(own, parts, path, context.bucket_bytes, counts=counts, name=prefix)
        built.append(one)
        by_slot |= dict.fromkeys(slots, one)
    return CombinedReduction(by_slot, built) if len(built) > 1 else next(iter(built), LocalReducer({}))


def _by_holders(
    sharded_model: ShardedModel, tensors: Mapping[TensorSlot, Tensor]
) -> Iterator[tuple[str, bool, list[TensorSlot]]]:
    """Parts that the same ranks of a replica hold: what these are called, and whether this rank counts them.

    They lie in buckets of their own, alike on all of these ranks, so that copies get the same sums.
    """
    together: dict[tuple[tuple[int, ...], tuple[str, ...]], list[tuple[bool, TensorSlot]]] = {}
    for held in sharded_model.held.values():
        slot = held.updates
        if slot is not None and slot in tensors:
            alike = held.holders, tuple(sorted(slot.axes))
            together.setdefault(alike, []).append((held.counts, slot))
    for (holders, axes), members in sorted(together.items(), key=lambda entry: entry[0]):
        yield "-".join([*axes, *map(str, holders)]), members[0][0], [slot for _, slot in members]
