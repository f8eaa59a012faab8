"""The reduction of what a rank holds: slots that are summed over the same ranks go together."""

from __future__ import annotations

from collections.abc import Sequence

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
    cover,
)
from paceline.comm.routes import SharedMemoryCollective
from paceline.data import split
from paceline.layout import Holding
from paceline.layout.placement import Held
from paceline.sync.update import Norm
from paceline.training.arrange import Setting

_Alike = tuple[tuple[str, ...], tuple[int, ...], bool]
"""What slots that are reduced together agree in: axes of the sum, holders, and whether they count here."""


def build_reduction(setting: Setting, holding: Holding) -> Reduction:
    """The reduction of all gradients of this rank; collective."""
    together: dict[_Alike, list[Held]] = {}
    for held in holding.held.values():
        together.setdefault((held.sums, held.holders, held.counts), []).append(held)
    sums = _sums(setting)
    built: list[tuple[list[Held], Reduction]] = []
    for number, (alike, members) in enumerate(sorted(together.items())):
        name = f"{number}/" if number else ""
        built.append((members, _one(setting, holding, sums, alike, members, name)))
    if len(built) == 1:
        return built[0][1]
    by_slot = {held.computes: one for members, one in built for held in members}
    return Reducers(by_slot, [one for _, one in built])


def _one(
    setting: Setting, holding: Holding, sums: Sums | None, alike: _Alike, members: Sequence[Held], name: str
) -> Reduction:
    _, holders, counts = alike
    tensors = {held.computes: holding.computes[held.computes] for held in members}
    inner: Reduction
    if sums is not None:
        parts = {held.computes: held.parts for held in members}
        inner = setting.pieces.reducer(tensors, parts, sums, setting.bucket_bytes, counts=counts, name=name)
    elif setting.recipe.is_ordered:
        inner = TreeReducer(tensors, [_whole_tree(setting.recipe.batch.shards)])
    else:
        inner = LocalReducer(tensors, counts)
    if not holders:
        return inner
    return Meeting(inner, tensors, setting.mesh.among("pipeline", holders), setting.net)


def _sums(setting: Setting) -> Sums | None:
    """How buckets are summed over the ranks that run samples of their own; None: there is one."""
    mesh, data = setting.mesh, setting.mesh.data
    if data.size == 1:
        return None
    if not setting.recipe.is_ordered:
        return InAnyOrder(setting.collective(mesh.axes["shard"]), setting.collective(mesh.replica))
    blocks = [split(setting.recipe.batch.shards, data.size, rank) for rank in range(data.size)]
    dealt = Dealt([cover(block) for block in blocks], data, mesh.replica)
    path = setting.collective(data)
    return (
        InMemory(dealt, path) if isinstance(path, SharedMemoryCollective) else ByMessages(dealt, setting.net)
    )


def build_norm(setting: Setting, holding: Holding) -> Norm:
    """The norm of the whole gradient, each value counted once in a replica."""
    inside = setting.mesh.inside
    if not setting.recipe.is_ordered:
        return AnyOrderNorm(inside, setting.net)
    counted = [held.updates for held in holding.held.values() if held.counts and held.updates is not None]
    return CanonicalNorm(holding.slots, counted, inside, setting.net)


def _whole_tree(shards: int) -> range:
    """The root of the tree over so many shards."""
    return range(1 << (shards - 1).bit_length())
