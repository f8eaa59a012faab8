"""Sums in the order of the tree: nodes of all ranks meet by messages, or in the memory of one host.

The ranks of `data` are replica x shard. Rank (i, s) adds slice i of row s, of which every replica needs all.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from paceline.comm.collectives import Feedback
from paceline.comm.handle import Handle
from paceline.comm.net import Net
from paceline.comm.reduction.tree import tree_sum
from paceline.comm.routes.shared_memory import CHUNK_VALUES, SharedMemoryCollective
from paceline.mesh import Group


@dataclass(frozen=True)
class Dealt:
    """Who holds which nodes of the tree.

    Args:
        covers: by rank of `data`, the nodes that it holds.
        data: who shares the shards of a step.
        replica: those of `data` that get the same row.
    """

    covers: Sequence[Sequence[range]]
    data: Group
    replica: Group

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

    def calls(self, num_bytes: int) -> list[tuple[str, Group, int]]:
        """Operation, group and payload of what one buffer, of so many bytes in all rows, costs on a wire."""
        if self.commutes:
            return [("all_reduce", self.data, num_bytes)]
        own = num_bytes // self.data.size
        return [("all_to_all", self.data, self.num_nodes * num_bytes), ("all_gather", self.replica, own)]


class _InTreeOrder:
    """What both ways have in common; see `Sums`."""

    def __init__(self, dealt: Dealt) -> None:
        self._dealt = dealt
        self.row, self.multiple = dealt.row, dealt.replica.size
        self.nodes: Sequence[range] = dealt.covers[dealt.data.rank]
        self.num_buffers = dealt.num_nodes
        self.feedback: Mapping[str, Feedback] = {}

    def abort(self) -> None:
        """Nothing is kept between steps."""


class ByMessages(_InTreeOrder):
    """Slices travel to who adds them, and sums to who needs them.

    Wire: with n bytes of gradients, P = R x S ranks of data and K nodes on the rank that has most,
        K (P-1)/P n + (R-1)/R n/S bytes; an all_reduce, 2 (P-1)/P n, where P = R = 2 and K = 1
        (`Dealt.calls`).
    Exactness: bitwise.
    """

    def __init__(self, dealt: Dealt, net: Net) -> None:
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


class InMemory(_InTreeOrder):
    """Every rank reads the slices that it adds where they lie, and writes the sums there.

    Wire: nothing; the ledger counts what messages would cost.
    Exactness: bitwise.
    """

    def __init__(self, dealt: Dealt, memory: SharedMemoryCollective) -> None:
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
