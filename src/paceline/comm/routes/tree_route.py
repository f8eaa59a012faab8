"""The tree: sums go up a binomial tree, and what came out at its root goes down again.

Two times log2 P rounds, in which a rank sends the whole buffer at most log2 P times: fewer rounds than a
ring and more bytes, so it is for small buffers. Source: Thakur, Rabenseifner, Gropp 2005, Optimization of
Collective Communication Operations in MPICH, section 4.2 (binomial trees).
"""

from __future__ import annotations

from torch import Tensor

from paceline.comm.collectives.collective_protocol import Collective
from paceline.comm.routes.message_route import MessageCost, RouteMessenger, build_message_route
from paceline.comm.routes.route_context import RouteContext
from paceline.job.mesh import RankGroup


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


class TreeRoute:
    """A rank with c children sends n values up (but the root) and c n down; rows go up and down together."""

    def all_reduce(self, mail: RouteMessenger, x: Tensor) -> Tensor:
        """See `MessageRoute`."""
        arrived = mail.workspace.like("arrived", x)
        for child in tree_children(mail.rank, mail.size):
            x += mail.receive(child, arrived)
        if mail.rank:
            mail.send(tree_parent(mail.rank), x)
        return self._down(mail, x)

    def reduce_scatter(self, mail: RouteMessenger, rows: Tensor) -> Tensor:
        """See `MessageRoute`."""
        return self.all_reduce(mail, rows)[mail.rank]

    def all_gather(self, mail: RouteMessenger, rows: Tensor) -> Tensor:
        """See `MessageRoute`: a rank sends up the rows of its subtree, and all of them down."""
        for child in tree_children(mail.rank, mail.size):
            mail.receive(child, rows[child : child + _subtree_size(child, mail.size)])
        if mail.rank:
            mail.send(
                tree_parent(mail.rank), rows[mail.rank : mail.rank + _subtree_size(mail.rank, mail.size)]
            )
        return self._down(mail, rows)

    def broadcast(self, mail: RouteMessenger, x: Tensor, source: int) -> Tensor:
        """See `MessageRoute`; to the root first, then down."""
        if source and mail.rank == source:
            mail.send(0, x)
        if source and mail.rank == 0:
            mail.receive(source, x)
        return self._down(mail, x)

    def cost(self, op: str, size: int, rank: int, n: int, source: int = 0) -> MessageCost:
        """See `MessageRoute`."""
        children, depth = len(tree_children(rank, size)), (size - 1).bit_length()
        if op == "broadcast":
            return MessageCost(n * (children + (rank == source > 0)), depth + (source > 0))
        if op == "all_gather":
            return MessageCost(n * ((_subtree_size(rank, size) if rank else 0) + children * size), 2 * depth)
        whole = n if op == "all_reduce" else n * size
        return MessageCost(whole * (children + (rank > 0)), 2 * depth)

    def _down(self, mail: RouteMessenger, x: Tensor) -> Tensor:
        """Take the root's values into `x`, and pass them on."""
        if mail.rank:
            mail.receive(tree_parent(mail.rank), x)
        for child in reversed(tree_children(mail.rank, mail.size)):
            mail.send(child, x)
        return x


def _subtree_size(rank: int, size: int) -> int:
    """How many ranks are below this one, with itself: a run that begins with it."""
    return min(rank & -rank if rank else size, size - rank)


def build_tree(group: RankGroup, context: RouteContext) -> Collective:
    """Messages up and down a tree."""
    return build_message_route(group, context, "tree", TreeRoute())
