"""One fixed binary tree of additions over virtual shards, whoever holds them.

Shard s is leaf s. A node of level k covers 2**k neighbouring shards; its value is the sum of its two halves,
and a half without a value counts as nothing. Floating-point addition is commutative, so the bits of the root
depend on the shards alone: not on how many processes or threads hold them, nor on the order in which they
come.

Exactness: bitwise for any contiguous split, up to the sign of a zero, which `+ 0.0` takes away at the end.
Source: Demmel and Nguyen 2013, Numerical Reproducibility and Accuracy at ExaScale, section 1 (a fixed
reduction tree as one of the ways).
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

from torch import Tensor


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


class Carry:
    """Adds up one tensor over the shards of some nodes, as they come, in any order.

    In ascending or descending order it keeps one partial sum for each level of the tree, and one more for
    each level above a shard without a value; in other orders at most as many as there are shards. Values that
    are given are kept and changed.

    Args:
        nodes: disjoint nodes of the tree, ascending.
    """

    def __init__(self, nodes: Sequence[range]) -> None:
        self._nodes = nodes
        self._sums: dict[range, Tensor] = {}

    @property
    def num_sums(self) -> int:
        """How many it keeps now."""
        return len(self._sums)

    def push(self, place: range, value: Tensor | None) -> None:
        """Take the sum over `place`, a node inside one of `nodes`; None: nothing there has a value."""
        if value is None:
            return
        node = self._nodes[self._node_of(place)]
        while len(place) < len(node) and (other := _sibling(place)) in self._sums:
            value = self._sums.pop(other).add_(value)
            place = range(min(place.start, other.start), max(place.stop, other.stop))
        self._sums[place] = value

    def close(self) -> dict[int, Tensor]:
        """The sums, by place in `nodes`; without those that nothing was added to. It is empty again."""
        by_node: dict[int, list[tuple[range, Tensor]]] = {}
        for place in sorted(self._sums, key=lambda place: place.start):
            by_node.setdefault(self._node_of(place), []).append((place, self._sums[place]))
        self._sums = {}
        return {node: _fold(found) for node, found in by_node.items()}

    def _node_of(self, place: range) -> int:
        return next(k for k, n in enumerate(self._nodes) if n.start <= place.start < n.stop)


def _sibling(place: range) -> range:
    """The other half of the node above."""
    start = place.start ^ len(place)
    return range(start, start + len(place))


def _fold(found: Sequence[tuple[range, Tensor]]) -> Tensor:
    """The sum over disjoint ascending nodes: first those that meet at the lowest level; in place."""
    sums = list(found)
    while len(sums) > 1:
        levels = [meeting_level(a, b) for (a, _), (b, _) in pairwise(sums)]
        k = levels.index(min(levels))
        (first, value), (last, other) = sums[k], sums[k + 1]
        sums[k : k + 2] = [(range(first.start, last.stop), value.add_(other))]
    return sums[0][1]


def tree_sum(places: Sequence[range], values: Sequence[Tensor]) -> Tensor:
    """The root, from the sums of disjoint ascending nodes; the values are changed."""
    carry = Carry([range(1 << places[-1].stop.bit_length())])
    for place, value in zip(places, values, strict=True):
        carry.push(place, value)
    return carry.close()[0]
