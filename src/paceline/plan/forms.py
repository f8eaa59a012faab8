"""Closed forms: bytes that a rank holds from step to step, from what it computes with and updates. Pure.

Source: Rajbhandari et al. 2020, ZeRO, arXiv:1910.02054, section 5 (what each stage leaves on a rank).
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from paceline.comm.reduction import cover
from paceline.comm.reduction.tree import Carry

FP32_BYTES = 4


def partial_sums(shards: Sequence[int]) -> list[int]:
    """How many sums wait for others after each of these shards, in a tree of additions over all.

    Args:
        shards: that follow each other, in the order in which they come.
    """
    carry = Carry(cover(range(min(shards), max(shards) + 1)) if shards else [])
    found = []
    for shard in shards:
        carry.push(range(shard, shard + 1), torch.empty(0))
        found.append(carry.num_sums)
    return found


def whole_bytes(num_values: int) -> dict[str, int]:
    """Bytes of a model's state anywhere: its weights in fp16, and all that mixed-precision Adam keeps of it.

    That is 2 for the weight that is computed with, 2 for its gradient, and 4 each for the master weight and
    two moments; or 4 each for weight, gradient and two moments, as here.
    Source: Rajbhandari et al. 2020, ZeRO, arXiv:1910.02054, section 3.1.
    """
    return {"fp16 weights": 2 * num_values, "Adam": (2 + 2 + 3 * FP32_BYTES) * num_values}


def gathered_by_block(blocks: Sequence[int], rest: int, shard: int) -> int:
    """Bytes of whole parameters under ZeRO 3, where each block is gathered for its use.

    There are the parameters of a block and of the one before, and what Gloo has not let go of; rows through
    which all blocks come stay (`max(blocks)`). What lies in no block comes before.

    Args:
        blocks: bytes of each.
        rest: of what lies in no block, and is there for a whole run.
        shard: ranks that gather.
    """
    return int(rest + (2 + 2 * carried(shard)) * max(blocks, default=0))


def carried(shard: int) -> float:
    """Times the bytes of all that Gloo takes for itself: two ranks send each other rows as they lie."""
    return 0 if shard <= 2 else 1 + 1 / shard
