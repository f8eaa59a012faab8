"""The native route: the collectives of the backend, NCCL or Gloo."""

from __future__ import annotations

import torch
from torch import Tensor

from paceline.comm.collectives.collective_protocol import Collective, ReceiveBuffer
from paceline.comm.handle import Handle
from paceline.comm.net import Net, collective_error, handle_of_work, start_exchange_with_others
from paceline.comm.routes.route_context import RouteContext
from paceline.job.mesh import RankGroup


def scatter_rows(net: Net, x: Tensor, arriving: Tensor, group: RankGroup) -> Handle:
    """Sum `x` [P, n] over the group in memory of the caller; the handle returns row `group.rank`, in
    `arriving`.

    Args:
        arriving: [P - 1, n], memory for the rows of the others.
    Exactness: rows are added in the order of the ranks.
    Wire: (P-1)/P of the bytes of `x`, 1 round.
    """
    entry = net.ledger.count_call("reduce_scatter", group.name, x.nbytes, group.size)
    try:
        work = start_exchange_with_others(group.handle, group.rank, x, arriving)
    except RuntimeError as error:
        raise collective_error("reduce_scatter", group, net, error, net.deadline_seconds) from error

    def total() -> Tensor:
        # The order of the ranks, whichever this rank is: every owner adds in the same order.
        rows = [*arriving[: group.rank], x[group.rank], *arriving[group.rank :]]
        torch.add(rows[0], rows[1], out=arriving[0])
        for row in rows[2:]:
            arriving[0].add_(row)
        return arriving[0]

    return handle_of_work("reduce_scatter", group, net, work, entry, total)


class NativeCollective:
    """A collective that sends values as they are, with the calls of the backend.

    Wire: all_reduce 2 (P-1)/P n bytes, reduce_scatter (P-1)/P n, all_gather (P-1) n for n bytes of a rank.
    """

    feedback = None

    def __init__(self, net: Net, group: RankGroup) -> None:
        self.net, self.group = net, group

    def buffer(self, num_values: int, like: Tensor, key: str) -> Tensor:
        return like.new_zeros(num_values)

    def all_reduce(self, x: Tensor, key: str) -> Handle:
        return self.net.all_reduce(x, self.group)

    def reduce_scatter(self, x: Tensor, key: str, arriving: ReceiveBuffer = None) -> Handle:
        # Summing in the caller's memory needs that memory, Gloo's tags, and rows that can be added one by
        # one.
        if arriving is None or x.device.type != "cpu" or not self._can_add_rows(x) or self.group.size == 1:
            return self.net.reduce_scatter(x, self.group).then(lambda row: row.view(-1))
        return scatter_rows(self.net, x, arriving(), self.group)

    def _can_add_rows(self, x: Tensor) -> bool:
        """Return whether rows can be added one by one: sums of three half-precision rows would be rounded
        twice.
        """
        halves = x.dtype in (torch.float16, torch.bfloat16)
        return not (x.is_complex() or (halves and self.group.size > 2))

    def all_gather(self, x: Tensor, key: str, out: Tensor | None = None) -> Handle:
        if out is None:
            return self.net.all_gather(x, self.group, equal=True).then(torch.stack)
        return self.net.gather_rows(x, out, self.group)

    def broadcast(self, x: Tensor, key: str, source: int = 0) -> Handle:
        return self.net.broadcast(x, self.group, source)

    def all_to_all(self, x: Tensor, key: str, out: Tensor, tag: int = 0) -> Handle:
        return self.net.exchange_rows(x, out, self.group, tag)

    def in_any_order(self, x: Tensor) -> bool:
        """Return whether exchanges have tags: messages of Gloo do, collectives of NCCL do not."""
        return x.device.type == "cpu"

    def abort(self) -> None:
        """Do nothing: no state is kept between steps."""


def build_native(group: RankGroup, context: RouteContext) -> Collective:
    """Build the collectives of the backend."""
    return context.apply_codec(NativeCollective(context.net, group))
