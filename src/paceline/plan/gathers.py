"""What a rank takes to gather parameters of which it holds, or updates, parts. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import NamedTuple

from paceline.comm.reduction import PartBuffer
from paceline.comm.reduction.blocks import UNDER_WAY
from paceline.mesh import Group
from paceline.plan.buckets import moved_at_once, moved_together
from paceline.plan.forms import carried, gathered_by_block
from paceline.plan.hops import hop_bytes
from paceline.plan.paths import gathered
from paceline.plan.reduced import Reduced
from paceline.plan.scatters import scattered

_READ_TOGETHER = 2**24
"""Bytes of parameters that ranks of one host read at a time after an update (ZeRO 1 and 2)."""


class Gathers(NamedTuple):
    """Bytes.

    Args:
        stay: through which parameters come.
        here: of parameters, while the rank computes with them (ZeRO 3).
        beginning: of those and what they come through, before it does.
        arriving: what Gloo takes for itself after an update (ZeRO 1 and 2).
    """

    stay: int = 0
    here: int = 0
    beginning: int = 0
    arriving: int = 0


def gathers_of(of: Reduced) -> Gathers:
    """What one rank takes; parameters that lie once on a host are never gathered."""
    if of.recipe.strategy.shard == 1:
        return Gathers()
    if of.keeps:
        return Gathers(_read_in_turn(of)) if of.common else _after_update(of)
    return Gathers() if of.common else _on_use(of)


def _read_in_turn(of: Reduced) -> int:
    """In memory that ranks share, the own parts, which the others read."""
    shapes = moved_together(of.held, of.item_bytes, _READ_TOGETHER)
    by_width = sorted(shapes, key=lambda one: one.rows.shape[1])
    return sum({one.rows.dtype: one.rows[0].nbytes for one in by_width}.values())


def _after_update(of: Reduced) -> Gathers:
    shapes = moved_together(of.held, of.item_bytes, of.recipe.runtime.bucket_bytes)
    sizes = [one.flat.nbytes for one in shapes]
    together = max((sum(sizes[k : k + UNDER_WAY]) for k in range(len(sizes))), default=0)
    arriving = carried(of.recipe.strategy.shard) * together
    return Gathers(scattered(of).gathered + _along_hops(of, shapes), arriving=int(arriving))


def _on_use(of: Reduced) -> Gathers:
    blocks, rest = of.by_block
    shard = of.recipe.strategy.shard
    here, beginning = gathered_by_block(blocks, rest, shard), int((2 + carried(shard)) * rest)
    return Gathers(max(blocks, default=0) + _along_hops(of, _by_block(of)), here, beginning)


def _by_block(of: Reduced) -> Iterator[PartBuffer]:
    """What comes at a time."""
    inside = {name for block in of.blocks for name in block}
    rest = [one.computes.name for one in of.held if one.computes.name not in inside]
    for names in [*of.blocks, rest]:
        yield from moved_at_once([one for one in of.held if one.computes.name in names], of.item_bytes)


def _along_hops(of: Reduced, shapes: Iterable[PartBuffer]) -> int:
    """What a route of messages takes to bring these."""
    shard = Group("shard", tuple(range(of.recipe.strategy.shard)), 0)
    return hop_bytes(of.recipe, gathered(shard, [one.flat for one in shapes]), common=of.common)
