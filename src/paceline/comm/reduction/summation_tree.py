"""Sums in one fixed order: a binary tree of additions over virtual shards, whichever rank holds them.

Shard s is leaf s. A node of level k covers 2**k neighbouring shards; its value is the sum of its two halves,
and a half without a value counts as nothing. Floating-point addition is commutative, so the bits of the root
depend only on the shards: not on how many processes or threads hold them, nor on the order in which they
arrive. Nodes of all ranks are added through messages, or in the memory of one host. The ranks of `data` are
replica x shard: rank (i, s) adds slice i of row s, of which every replica needs all.

Exactness: bitwise for any contiguous split, up to the sign of a zero, which `+ 0.0` removes at the end.
Source: Demmel and Nguyen 2013, Numerical Reproducibility and Accuracy at ExaScale, section 1 (a fixed
reduction tree as one of the ways).
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
    """Return the largest nodes of the tree that make up a contiguous run of shards, in order; pure."""
    nodes, start = [], shards.start
    while start < shards.stop:
        # The largest node that begins here: the lowest set bit of the start, or the whole tree at zero.
        width = start & -start or 1 << shards.stop.bit_length()
        while start + width > shards.stop:
            width //= 2
        nodes.append(range(start, start + width))
        start += width
    return nodes


def common_ancestor_level(a: range, b: range) -> int:
    """Return the level of the smallest node of the tree that covers two disjoint nodes; pure."""
    return (a[0] ^ b[0]).bit_length()


class TreeAccumulator:
    """A running sum of one tensor over the shards of some nodes, which may arrive in any order.

    In ascending or descending order it keeps one partial sum for each level of the tree, and one more for
    each level above a shard without a value; in other orders at most as many as there are shards. Values that
    are pushed are kept and changed.

    Args:
        nodes: disjoint nodes of the tree, ascending.
    """

    def __init__(self, nodes: Sequence[range]) -> None:
        self._nodes = nodes
        self._sums: dict[range, Tensor] = {}

    @property
    def num_sums(self) -> int:
        """Number of partial sums that it keeps now."""
        return len(self._sums)

    def push(self, shards: range, value: Tensor | None) -> None:
        """Add the sum over `shards`, a node inside one of `nodes`; None: no shard there has a value."""
        if value is None:
            return
        node = self._nodes[self._node_of(shards)]
        # Merging as soon as both halves are there keeps few partial sums.
        while len(shards) < len(node) and (other := _sibling(shards)) in self._sums:
            value = self._sums.pop(other).add_(value)
            shards = range(min(shards.start, other.start), max(shards.stop, other.stop))
        self._sums[shards] = value

    def close(self) -> dict[int, Tensor]:
        """Return the sums by index of their node, without nodes that have none, and start again."""
        by_node: dict[int, list[tuple[range, Tensor]]] = {}
        for shards in sorted(self._sums, key=lambda shards: shards.start):
            by_node.setdefault(self._node_of(shards), []).append((shards, self._sums[shards]))
        self._sums = {}
        return {node: _sum_nodes(node_sums) for node, node_sums in by_node.items()}

    def _node_of(self, shards: range) -> int:
        return next(k for k, n in enumerate(self._nodes) if n.start <= shards.start < n.stop)


def _sibling(shards: range) -> range:
    """Return the other half of the node above."""
    start = shards.start ^ len(shards)
    return range(start, start + len(shards))


def _sum_nodes(node_sums: Sequence[tuple[range, Tensor]]) -> Tensor:
    """Return the sum over disjoint ascending nodes: first those with the lowest common ancestor; in place."""
    sums = list(node_sums)
    while len(sums) > 1:
        levels = [common_ancestor_level(a, b) for (a, _), (b, _) in pairwise(sums)]
        # The lowest common ancestor first: this is the order that `push` would have used.
        k = levels.index(min(levels))
        (first, value), (last, other) = sums[k], sums[k + 1]
        sums[k : k + 2] = [(range(first.start, last.stop), value.add_(other))]
    return sums[0][1]


def tree_sum(nodes: Sequence[range], values: Sequence[Tensor]) -> Tensor:
    """Return the root, from the sums of disjoint ascending nodes; the values are changed."""
    accumulator = TreeAccumulator([range(1 << nodes[-1].stop.bit_length())])
    for node, value in zip(nodes, values, strict=True):
        accumulator.push(node, value)
    return accumulator.close()[0]


@dataclass(frozen=True)
class TreeNodeOwners:
    """The assignment of nodes of the tree to ranks.

    Args:
        covers: nodes of each rank of `data`.
        data: the ranks that share the shards of a step.
        replica: the ranks of `data` that get the same row.
    """

    covers: Sequence[Sequence[range]]
    data: RankGroup
    replica: RankGroup

    @property
    def num_nodes(self) -> int:
        """Number of nodes on the rank that has most."""
        return max(len(nodes) for nodes in self.covers)

    @property
    def num_rows(self) -> int:
        """Number of rows, one for each rank of the shard group."""
        return self.data.size // self.replica.size

    @property
    def row(self) -> int:
        """Index of the row that this rank gets."""
        return self.data.rank % self.num_rows

    @property
    def commutes(self) -> bool:
        """True if only one addition is left, which has no other order."""
        return self.data.size == self.replica.size == 2 and self.num_nodes == 1

    def add(self, values_by_rank: Sequence[Sequence[Tensor] | Tensor]) -> Tensor:
        """Return the root, from the values of each rank by node; they are changed."""
        nodes = [
            (n, values_by_rank[rank][k])
            for rank, rank_nodes in enumerate(self.covers)
            for k, n in enumerate(rank_nodes)
        ]
        return tree_sum([node for node, _ in nodes], [value for _, value in nodes])

    def calls(self, num_bytes: int) -> list[tuple[str, RankGroup, int]]:
        """Return operation, group and payload of the collectives that sum one buffer of `num_bytes` in all
        rows.
        """
        if self.commutes:
            return [("all_reduce", self.data, num_bytes)]
        slice_bytes = num_bytes // self.data.size
        return [
            ("all_to_all", self.data, self.num_nodes * num_bytes),
            ("all_gather", self.replica, slice_bytes),
        ]


class _TreeSum:
    """The part of a `BucketSum` that sums by messages and in memory have in common."""

    def __init__(self, owners: TreeNodeOwners) -> None:
        self._owners = owners
        self.row, self.multiple = owners.row, owners.replica.size
        self.nodes: Sequence[range] = owners.covers[owners.data.rank]
        self.num_buffers = owners.num_nodes
        self.feedback: Mapping[str, ErrorFeedbackStore] = {}

    def abort(self) -> None:
        """Do nothing: no state is kept between steps."""


class TreeSumByMessages(_TreeSum):
    """A bucket sum that sends slices to the ranks that add them, and the sums to the ranks that need them.

    Wire: with n bytes of gradients, P = R x S ranks of data and K nodes on the rank that has most, K (P-1)/P
        n + (R-1)/R n/S bytes; an all_reduce, 2 (P-1)/P n, where P = R = 2 and K = 1 (`TreeNodeOwners.calls`).
    Exactness: bitwise.
    """

    def __init__(self, owners: TreeNodeOwners, net: Net) -> None:
        super().__init__(owners)
        self._net = net

    def zeros(self, num_values: int, like: Tensor, key: str) -> Tensor:
        return like.new_zeros(num_values)

    def launch(self, rows: Sequence[Tensor], keys: Sequence[str]) -> Handle:
        """Exchange slices, add them, and gather the sums; a single node of one replica is sent from where
        it lies.
        """
        owners = self._owners
        # One addition of two values has one result, so the backend may do it.
        if owners.commutes:
            return self._net.all_reduce(rows[0], owners.data).then(lambda total: Handle.ready(total.view(-1)))
        # Slice i of each row goes to replica i, so the slices for one rank lie together.
        by_slice = [r.view(r.shape[0], owners.replica.size, -1).transpose(0, 1).flatten(0, 1) for r in rows]
        slices = by_slice[0].unsqueeze(1) if len(rows) == 1 else torch.stack(by_slice, 1)
        return self._net.exchange_rows(slices, torch.empty_like(slices), owners.data).then(self._added)

    def _added(self, arrived: Tensor) -> Handle:
        """Add what every rank sent, [P, num_nodes, values], and gather the sums."""
        return self._net.all_gather(self._owners.add(list(arrived)), self._owners.replica).then(torch.cat)


class TreeSumInMemory(_TreeSum):
    """A bucket sum in shared memory: every rank reads the slices that it adds where they lie, and writes the
    sums there.

    Wire: nothing; the ledger counts the bytes of messages.
    Exactness: bitwise.
    """

    def __init__(self, owners: TreeNodeOwners, memory: SharedMemoryCollective) -> None:
        super().__init__(owners)
        self._memory = memory

    def zeros(self, num_values: int, like: Tensor, key: str) -> Tensor:
        return self._memory.buffer(num_values, like, key)

    def launch(self, rows: Sequence[Tensor], keys: Sequence[str]) -> Handle:
        calls = self._owners.calls(rows[0].numel() * rows[0].element_size())
        done = self._memory.combine(keys, calls, self._add)
        return done.then(lambda _: Handle.ready(rows[0][self._owners.row]))

    def _add(self, buffers: Sequence[Sequence[Tensor]]) -> None:
        """Add this rank's slice of its row, from buffers by node and rank."""
        owners, replica_rank = self._owners, self._owners.replica.rank
        shape = (owners.num_rows, owners.replica.size, -1)
        slices = [[buffer.view(shape)[owners.row, replica_rank] for buffer in by_rank] for by_rank in buffers]
        destinations = [
            slices[0][replica * owners.num_rows + owners.row] for replica in range(owners.replica.size)
        ]
        num_values = destinations[0].numel()
        # In chunks, so that a sum is still in the cache when it is copied to the replicas.
        for start in range(0, num_values, CHUNK_VALUES):
            chunk = slice(start, min(start + CHUNK_VALUES, num_values))
            by_rank = [[by_node[rank][chunk] for by_node in slices] for rank in range(owners.data.size)]
            total = owners.add(by_rank)
            for destination in destinations:
                destination[chunk].copy_(total)
