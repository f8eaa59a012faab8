"""One fixed binary tree of additions over virtual shards, whoever holds them.

Shard s is leaf s. A node of level k covers 2**k neighbouring shards; its value is the sum of its two halves,
and a half without a value counts as nothing. Floating-point addition is commutative, so the bits of the root
depend on the shards alone: not on how many processes or threads hold them, nor on the order in which they
come.

Exactness: bitwise for any contiguous split, up to the sign of a zero, which `+ 0.0` takes away at the end.
Source: Demmel and Nguyen 2013, Numerical Reproducibility and Accuracy at ExaScale, section 1 (a fixed
reduction tree as one of the ways).

Sums in the order of the tree: nodes of all ranks meet by messages, or in the memory of one host.

The ranks of `data` are replica x shard. Rank (i, s) adds slice i of row s, of which every replica needs all.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise

import torch
from torch import Tensor

from paceline.comm.collectives.collective_protocol import ErrorFeedbackStore
from paceline.comm.handle import Handle
from paceline.comm.net import Net
from paceline.comm.routes.shared_memory import CHUNK_VALUES, SharedMemoryCollective
from paceline.job.mesh import RankGroup


def covering_nodes(shards: range) -> list[range]:
    """The largest nodes of the tree that make up a contiguous run of shards, in order; pure."""
    found, start = [], shards.start
    while start < shards.stop:
        width = start & -start or 1 << shards.stop.bit_length()
        while start + width > shards.stop:
            width //= 2
        found.append(range(start, start + width))
        start += width
    return found


def common_ancestor_level(a: range, b: range) -> int:
    """The level of the smallest node of the tree that covers two disjoint nodes; pure."""
    return (a[0] ^ b[0]).bit_length()


class TreeAccumulator:
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
        return {node: _sum_nodes(found) for node, found in by_node.items()}

    def _node_of(self, place: range) -> int:
        return next(k for k, n in enumerate(self._nodes) if n.start <= place.start < n.stop)


def _sibling(place: range) -> range:
    """The other half of the node above."""
    start = place.start ^ len(place)
    return range(start, start + len(place))


def _sum_nodes(found: Sequence[tuple[range, Tensor]]) -> Tensor:
    """The sum over disjoint ascending nodes: first those that meet at the lowest level; in place."""
    sums = list(found)
    while len(sums) > 1:
        levels = [common_ancestor_level(a, b) for (a, _), (b, _) in pairwise(sums)]
        k = levels.index(min(levels))
        (first, value), (last, other) = sums[k], sums[k + 1]
        sums[k : k + 2] = [(range(first.start, last.stop), value.add_(other))]
    return sums[0][1]


def tree_sum(places: Sequence[range], values: Sequence[Tensor]) -> Tensor:
    """The root, from the sums of disjoint ascending nodes; the values are changed."""
    carry = TreeAccumulator([range(1 << places[-1].stop.bit_length())])
    for place, value in zip(places, values, strict=True):
        carry.push(place, value)
    return carry.close()[0]


@dataclass(frozen=True)
class TreeNodeOwners:
    """Who holds which nodes of the tree.

    Args:
        covers: by rank of `data`, the nodes that it holds.
        data: who shares the shards of a step.
        replica: those of `data` that get the same row.
    """

    covers: Sequence[Sequence[range]]
    data: RankGroup
    replica: RankGroup

    @property
    def num_nodes(self) -> int:
        """On the rank that has most."""
        return max(len(nodes) for nodes in self.covers)

    @property
    def num_rows(self) -> int:
        return self.data.size // self.replica.size

    @property
    def row(self) -> int:
        """Which one this rank gets."""
        return self.data.rank % self.num_rows

    @property
    def commutes(self) -> bool:
        """Whether there is but one addition left, which nobody can do in another order."""
        return self.data.size == self.replica.size == 2 and self.num_nodes == 1

    def add(self, parts: Sequence[Sequence[Tensor] | Tensor]) -> Tensor:
        """The root, from what each rank has, by node; the parts are changed."""
        nodes = [(n, parts[rank][k]) for rank, own in enumerate(self.covers) for k, n in enumerate(own)]
        return tree_sum([node for node, _ in nodes], [value for _, value in nodes])

    def calls(self, num_bytes: int) -> list[tuple[str, RankGroup, int]]:
        """Operation, group and payload of what one buffer, of so many bytes in all rows, costs on a wire."""
        if self.commutes:
            return [("all_reduce", self.data, num_bytes)]
        own = num_bytes // self.data.size
        return [("all_to_all", self.data, self.num_nodes * num_bytes), ("all_gather", self.replica, own)]


class _TreeSum:
    """What both ways have in common; see `Sums`."""

    def __init__(self, dealt: TreeNodeOwners) -> None:
        self._dealt = dealt
        self.row, self.multiple = dealt.row, dealt.replica.size
        self.nodes: Sequence[range] = dealt.covers[dealt.data.rank]
        self.num_buffers = dealt.num_nodes
        self.feedback: Mapping[str, ErrorFeedbackStore] = {}

    def abort(self) -> None:
        """Nothing is kept between steps."""


class TreeSumByMessages(_TreeSum):
    """Slices travel to who adds them, and sums to who needs them.

    Wire: with n bytes of gradients, P = R x S ranks of data and K nodes on the rank that has most,
        K (P-1)/P n + (R-1)/R n/S bytes; an all_reduce, 2 (P-1)/P n, where P = R = 2 and K = 1
        (`TreeNodeOwners.calls`).
    Exactness: bitwise.
    """

    def __init__(self, dealt: TreeNodeOwners, net: Net) -> None:
        super().__init__(dealt)
        self._net = net

    def zeros(self, num_values: int, like: Tensor, key: str) -> Tensor:
        """See `Sums`."""
        return like.new_zeros(num_values)

    def launch(self, rows: Sequence[Tensor], keys: Sequence[str]) -> Handle:
        """See `Sums`: one node of one replica leaves from where it lies, others are laid together first."""
        dealt = self._dealt
        if dealt.commutes:
            return self._net.all_reduce(rows[0], dealt.data).then(lambda total: Handle.ready(total.view(-1)))
        by_slice = [r.view(r.shape[0], dealt.replica.size, -1).transpose(0, 1).flatten(0, 1) for r in rows]
        parts = by_slice[0].unsqueeze(1) if len(rows) == 1 else torch.stack(by_slice, 1)
        return self._net.exchange_rows(parts, torch.empty_like(parts), dealt.data).then(self._added)

    def _added(self, arrived: Tensor) -> Handle:
        """From what every rank sent, [P, num_nodes, values]."""
        return self._net.all_gather(self._dealt.add(list(arrived)), self._dealt.replica).then(torch.cat)


class TreeSumInMemory(_TreeSum):
    """Every rank reads the slices that it adds where they lie, and writes the sums there.

    Wire: nothing; the ledger counts what messages would cost.
    Exactness: bitwise.
    """

    def __init__(self, dealt: TreeNodeOwners, memory: SharedMemoryCollective) -> None:
        super().__init__(dealt)
        self._memory = memory

    def zeros(self, num_values: int, like: Tensor, key: str) -> Tensor:
        """See `Sums`."""
        return self._memory.buffer(num_values, like, key)

    def launch(self, rows: Sequence[Tensor], keys: Sequence[str]) -> Handle:
        """See `Sums`."""
        calls = self._dealt.calls(rows[0].numel() * rows[0].element_size())
        done = self._memory.combine(keys, calls, self._add)
        return done.then(lambda _: Handle.ready(rows[0][self._dealt.row]))

    def _add(self, parts: Sequence[Sequence[Tensor]]) -> None:
        """Add this rank's slice of its row, from buffers by node and rank."""
        dealt, place = self._dealt, self._dealt.replica.rank
        shape = (dealt.num_rows, dealt.replica.size, -1)
        mine = [[part.view(shape)[dealt.row, place] for part in by_rank] for by_rank in parts]
        homes = [mine[0][replica * dealt.num_rows + dealt.row] for replica in range(dealt.replica.size)]
        num_values = homes[0].numel()
        for start in range(0, num_values, CHUNK_VALUES):
            piece = slice(start, min(start + CHUNK_VALUES, num_values))
            by_rank = [[by_node[rank][piece] for by_node in mine] for rank in range(dealt.data.size)]
            total = dealt.add(by_rank)
            for home in homes:
                home[piece].copy_(total)
