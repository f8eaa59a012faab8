"""Closed forms: bytes that a rank holds from step to step, from what it computes with and updates. Pure.

P: bytes of what a rank computes with, U: of what it updates, S: ranks of its shard group. They follow what is
really made: a bucket for every gradient that is summed over ranks, sums of the own parts, a row for each of
the ranks that share the state.
Source: Rajbhandari et al. 2020, ZeRO, arXiv:1910.02054, section 5 (what each stage leaves on a rank).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from paceline.comm.reduction import cover, share_in_turn
from paceline.data import split
from paceline.layout.sizes import Sizes
from paceline.recipe import Recipe

FP32_BYTES = 4
_READ_TOGETHER = 2**24
"""Bytes of parameters that ranks of one host read at a time after an update (ZeRO 1 and 2)."""
_UNDER_WAY = 3


@dataclass(frozen=True)
class Sums:
    """How a rank's gradients come to be sums, in bytes.

    Args:
        buckets: that stay from step to step.
        own: sums of the own parts, where they are no part of a bucket.
        moved: by byte of a gradient that is complete in the last backward of a step, bytes of what moves it.
        leaves: a gradient is let go of as soon as it was handed on, with every micro-batch.
        waiting: where sums have one order, how many sums of gradients wait for others after each micro-batch.
        stays: between steps, gradients that are neither buckets nor own sums.
    """

    buckets: int = 0
    own: int = 0
    moved: int = 0
    leaves: bool = False
    waiting: Sequence[int] = ()
    stays: int = 0


def sums_of(
    recipe: Recipe, sizes: Sizes, shards: int, *, frees: bool, meets: bool, common: bool, late: int = 0
) -> Sums:
    """What the reduction of a rank takes.

    Args:
        recipe: its strategy has its replicas filled in.
        shards: micro-batches of a step, over all ranks.
        frees: the rank keeps gradients of its own parts only (ZeRO 2 and 3).
        meets: gradients of shared tensors meet first.
        common: sums are made in memory that ranks share, where the gradients lie. What coding has to make
            them is not counted here.
        late: where ranks gather in backward, bytes of gradients for which more scatters are under way.
    """
    strategy = recipe.strategy
    apart = common or strategy.is_coded  # sums of own parts have no memory here
    sharers = strategy.shard * (strategy.degrees["replica"] if strategy.rule.agrees == "world" else 1)
    shared = sizes.shared if meets else 0
    is_cut = strategy.shard > 1
    if recipe.is_ordered:
        blocks = [split(shards, sharers, rank) for rank in range(sharers)]
        nodes = max(len(cover(block)) for block in blocks)
        waiting = partial_sums(max(blocks, key=lambda block: max(partial_sums(block), default=0)))
        if sharers == 1:
            return Sums(shared, waiting=waiting, stays=sizes.computes)
        own = sizes.updates if is_cut else 0
        return Sums(nodes * sizes.computes + shared, own, 1, leaves=True, waiting=[*waiting[:-1], 0])
    if sharers * strategy.context == 1:
        return Sums(buckets=shared, stays=sizes.computes)
    if frees and strategy.form.exact:
        return _scattered(recipe, sizes, shared, late, apart=apart)
    if not is_cut:
        return Sums(sizes.computes + shared)
    alone = sharers == strategy.shard  # else the own row is summed over replicas, in a buffer of its own
    apart = strategy.is_coded or (common and alone)
    return _scattered_once(recipe, sizes, shared, shards, apart=apart)


def _scattered_once(recipe: Recipe, sizes: Sizes, shared: int, shards: int, *, apart: bool) -> Sums:
    """Where whole gradients stay until a step ends; see `sums_of`."""
    strategy = recipe.strategy
    runners = strategy.shard * strategy.degrees["replica"]
    most = max(len(split(shards, runners, rank)) for rank in range(runners))
    own = 0 if apart else sizes.updates
    return Sums(sizes.computes + shared, own, 1, waiting=[1] * (most - 1) + [0])


def _scattered(recipe: Recipe, sizes: Sizes, shared: int, late: int, *, apart: bool) -> Sums:
    """Where gradients leave with every micro-batch; see `sums_of`."""
    strategy, largest = recipe.strategy, bucket_of(recipe, sizes)
    moved = late + (_UNDER_WAY - 1) * largest  # what arrives is as large, and then there is a sum of it
    arriving = 0 if apart else moved + largest // strategy.shard
    return Sums(moved + largest + 2 * shared, sizes.updates + arriving, leaves=True)


def bucket_of(recipe: Recipe, sizes: Sizes) -> int:
    """Bytes of the largest bucket that gradients leave through, or parameters come through."""
    return min(sizes.largest + share_in_turn(sizes.computes, recipe.runtime.bucket_bytes), sizes.computes)


def moved_in_turn(recipe: Recipe, sizes: Sizes, sums: Sums, *, common: bool) -> int:
    """Bytes that stay, and through which updated parameters come (ZeRO 1 and 2).

    On one host the others read a rank's parts there. Elsewhere it is two buckets, unless gradients have left
    through some.
    """
    if common:
        return (sizes.largest + share_in_turn(sizes.computes, _READ_TOGETHER)) // recipe.strategy.shard
    return 0 if sums.leaves and not recipe.is_ordered else 2 * bucket_of(recipe, sizes)


def carried_in_turn(recipe: Recipe, sizes: Sizes) -> int:
    """Bytes that Gloo takes for itself meanwhile, for two buckets."""
    return int(2 * _carried(recipe.strategy.shard) * bucket_of(recipe, sizes))


def partial_sums(shards: range) -> list[int]:
    """How many sums wait for others after each of these shards, in a tree of additions over all."""
    return [
        complete + (index + 1).bit_count()
        for complete, node in enumerate(cover(shards))
        for index in range(len(node))
    ]


def whole_bytes(num_values: int) -> dict[str, int]:
    """Bytes of a model's state anywhere: its weights in fp16, and all that mixed-precision Adam keeps of it.

    That is 2 for the weight that is computed with, 2 for its gradient, and 4 each for the master weight and
    two moments; or 4 each for weight, gradient and two moments, as here.
    Source: Rajbhandari et al. 2020, ZeRO, arXiv:1910.02054, section 3.1.
    """
    return {"fp16 weights": 2 * num_values, "Adam": (2 + 2 + 3 * FP32_BYTES) * num_values}


def gathered_by_block(blocks: Sequence[int], rest: int, shard: int) -> int:
    """Bytes of whole parameters under ZeRO 3, where each block is gathered for its use.

    There are the parameters of a block and of the one before, and rows through which all blocks come; beside
    them what Gloo has not let go of. What lies in no block comes before.

    Args:
        blocks: bytes of each.
        rest: of what lies in no block, and is there for a whole run.
        shard: ranks that gather.
    """
    carried = _carried(shard)
    each = (2 + 1 + 2 * carried) * max(blocks, default=0)
    return int(rest + max(each, (1 + carried) * rest))


def _carried(shard: int) -> float:
    """Times the bytes of all that Gloo takes for itself: two ranks send each other rows as they lie."""
    return 0 if shard <= 2 else 1 + 1 / shard
