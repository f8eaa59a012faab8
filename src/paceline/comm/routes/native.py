"""The native route: the collectives of the backend, NCCL or Gloo."""

from __future__ import annotations

import torch
from torch import Tensor

from paceline.comm.collectives.collective import Arriving
from paceline.comm.handle import Handle
from paceline.comm.net import Net
from paceline.comm.scatter_rows import scatter_rows
from paceline.mesh import Group


class NativeCollective:
    """Values travel as they are.

    Wire: all_reduce 2 (P-1)/P n bytes, reduce_scatter (P-1)/P n, all_gather (P-1) n for n bytes of a rank.
    """

    feedback = None

    def __init__(self, net: Net, group: Group) -> None:
        self.net, self.group = net, group

    def buffer(self, num_values: int, like: Tensor, key: str) -> Tensor:
        """See `Collective`."""
        return like.new_zeros(num_values)

    def all_reduce(self, x: Tensor, key: str) -> Handle:
        """See `Collective`."""
        return self.net.all_reduce(x, self.group)

    def reduce_scatter(self, x: Tensor, key: str, arriving: Arriving = None) -> Handle:
        """See `Collective`."""
        if arriving is None or x.device.type != "cpu" or not self._adds_exactly(x) or self.group.size == 1:
            return self.net.reduce_scatter(x, self.group).then(lambda row: row.view(-1))
        return scatter_rows(self.net, x, arriving(), self.group)

    def _adds_exactly(self, x: Tensor) -> bool:
        """Whether row after row can be added: sums of three halves would be rounded twice."""
        halves = x.dtype in (torch.float16, torch.bfloat16)
        return not (x.is_complex() or (halves and self.group.size > 2))

    def all_gather(self, x: Tensor, key: str, out: Tensor | None = None) -> Handle:
        """See `Collective`."""
        if out is None:
            return self.net.all_gather(x, self.group, equal=True).then(torch.stack)
        return self.net.gather_rows(x, out, self.group)

    def broadcast(self, x: Tensor, key: str, source: int = 0) -> Handle:
        """See `Collective`."""
        return self.net.broadcast(x, self.group, source)

    def all_to_all(self, x: Tensor, key: str, out: Tensor, tag: int = 0) -> Handle:
        """See `Exchanging`."""
        return self.net.exchange_rows(x, out, self.group, tag)

    def in_any_order(self, x: Tensor) -> bool:
        """See `Exchanging`: Gloo's messages have tags, collectives of NCCL have none."""
        return x.device.type == "cpu"

    def abort(self) -> None:
        """See `Collective`; nothing is kept between steps."""
