"""What sums of gradients, or of movements, carry between ranks: the buffers of each path. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Literal, NamedTuple

import torch
from torch import Tensor

from paceline.comm.codecs.low_rank import Matrix
from paceline.layout.placement import Held
from paceline.mesh import Group
from paceline.plan.buckets import reductions_of
from paceline.plan.ranks import setting_of
from paceline.recipe import Recipe

_TURNS = 2  # buckets that are under way at a time, where gradients leave with every micro-batch


class Buffer(NamedTuple):
    """What travels at a time: how many values of which type, and where matrices lie in them."""

    num_values: int
    dtype: torch.dtype
    matrices: Sequence[Matrix]


class Path(NamedTuple):
    """One collective.

    Args:
        does: with a buffer, whole or as rows of all ranks.
        kept: values of all buffers of which a coder keeps something.
    """

    group: Group
    does: Literal["sum", "scatter", "gather"]
    buffers: Sequence[Buffer]
    kept: int = 0


def paths_of(
    recipe: Recipe, held: Mapping[str, Held], item_bytes: Mapping[str, int], processes: int, *, waits: bool
) -> Iterator[Path]:
    """Of one rank.

    Gradients are scattered over the ranks that share the state, and what this rank got is summed over all
    others that have the same. Replicas of several ranks that train alone send each other how they have moved:
    that is what a codec codes there, and nothing inside.

    Args:
        recipe: its strategy has its replicas filled in.
        held: by name, what the rank holds; `item_bytes` of one value.
        waits: a rank may wait for any scatter; see `paceline.comm.reduction.Ways`.
    """
    strategy, mesh = recipe.strategy, setting_of(recipe, processes, 0).mesh
    over = ["replica", "context"]
    if strategy.rule.agrees == "replica" and strategy.ranks_per_replica > 1:
        moved = reductions_of(recipe, _movements(held.values()), item_bytes, often=False)
        own = [_buffer(one.flat, one.matrices(None)) for laid in moved for one in laid.buffers]
        yield Path(mesh.replica, "sum", own, _values(own))
        if strategy.is_coded:
            return
        over.remove("replica")
    yield from _of_gradients(recipe, held, item_bytes, mesh.axes["shard"], mesh.over(over), waits=waits)


def _of_gradients(
    recipe: Recipe,
    held: Mapping[str, Held],
    item_bytes: Mapping[str, int],
    shard: Group,
    rest: Group,
    *,
    waits: bool,
) -> Iterator[Path]:
    often = recipe.strategy.zero > 1 and recipe.strategy.form.exact
    laid = reductions_of(recipe, held.values(), item_bytes, often=often)
    buffers = [one for reduction in laid for one in reduction.buffers]
    whole = [_buffer(one.flat, one.matrices(None)) for one in buffers]
    if shard.size == 1:
        yield Path(rest, "sum", whole, _values(whole))
        return
    under_way = _TURNS * max((one.num_values for one in whole), default=0)
    yield Path(shard, "scatter", whole, under_way if often and waits else _values(whole))
    rows = [_buffer(one.rows[0], one.matrices(0)) for one in buffers]
    yield Path(rest, "sum", rows, _values(rows))


def gathered(shard: Group, flats: Iterable[Tensor]) -> Path:
    """Parameters that come together, in buffers [n]."""
    return Path(shard, "gather", [_buffer(flat) for flat in flats])


def _movements(held: Iterable[Held]) -> Iterator[Held]:
    """What ranks of other replicas sum with a rank that is a part of one: what it updates, whole."""
    for one in held:
        if one.updates is not None:
            yield replace(one, computes=one.updates, parts=(one.updates,), place=0, sums=())


def _buffer(x: Tensor, matrices: Sequence[Matrix] = ()) -> Buffer:
    return Buffer(x.numel(), x.dtype, matrices)


def _values(buffers: Sequence[Buffer]) -> int:
    return sum(one.num_values for one in buffers)
