"""How the gradients of a rank come to be sums, in bytes: what its reductions allocate. Pure.

P: bytes of what a rank computes with, U: of what it updates, S: ranks of its shard group. They follow what is
really made: buckets for all gradients that are summed over ranks, sums of the own parts, a row for each of
the ranks that share the state.
Source: Rajbhandari et al. 2020, ZeRO, arXiv:1910.02054, section 5 (what each stage leaves on a rank).
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate

from paceline.comm.reduction import cover
from paceline.comm.routes.shared_memory import CHUNK_VALUES
from paceline.data import split
from paceline.plan.buckets import Bucket, Way
from paceline.plan.forms import partial_sums
from paceline.plan.reduced import Reduced
from paceline.plan.scatters import scattered
from paceline.recipe import Strategy
from paceline.training.schedules import schedule_of


@dataclass(frozen=True)
class Sums:
    """How a rank's gradients come to be sums, in bytes.

    Args:
        buckets: that stay from step to step.
        own: sums of the own parts, where they are no part of a bucket.
        moved: by byte of a gradient that is complete in the last backward of a step, bytes of what moves it.
        leaves: a gradient is let go of as soon as it was handed on, with every micro-batch.
        at_end: gradients are handed on behind a backward, as nobody waits for them meanwhile.
        waiting: where sums have one order, how many sums of gradients wait for others after each micro-batch.
        stays: between steps, gradients that are neither buckets nor own sums.
        under_way: while micro-batches run, what scatters take that may be under way: for the first and for
            later ones, bytes by those of the gradients that are complete, ascending.
        lanes: of threads of the process, each as `waiting`; their sums meet once all have ended.
        meeting: what messages take then.
        learns: the first backward of a run lets go of gradients at its end.
        learning: what scatters take then.
    """

    buckets: int = 0
    own: int = 0
    moved: int = 0
    leaves: bool = False
    at_end: bool = False
    waiting: Sequence[int] = ()
    stays: int = 0
    under_way: Sequence[Sequence[tuple[int, int]]] = ()
    lanes: Sequence[Sequence[int]] = ()
    meeting: int = 0
    learns: bool = False
    learning: int = 0

    def on_the_way(self, micro_batch: int, done: int) -> int:
        """What scatters take in the backward of a micro-batch, with so many bytes of gradients complete."""
        if not self.under_way:
            return 0
        by_done = self.under_way[min(micro_batch, len(self.under_way) - 1)]
        return next((found for least, found in reversed(by_done) if least <= done), 0)


def sums_of(of: Reduced) -> Sums:
    """What the reduction of a rank takes."""
    strategy, sizes = of.recipe.strategy, of.sizes
    if of.recipe.is_ordered:
        return _in_order(of)
    if not of.is_summed:
        return Sums(sizes.shared, stays=sizes.computes)
    if of.leaves_often:
        return _scattered(of)
    buckets = _whole(of.buckets) + sizes.shared
    if strategy.shard == 1:
        return Sums(buckets)
    alone = of.sharers == strategy.shard  # else the own row is summed over replicas, in a buffer of its own
    at_once = not (of.common or strategy.is_coded or of.laid_apart)
    own = _rows(of.buckets) if at_once or (of.common and not alone and not strategy.is_coded) else 0
    before, waiting = [[(0, 0)]] * (of.most_micro_batches - 1), [1] * (of.most_micro_batches - 1) + [0]
    found = scattered(of)
    return Sums(
        buckets + found.stay + _slices(of),
        own,
        moved=int(at_once),
        waiting=waiting,
        under_way=[*before, *found.under_way],
    )


def _in_order(of: Reduced) -> Sums:
    """Where sums have one order; see `sums_of`."""
    strategy, sizes, sharers = of.recipe.strategy, of.sizes, of.sharers
    blocks = [split(of.shards, of.runners, rank) for rank in range(of.runners)]
    if strategy.lanes > 1:
        return _in_lanes(of, blocks)
    found = [partial_sums(shards) for block in blocks for shards in _by_stage(strategy, block)]
    waiting = max(found, key=lambda one: (max(one), sum(one)))
    if sharers == 1:
        at_end = not strategy.servers  # beside whom a worker hands on what it has
        return Sums(sizes.shared, at_end=at_end, waiting=waiting, stays=sizes.computes)
    nodes = max(len(cover(block)) for block in blocks)
    buckets = nodes * _whole(of.buckets) + sizes.shared
    moved, own = _on_a_wire(of, nodes)
    apart = strategy.shard > 1  # else a gradient has its sum, and lets go of it before the next backward
    sums = Sums(buckets, moved=moved, leaves=True, waiting=[*waiting[:-1], 0])
    return replace(sums, own=own) if apart else replace(sums, stays=own)


def _in_lanes(of: Reduced, blocks: Sequence[range]) -> Sums:
    """Where threads of a process sum its micro-batches, or those of its stages; see `sums_of`."""
    strategy, sizes, buckets = of.recipe.strategy, of.sizes, [one.whole for one in of.buckets]
    lanes = max((_waiting(strategy, block) for block in blocks), key=lambda found: sum(map(max, found)))
    if of.sharers == 1:
        return Sums(sizes.shared, stays=sizes.computes, lanes=lanes)
    nodes = max(len(cover(block)) for block in blocks)
    moved, own = _on_a_wire(of, nodes)
    twice = nodes > 1 and 1 < strategy.shard < of.sharers
    copies = nodes if moved and twice else 0  # until it has left
    launched = zip(accumulate(buckets), buckets, strict=True)
    meeting = max((moved * so_far + copies * whole for so_far, whole in launched), default=0)
    return Sums(nodes * sum(buckets) + sizes.shared, own, lanes=lanes, meeting=meeting)


def _on_a_wire(of: Reduced, nodes: int) -> tuple[int, int]:
    """Of sums in one order: how often a gradient is under way, as sent and as it comes; bytes of the sums.

    In memory that ranks share, and where one addition is left, buckets become the sums. One node of one
    replica is sent from where it lies.
    """
    shard = of.recipe.strategy.shard
    if of.common or (of.sharers == 2 and shard == 1 == nodes):
        return 0, 0
    as_it_lies = nodes == 1 and not 1 < shard < of.sharers
    return nodes * (2 - as_it_lies), _rows(of.buckets)


def _waiting(strategy: Strategy, block: range) -> list[list[int]]:
    """By lane, how many sums wait after each of its backwards."""
    if strategy.pipeline > 1:
        return [partial_sums(shards) for shards in _by_stage(strategy, block)]
    parts = (split(len(block), strategy.lanes, lane) for lane in range(strategy.lanes))
    return [partial_sums(block[part.start : part.stop]) for part in parts]


def _by_stage(strategy: Strategy, block: range) -> list[list[int]]:
    """Shards in the order in which backwards of the first chunk of each stage end; of one: as they are."""
    if strategy.pipeline == 1:
        return [[*block]]
    rows = schedule_of(strategy)(strategy.pipeline, len(block)).orders
    halves = {action.place for row in rows for action in row if action.kind == "W"}
    return [[block[a.micro_batch] for a in row if a.chunk == 0 and a.ends(halves)] for row in rows]


def _scattered(of: Reduced) -> Sums:
    """Where gradients leave with every micro-batch; see `sums_of`."""
    met = _whole(one for one in of.buckets if one.way.meets)
    found = scattered(of)
    buckets = found.stay + met + of.sizes.shared + _slices(of)
    return Sums(buckets, _rows(of.buckets), leaves=True, under_way=found.under_way, learning=found.learning)


def _slices(of: Reduced) -> int:
    """What a rank adds up at a time in memory that ranks share: one for each path of scatters, and type."""
    if not of.in_memory:
        return 0
    paths = {(_path(of, one.way), one.way.item_bytes) for one in of.buckets}
    return sum(CHUNK_VALUES * item_bytes for _, item_bytes in paths)


def _path(of: Reduced, way: Way) -> object:
    """What leaves with every micro-batch has its own, by reduction."""
    inside = {"shard", "pipeline", "tensor"}
    return way.number if of.leaves_often and not way.meets else frozenset(way.axes) - inside


def _whole(buckets: Iterable[Bucket]) -> int:
    return sum(one.whole for one in buckets)


def _rows(buckets: Iterable[Bucket]) -> int:
    return sum(one.row for one in buckets)
