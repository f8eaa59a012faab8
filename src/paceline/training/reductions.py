"""The reduction of what a rank holds: slots that are summed over the same ranks go together."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace

from torch import Tensor

from paceline.comm.reduction import (
    AnyOrderNorm,
    ByMessages,
    CanonicalNorm,
    Dealt,
    InAnyOrder,
    InMemory,
    LocalReducer,
    Meeting,
    Reducers,
    Reduction,
    Sums,
    TreeReducer,
    Turns,
    Ways,
    cover,
    of_own_part,
    scatterer_name,
)
from paceline.comm.routes import SharedMemoryCollective
from paceline.data import split
from paceline.errors import StrategyError
from paceline.layout import Holding
from paceline.layout.placement import Held
from paceline.mesh import AXES, DATA_AXES, Group, twin_group
from paceline.slot import Slot
from paceline.sync.update import Norm
from paceline.training.arrange import Setting

_Alike = tuple[tuple[str, ...], tuple[int, ...], tuple[str, ...], int]
"""What slots that are reduced together agree in: axes of the sum, holders, axes that cut them, and the chunk
of a stage where gradients leave with every micro-batch, since chunks end a micro-batch one after another.

All of it is equal on ranks that hold the same, so that a tensor lies in the same bucket on all of them.
"""

_Way = tuple[tuple[str, ...], Sums | None]
"""Axes of a sum beside the shard axis, and how it is made; None: its ranks are one."""


def build_reduction(setting: Setting, holding: Holding) -> Reduction:
    """The reduction of all gradients of this rank; collective."""
    together: dict[_Alike, list[Held]] = {}
    leaves_often, sums = _leaves_often(setting, holding), dict[tuple[str, ...], Sums | None]()
    turns = None if leaves_often else _turns(setting)
    num_scatterers = 0
    for held in holding.held.values():
        chunk = held.chunk if leaves_often else 0
        alike = held.sums, held.holders, tuple(sorted(held.computes.axes)), chunk
        together.setdefault(alike, []).append(held)
    axes_of = {alike: _summed_axes(setting, alike, members[0]) for alike, members in together.items()}
    built: list[tuple[list[Held], Reduction]] = []
    for alike, members in sorted(together.items()):
        axes = axes_of[alike]
        if axes not in sums:
            sums[axes] = _sums(setting, holding, axes, turns)
        name = _name(alike)
        if leaves_often and not _met_over(alike):  # nothing is drawn; what the first has is that of gathers
            name, num_scatterers = scatterer_name(num_scatterers), num_scatterers + 1
        built.append((members, _one(setting, holding, (axes, sums[axes]), alike, members, name)))
    if not built:  # all that this rank holds is frozen
        return _alone(setting, {}, counts=True)
    if len(built) == 1:
        return built[0][1]
    by_slot = {held.computes: one for members, one in built for held in members}
    return Reducers(by_slot, [one for _, one in built])


def _name(alike: _Alike) -> str:
    """In front of the keys of its buffers: what coding draws follows from them, so that all holders of a tied
    tensor have the same, whatever else each of them holds.
    """
    axes, holders, cut_along, chunk = alike
    over = [f"over-{axis}" for axis in axes if axis not in DATA_AXES]
    words = [*over, *(f"cut-{axis}" for axis in cut_along), *(f"of-{stage}" for stage in holders)]
    return "".join(f"{word}/" for word in [*words, *([f"chunk-{chunk}"] if chunk else [])])


def _one(
    setting: Setting, holding: Holding, way: _Way, alike: _Alike, members: Sequence[Held], name: str
) -> Reduction:
    counts, (axes, sums) = members[0].counts, way
    tensors = {held.computes: holding.computes[held.computes] for held in members}
    parts = {held.computes: held.parts for held in members}
    leaves_often = _leaves_often(setting, holding)
    inner: Reduction
    if leaves_often and not _met_over(alike):
        ways = _ways(setting, holding, axes)
        inner = setting.pieces.scatterer(tensors, parts, ways, setting.bucket_bytes, counts=counts, name=name)
    elif sums is not None:
        inner = setting.pieces.reducer(tensors, parts, sums, setting.bucket_bytes, counts=counts, name=name)
    else:
        inner = _alone(setting, tensors, counts)
    for group in _meet_first(setting, alike):
        inner = Meeting(inner, tensors, group, setting.net, by_micro_batch=leaves_often)
    return inner


def _met_over(alike: _Alike) -> set[str]:
    """Axes along which the ranks of a replica put their parts of these gradients together first."""
    axes, holders, *_ = alike
    return ({"pipeline"} if holders else set()) | ({"tensor"} & {*axes})


def _meet_first(setting: Setting, alike: _Alike) -> Iterator[Group]:
    if alike[1]:
        yield setting.mesh.among("pipeline", alike[1])
    if "tensor" in _met_over(alike):
        yield setting.mesh.axes["tensor"]


def _summed_axes(setting: Setting, alike: _Alike, first: Held) -> tuple[str, ...]:
    """Over which axes a gradient is summed beside the shard axis, in the order of the mesh.

    Gradients are summed over the ranks that hold the same piece, and over no others.

    Raises:
        StrategyError: a cut asks for a sum over ranks that hold other pieces, or for one that nobody makes.
    """
    axes, cut_along, met = alike[0], alike[2], _met_over(alike)
    always = {*DATA_AXES}
    made = always if setting.recipe.is_ordered else {*AXES} - {"pipeline", "tensor"}
    apart = {*axes} & {*cut_along} - {"pipeline"}  # who has another part must not add it
    if apart or not always <= {*axes} - met <= made:
        why = f"ranks along {', '.join(apart)} hold other pieces" if apart else "no reduction does that"
        raise StrategyError(
            f"the gradient of '{first.computes.name}' is to be summed over {', '.join(axes)}, and {why}",
            next_step="a cut sums over axes whose ranks hold the same, and over replica and shard always",
        )
    return tuple(axis for axis in AXES if axis in axes and axis not in {"shard", *met})


def _alone(setting: Setting, tensors: Mapping[Slot, Tensor], counts: bool) -> Reduction:
    """Where no other rank runs samples of its own."""
    if setting.recipe.is_ordered:
        return TreeReducer(tensors, [_whole_tree(setting.shards)])
    return LocalReducer(tensors, counts)


def _turns(setting: Setting) -> Turns | None:
    """Of what is scattered once a step, as it is, by messages: memory of a host has no use for turns.

    Under SyncBatchNorm ranks wait for each other within backward, and one that has no gradient for a bucket
    launches it behind: another must not wait for that.
    """
    recipe, is_alone = setting.recipe, setting.mesh.axes["shard"].size == 1
    if is_alone or recipe.is_ordered or recipe.strategy.is_coded or recipe.batch.sync_batchnorm:
        return None
    return Turns(setting.moving)


def _sums(setting: Setting, holding: Holding, axes: Sequence[str], turns: Turns | None) -> Sums | None:
    """How buckets are summed over the shard axis and others; None: there is one rank.

    Args:
        turns: see `InAnyOrder`.
    """
    mesh, data = setting.mesh, setting.mesh.data
    shard, rest = mesh.axes["shard"], mesh.over(axes)
    if shard.size * rest.size == 1:
        return None
    if not setting.recipe.is_ordered:
        path = setting.collective(shard)
        in_memory = isinstance(path, SharedMemoryCollective)
        return InAnyOrder(path, setting.collective(rest), None if in_memory else turns)
    if holding.use.pace is not None:  # meanwhile ranks gather, each as often as it has micro-batches
        data = replace(twin_group(data, "tree"), name=data.name)
    blocks = [split(setting.shards, data.size, rank) for rank in range(data.size)]
    dealt = Dealt([cover(block) for block in blocks], data, mesh.replica)
    path = setting.collective(data)
    return (
        InMemory(dealt, path) if isinstance(path, SharedMemoryCollective) else ByMessages(dealt, setting.net)
    )


def _leaves_often(setting: Setting, holding: Holding) -> bool:
    """Whether gradients leave with every micro-batch.

    Where sums have one order, or coding loses something, a rank needs the whole gradient of a step.
    """
    recipe = setting.recipe
    return holding.frees and not recipe.is_ordered and recipe.strategy.form.exact


def _ways(setting: Setting, holding: Holding, axes: Sequence[str]) -> Ways:
    """On a process group of its own: a rank fills up with zeros for one group of slots after another."""
    shard = setting.mesh.axes["shard"]
    return Ways(
        setting.collective(replace(twin_group(shard, "scatter"), name=shard.name)),
        setting.collective(setting.mesh.over(axes)),
        shard,
        setting.net,
        holding.use.pace,
        setting.moving,
    )


def build_norm(setting: Setting, holding: Holding) -> Norm:
    """The norm of the whole gradient, each value counted once in a replica.

    Where nobody agrees in a step it is that of the own part: to ask others would be to wait for them.
    """
    inside = setting.mesh.inside
    if not setting.recipe.is_ordered:
        alone = setting.recipe.strategy.rule.agrees == "nobody"
        return of_own_part if alone else AnyOrderNorm(inside, setting.net)
    counted = [held.updates for held in holding.held.values() if held.counts and held.updates is not None]
    return CanonicalNorm(holding.slots, counted, inside, setting.net)


def _whole_tree(shards: int) -> range:
    """The root of the tree over so many shards."""
    return range(1 << (shards - 1).bit_length())
