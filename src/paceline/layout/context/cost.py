"""What a rank sends for one call of attention, by closed form, and which way is cheaper. Pure.

With N ranks, a sequence of S positions of which a rank has T, B sequences, H heads of queries and G of keys,
of width D, in types of b bytes and sums of a bytes:

    ring   b B G 2D (S - T) forward; b B G 2D (S - T) + a B G 2D (S - T) backward
    heads  b B (2H + 2G) D (N-1)/N T forward, and as much backward

where S - T is what other ranks have. Where sizes differ, keys and values leave out the next rank's positions,
gradients the own.
"""

from __future__ import annotations

from dataclasses import dataclass

from paceline.layout.context.spans import Runs


@dataclass(frozen=True)
class Call:
    """The sizes of one call of attention.

    Args:
        sequences: B.
        heads, groups: of queries, and of keys and values.
        width, value_width: of a head of queries and keys, and of values.
        item_bytes: of a value in its type.
        sum_bytes: of a value in the type in which gradients are added.
    """

    sequences: int
    heads: int
    groups: int
    width: int
    value_width: int
    item_bytes: int
    sum_bytes: int


def ring_bytes(call: Call, runs: tuple[Runs, ...], rank: int) -> tuple[int, int]:
    """Bytes that a rank sends in forward and in backward, around the ring."""
    length, num_ranks = sum(one.size for one in runs), len(runs)
    row = call.sequences * call.groups * (call.width + call.value_width)
    forward = (length - runs[(rank + 1) % num_ranks].size) * row * call.item_bytes
    return forward, forward + (length - runs[rank].size) * row * call.sum_bytes


def heads_bytes(call: Call, runs: tuple[Runs, ...], rank: int) -> tuple[int, int]:
    """Bytes that a rank sends in forward and in backward, by all-to-all over heads."""
    length, num_ranks, mine = sum(one.size for one in runs), len(runs), runs[rank].size
    inputs = call.heads * call.width + call.groups * (call.width + call.value_width)
    outputs = call.heads * call.value_width
    away, home = mine * (num_ranks - 1), length - mine  # rows for others x N, and rows of others
    unit = call.sequences * call.item_bytes
    return unit * (inputs * away + outputs * home) // num_ranks, unit * (
        outputs * away + inputs * home
    ) // num_ranks


def goes_by_heads(call: Call, runs: tuple[Runs, ...]) -> bool:
    """Whether all-to-all is possible and all ranks together send less than around the ring."""
    num_ranks = len(runs)
    if call.heads % num_ranks or call.groups % num_ranks:
        return False
    ring = sum(sum(ring_bytes(call, runs, rank)) for rank in range(num_ranks))
    return sum(sum(heads_bytes(call, runs, rank)) for rank in range(num_ranks)) < ring
