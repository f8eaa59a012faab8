"""The tree route: sums go up a binomial tree, and what came out at its root goes down again.

Two times log2 P rounds, in which a rank sends the whole buffer at most log2 P times: fewer rounds than a
ring and more bytes, so it is for small buffers. Source: Thakur, Rabenseifner, Gropp 2005, Optimization of
Collective Communication Operations in MPICH, section 4.2 (binomial trees).
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from paceline.comm.handle import Handle
from paceline.comm.line import Line
from paceline.comm.net import Net
from paceline.mesh import Group


def tree_parent(rank: int) -> int:
    """Whom a rank above 0 sends its sum to: its number without the lowest bit; pure."""
    return rank & (rank - 1)


def tree_children(rank: int, size: int) -> list[int]:
    """Who sends to a rank, in the order in which they are ready; pure."""
    found, bit = [], 1
    while not rank & bit and rank + bit < size:
        found.append(rank + bit)
        bit <<= 1
    return found


class TreeCollective:
    """Values travel as they are, along a tree whose root is the group's first rank.

    Args:
        group: with a process group of its own: its messages must not mix with others.
    Wire: a rank with c children sends n bytes up (but the root) and c n down; all_gather and all_to_all carry
        the rows of all ranks that way.
    Exactness: that of rounding; sums are added in the order of the tree, equal bits on every rank and in
    every run.
    """

    feedback = None

    def __init__(self, net: Net, group: Group) -> None:
        self.net, self.group = net, group
        self._line = Line(f"{group.name}-tree", self._waited)
        self._children = tree_children(group.rank, group.size)
        self._calls = 0

    def buffer(self, num_values: int, like: Tensor, key: str) -> Tensor:
        """See `Collective`."""
        return like.new_zeros(num_values)

    def all_reduce(self, x: Tensor, key: str) -> Handle:
        """See `Collective`."""
        return self._submit("all_reduce", x, lambda tag: self._down(self._up(x, tag), tag))

    def reduce_scatter(self, x: Tensor, key: str) -> Handle:
        """See `Collective`."""
        total = x.clone()
        handle = self._submit("reduce_scatter", total, lambda tag: self._down(self._up(total, tag), tag))
        return handle.then(lambda found: found[self.group.rank].clone())

    def all_gather(self, x: Tensor, key: str) -> Handle:
        """See `Collective`; every rank's row, zeros elsewhere, added up exactly."""
        rows = torch.zeros(self.group.size, *x.shape, dtype=x.dtype, device=x.device)
        rows[self.group.rank] = x
        return self._submit("all_gather", rows, lambda tag: self._down(self._up(rows, tag), tag))

    def broadcast(self, x: Tensor, key: str, source: int = 0) -> Handle:
        """See `Collective`; to the root first, then down."""

        def hops(tag: int) -> Tensor:
            if source and self.group.rank == source:
                self.net.send(x, self.group, 0, tag).wait(exposed=False)
            if source and self.group.rank == 0:
                self.net.receive(x, self.group, source, tag).wait(exposed=False)
            return self._down(x, tag)

        return self._submit("broadcast", x, hops)

    def all_to_all(self, x: Tensor, key: str) -> Handle:
        """See `Exchanging`."""
        return self.all_gather(x, key).then(lambda rows: rows[:, self.group.rank].clone())

    def abort(self) -> None:
        """See `Collective`."""
        self._line.mend()

    def close(self) -> None:
        """End the thread; what was launched has been waited for."""
        self._line.close()

    def _submit(self, op: str, x: Tensor, hops: Callable[[int], Tensor]) -> Handle:
        if self.group.size == 1 or x.numel() == 0:
            return Handle.ready(x)
        self._calls += 1
        tag = self._calls
        return self._line.submit(op, lambda: hops(tag))

    def _up(self, x: Tensor, tag: int) -> Tensor:
        """Add the children's sums to `x`, in place, and pass it on."""
        for child in self._children:
            x += self.net.receive(torch.empty_like(x), self.group, child, tag).wait(exposed=False)
        if self.group.rank:
            self.net.send(x, self.group, tree_parent(self.group.rank), tag).wait(exposed=False)
        return x

    def _down(self, x: Tensor, tag: int) -> Tensor:
        """Take the root's values into `x`, and pass them on."""
        if self.group.rank:
            self.net.receive(x, self.group, tree_parent(self.group.rank), tag).wait(exposed=False)
        for child in reversed(self._children):
            self.net.send(x, self.group, child, tag).wait(exposed=False)
        return x

    def _waited(self, op: str, seconds: float) -> None:
        """Count seconds that a caller waited for the tree."""
        row = self.net.ledger.rows.get(("send", self.group.name))
        if row is not None:
            row.exposed_seconds += seconds
