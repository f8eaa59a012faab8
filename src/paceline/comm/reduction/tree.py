"""One fixed binary tree of additions over virtual shards, whoever holds them.

Shard s is leaf s. A node of level k covers 2**k neighbouring shards; its value is the sum of its two halves,
and a half without a value counts as nothing. Floating-point addition is commutative, so the bits of the root
depend on the shards alone: not on how many processes or threads hold them, nor on the order in which they
come, as long as neighbours are added before others.

Exactness: bitwise for any contiguous split, up to the sign of a zero, which `+ 0.0` takes away at the end.
Source: Demmel and Nguyen 2013, Numerical Reproducibility and Accuracy at ExaScale, section 1 (a fixed
reduction tree as one of the ways).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor

_NEVER = 2**62


def cover(shards: range) -> list[range]:
    """The largest nodes of the tree that make up a contiguous run of shards, in order; pure."""
    found, start = [], shards.start
    while start < shards.stop:
        width = start & -start or 1 << shards.stop.bit_length()
        while start + width > shards.stop:
            width //= 2
        found.append(range(start, start + width))
        start += width
    return found


def meeting_level(a: range, b: range) -> int:
    """The level of the smallest node of the tree that covers two disjoint nodes; pure."""
    return (a[0] ^ b[0]).bit_length()


@dataclass
class _Entry:
    node: int
    place: range
    value: Tensor
    level: int  # at which it meets the entry below it; never, if that belongs to another node


class Carry:
    """Adds up one tensor over the shards of some nodes, as they come, in ascending or descending order.

    It keeps at most one partial sum for each level of the tree. Values that are given are kept and changed.

    Args:
        nodes: disjoint nodes of the tree, ascending.
    """

    def __init__(self, nodes: Sequence[range]) -> None:
        self._nodes = nodes
        self._stack: list[_Entry] = []

    def push(self, place: range, value: Tensor | None) -> None:
        """Take the sum over `place`, a node inside one of `nodes`; None: nothing there has a value."""
        if value is None:
            return
        node = next(k for k, n in enumerate(self._nodes) if n.start <= place.start < n.stop)
        level = _NEVER
        if self._stack and self._stack[-1].node == node:
            level = meeting_level(self._stack[-1].place, place)
        self._fold(level)
        self._stack.append(_Entry(node, place, value, level))

    def close(self) -> dict[int, Tensor]:
        """The sums, by place in `nodes`; without those that nothing was added to. It is empty again."""
        self._fold(_NEVER)
        found = {entry.node: entry.value for entry in self._stack}
        self._stack = []
        return found

    def _fold(self, level: int) -> None:
        """Add up what meets below a level: nothing more can come between."""
        while self._stack and self._stack[-1].level < level:
            top, below = self._stack.pop(), self._stack[-1]
            below.value.add_(top.value)
            first, last = min(below.place.start, top.place.start), max(below.place.stop, top.place.stop)
            below.place = range(first, last)


def tree_sum(places: Sequence[range], values: Sequence[Tensor]) -> Tensor:
    """The root, from the sums of disjoint ascending nodes; the values are changed."""
    carry = Carry([range(1 << places[-1].stop.bit_length())])
    for place, value in zip(places, values, strict=True):
        carry.push(place, value)
    return carry.close()[0]
