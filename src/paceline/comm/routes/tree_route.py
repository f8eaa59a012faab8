"""The tree route: sums go up a binomial tree, and the result goes down again.

Two times log2 P rounds, in which a rank sends the whole buffer at most log2 P times: fewer rounds than a ring
and more bytes, so it is for small buffers. Source: Thakur, Rabenseifner, Gropp 2005, Optimization of
Collective Communication Operations in MPICH, section 4.2 (binomial trees).
"""

from __future__ import annotations

from torch import Tensor

from paceline.comm.collectives.collective_protocol import Collective
from paceline.comm.routes.message_route import MessageCost, RouteMessenger, build_message_route
from paceline.comm.routes.route_context import RouteContext
from paceline.job.mesh import RankGroup


def tree_parent(rank: int) -> int:
    """Return the rank to which a rank above 0 sends its sum: its number without the lowest bit; pure."""
    return rank & (rank - 1)


def tree_children(rank: int, size: int) -> list[int]:
    """Return the ranks that send to a rank, in the order in which they are ready; pure."""
    children, bit = [], 1
    while not rank & bit and rank + bit < size:
        children.append(rank + bit)
        bit <<= 1
    return children


class TreeRoute:
    """A binomial tree: a rank with c children sends n values up (except the root) and c n down; rows go up
    and down together.
    """

    def all_reduce(self, messenger: RouteMessenger, x: Tensor) -> Tensor:
        arrived = messenger.workspace.like("arrived", x)
        for child in tree_children(messenger.rank, messenger.size):
            x += messenger.receive(child, arrived)
        if messenger.rank:
            messenger.send(tree_parent(messenger.rank), x)
        return self._down(messenger, x)

    def reduce_scatter(self, messenger: RouteMessenger, rows: Tensor) -> Tensor:
        return self.all_reduce(messenger, rows)[messenger.rank]

    def all_gather(self, messenger: RouteMessenger, rows: Tensor) -> Tensor:
        """Send the rows of the subtree up, and all rows down."""
        for child in tree_children(messenger.rank, messenger.size):
            messenger.receive(child, rows[child : child + _subtree_size(child, messenger.size)])
        if messenger.rank:
            messenger.send(
                tree_parent(messenger.rank),
                rows[messenger.rank : messenger.rank + _subtree_size(messenger.rank, messenger.size)],
            )
        return self._down(messenger, rows)

    def broadcast(self, messenger: RouteMessenger, x: Tensor, source: int) -> Tensor:
        """Send to the root first, then down."""
        # One more hop, so that every broadcast uses the tree of rank 0.
        if source and messenger.rank == source:
            messenger.send(0, x)
        if source and messenger.rank == 0:
            messenger.receive(source, x)
        return self._down(messenger, x)

    def cost(self, op: str, size: int, rank: int, n: int, source: int = 0) -> MessageCost:
        """Return the closed form: a rank sends to its parent once, and to each child once."""
        children, depth = len(tree_children(rank, size)), (size - 1).bit_length()
        if op == "broadcast":
            return MessageCost(n * (children + (rank == source > 0)), depth + (source > 0))
        if op == "all_gather":
            return MessageCost(n * ((_subtree_size(rank, size) if rank else 0) + children * size), 2 * depth)
        num_values = n if op == "all_reduce" else n * size
        return MessageCost(num_values * (children + (rank > 0)), 2 * depth)

    def _down(self, messenger: RouteMessenger, x: Tensor) -> Tensor:
        """Receive the root's values in `x`, and pass them on."""
        if messenger.rank:
            messenger.receive(tree_parent(messenger.rank), x)
        # The largest subtree first: it has the longest way to go.
        for child in reversed(tree_children(messenger.rank, messenger.size)):
            messenger.send(child, x)
        return x


def _subtree_size(rank: int, size: int) -> int:
    """Return the number of ranks of a subtree, with its root: a run of ranks that begins with the root."""
    return min(rank & -rank if rank else size, size - rank)


def build_tree(group: RankGroup, context: RouteContext) -> Collective:
    """Build the collective that sends messages up and down a tree."""
    return build_message_route(group, context, "tree", TreeRoute())
