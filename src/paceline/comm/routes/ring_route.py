"""The ring: every rank sends to the next one, so that all links carry equally much.

Source: Patarasuk and Yuan 2009, Bandwidth Optimal All-reduce Algorithms for Clusters of Workstations, J.
Parallel Distrib. Comput. 69, section 3.
"""

from __future__ import annotations

from torch import Tensor

from paceline.comm.collectives.collective_protocol import Collective
from paceline.comm.routes.message_route import (
    MessageCost,
    RouteMessenger,
    build_message_route,
    part_length,
    part_slice,
)
from paceline.comm.routes.route_context import RouteContext
from paceline.job.mesh import RankGroup


class RingRoute:
    """2 (P-1)/P n values and 2 (P-1) rounds for an all_reduce, on average over the ranks."""

    def all_reduce(self, mail: RouteMessenger, x: Tensor) -> Tensor:
        """See `MessageRoute`."""
        parts = [x[part_slice(x.numel(), mail.size, place)] for place in range(mail.size)]
        ring_reduce_scatter(mail, parts)
        ring_all_gather(mail, parts)
        return x

    def reduce_scatter(self, mail: RouteMessenger, rows: Tensor) -> Tensor:
        """See `MessageRoute`."""
        ring_reduce_scatter(mail, list(rows))
        return rows[mail.rank]

    def all_gather(self, mail: RouteMessenger, rows: Tensor) -> Tensor:
        """See `MessageRoute`."""
        ring_all_gather(mail, list(rows))
        return rows

    def broadcast(self, mail: RouteMessenger, x: Tensor, source: int) -> Tensor:
        """See `MessageRoute`: every rank passes it on."""
        place = (mail.rank - source) % mail.size
        if place:
            mail.receive((mail.rank - 1) % mail.size, x)
        if place < mail.size - 1:
            mail.send((mail.rank + 1) % mail.size, x)
        return x

    def cost(self, op: str, size: int, rank: int, n: int, source: int = 0) -> MessageCost:
        """See `MessageRoute`."""
        after = (rank + 1) % size
        if op == "all_reduce":
            return MessageCost(
                2 * n - part_length(n, size, rank) - part_length(n, size, after), 2 * (size - 1)
            )
        if op == "broadcast":
            return MessageCost(0 if after == source else n, size - 1)
        return MessageCost((size - 1) * n, size - 1)


def ring_reduce_scatter(mail: RouteMessenger, parts: list[Tensor]) -> None:
    """Part i of rank i becomes the sum over all ranks; the others' contents are sums of some."""
    before, after = (mail.rank - 1) % mail.size, (mail.rank + 1) % mail.size
    most = max(part.numel() for part in parts)
    arrived = mail.workspace.take("arrived", (most,), parts[0].dtype, parts[0].device)
    for step in range(1, mail.size):
        mine = parts[(mail.rank - step - 1) % mail.size]
        out = arrived[: mine.numel()].view_as(mine)
        mine += mail.exchange(after, parts[(mail.rank - step) % mail.size], before, out)


def ring_all_gather(mail: RouteMessenger, parts: list[Tensor]) -> None:
    """Every rank gets part i from rank i."""
    before, after = (mail.rank - 1) % mail.size, (mail.rank + 1) % mail.size
    for step in range(mail.size - 1):
        mine, others = (mail.rank - step) % mail.size, (mail.rank - step - 1) % mail.size
        mail.exchange(after, parts[mine], before, parts[others])


def build_ring(group: RankGroup, context: RouteContext) -> Collective:
    """Messages round a ring."""
    return build_message_route(group, context, "ring", RingRoute())
