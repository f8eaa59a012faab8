"""The ring route: every rank sends to the next one, so all links carry equally much.

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
    """A ring: 2 (P-1)/P n values and 2 (P-1) rounds for an all_reduce, on average over the ranks."""

    def all_reduce(self, messenger: RouteMessenger, x: Tensor) -> Tensor:
        chunks = [x[part_slice(x.numel(), messenger.size, index)] for index in range(messenger.size)]
        ring_reduce_scatter(messenger, chunks)
        ring_all_gather(messenger, chunks)
        return x

    def reduce_scatter(self, messenger: RouteMessenger, rows: Tensor) -> Tensor:
        ring_reduce_scatter(messenger, list(rows))
        return rows[messenger.rank]

    def all_gather(self, messenger: RouteMessenger, rows: Tensor) -> Tensor:
        ring_all_gather(messenger, list(rows))
        return rows

    def broadcast(self, messenger: RouteMessenger, x: Tensor, source: int) -> Tensor:
        """Receive from the rank before, and pass it on to the next."""
        index = (messenger.rank - source) % messenger.size
        if index:
            messenger.receive((messenger.rank - 1) % messenger.size, x)
        if index < messenger.size - 1:
            messenger.send((messenger.rank + 1) % messenger.size, x)
        return x

    def cost(self, op: str, size: int, rank: int, n: int, source: int = 0) -> MessageCost:
        """Return the closed form; an all_reduce sends every part but those of this rank and of the next
        one, twice.
        """
        after = (rank + 1) % size
        if op == "all_reduce":
            return MessageCost(
                2 * n - part_length(n, size, rank) - part_length(n, size, after), 2 * (size - 1)
            )
        if op == "broadcast":
            return MessageCost(0 if after == source else n, size - 1)
        return MessageCost((size - 1) * n, size - 1)


def ring_reduce_scatter(messenger: RouteMessenger, chunks: list[Tensor]) -> None:
    """Sum part i on rank i, in place; the other parts hold partial sums afterwards."""
    before, after = (messenger.rank - 1) % messenger.size, (messenger.rank + 1) % messenger.size
    max_values = max(chunk.numel() for chunk in chunks)
    # One buffer for the largest part is enough: each message is added before the next arrives.
    arrived = messenger.workspace.take("arrived", (max_values,), chunks[0].dtype, chunks[0].device)
    # After step k, a part holds the sum of k + 1 ranks; the last step brings this rank's own part home.
    for step in range(1, messenger.size):
        local_chunk = chunks[(messenger.rank - step - 1) % messenger.size]
        out = arrived[: local_chunk.numel()].view_as(local_chunk)
        local_chunk += messenger.exchange(
            after, chunks[(messenger.rank - step) % messenger.size], before, out
        )


def ring_all_gather(messenger: RouteMessenger, chunks: list[Tensor]) -> None:
    """Copy part i of rank i to every rank."""
    before, after = (messenger.rank - 1) % messenger.size, (messenger.rank + 1) % messenger.size
    for step in range(messenger.size - 1):
        sent_index, received_index = (
            (messenger.rank - step) % messenger.size,
            (messenger.rank - step - 1) % messenger.size,
        )
        messenger.exchange(after, chunks[sent_index], before, chunks[received_index])


def build_ring(group: RankGroup, context: RouteContext) -> Collective:
    """Build the collective that sends messages along a ring."""
    return build_message_route(group, context, "ring", RingRoute())
