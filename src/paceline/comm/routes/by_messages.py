"""A collective whose route is made of messages, one after another on a thread beside training.

The ledger counts every message; beside them stands what the closed form says, and `ByteLedger.require_forms`
holds the one against the other.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from copy import copy

import torch
from torch import Tensor

from paceline.comm.collectives.collective import Arriving
from paceline.comm.handle import Handle
from paceline.comm.line import Line
from paceline.comm.net import Net
from paceline.comm.routes.hops import Hops, exchange_rows
from paceline.comm.routes.mail import Mail
from paceline.comm.workspace import Workspace
from paceline.mesh import Group


class MessageCollective:
    """Values travel as they are, along the hops of a route.

    Args:
        group: with a process group of its own: its messages must not mix with others.
        hops: the route.
    Wire: `hops.cost`.
    Exactness: that of rounding; sums are added in an order of the route, with equal bits on every rank and in
        every run.
    """

    feedback = None

    def __init__(self, net: Net, group: Group, hops: Hops) -> None:
        self.net, self.group, self._hops = net, group, hops
        self._line = Line(f"{group.name}-messages", self._waited)
        self._calls = itertools.count(1)
        self._workspace = Workspace()  # of the thread of the line

    def along(self, hops: Hops) -> MessageCollective:
        """Another route on the same process group and thread; closing one closes both."""
        twin = copy(self)
        twin._hops = hops
        return twin

    def buffer(self, num_values: int, like: Tensor, key: str) -> Tensor:
        """See `Collective`."""
        return like.new_zeros(num_values)

    def all_reduce(self, x: Tensor, key: str) -> Handle:
        """See `Collective`."""
        flat = x.reshape(-1).contiguous()
        handle = self._submit(
            "all_reduce", flat, flat.numel(), lambda mail: self._hops.all_reduce(mail, flat)
        )
        return handle.then(
            lambda total: x if total.data_ptr() == x.data_ptr() else x.copy_(total.view(x.shape))
        )

    def reduce_scatter(self, x: Tensor, key: str, arriving: Arriving = None) -> Handle:
        """See `Collective`."""
        rank, stays = self.group.rank, arriving is None or not x.is_contiguous()
        rows = x.clone(memory_format=torch.contiguous_format) if stays else x
        if self.group.size == 1 or rows.numel() == 0:
            return Handle.ready(rows[rank])
        handle = self._submit(
            "reduce_scatter", rows, rows[0].numel(), lambda mail: self._hops.reduce_scatter(mail, rows)
        )
        return handle.then(torch.clone) if stays else handle

    def all_gather(self, x: Tensor, key: str, out: Tensor | None = None) -> Handle:
        """See `Collective`."""
        rows = x.new_empty(self.group.size, *x.shape) if out is None else out
        rows[self.group.rank] = x
        return self._submit("all_gather", rows, x.numel(), lambda mail: self._hops.all_gather(mail, rows))

    def broadcast(self, x: Tensor, key: str, source: int = 0) -> Handle:
        """See `Collective`."""
        flat = x.reshape(-1).contiguous()
        handle = self._submit(
            "broadcast", flat, flat.numel(), lambda mail: self._hops.broadcast(mail, flat, source), source
        )
        return handle.then(
            lambda found: x if found.data_ptr() == x.data_ptr() else x.copy_(found.view(x.shape))
        )

    def in_any_order(self, x: Tensor) -> bool:
        """See `Exchanging`: messages are counted by calls."""
        return False

    def all_to_all(self, x: Tensor, key: str, out: Tensor, tag: int = 0) -> Handle:
        """See `Exchanging`; every rank writes to every other."""
        if self.group.size == 1 or x.numel() == 0:
            return Handle.ready(out.copy_(x))
        self._expect((self.group.size - 1) * x[0].numel() * x.element_size())
        return self._line.submit("all_to_all", self._on_mail(lambda mail: exchange_rows(mail, x, out)))

    def abort(self) -> None:
        """See `Collective`."""
        self._line.mend()

    def close(self) -> None:
        """End the thread; what was launched has been waited for."""
        self._line.close()

    def _submit(self, op: str, x: Tensor, n: int, hops: Callable[[Mail], Tensor], source: int = 0) -> Handle:
        if self.group.size == 1 or x.numel() == 0:
            return Handle.ready(x)
        sent = self._hops.cost(op, self.group.size, self.group.rank, n, source)
        self._expect(sent.num_values * x.element_size())
        return self._line.submit(op, self._on_mail(hops))

    def _expect(self, num_bytes: int) -> None:
        self.net.ledger.expect("send", self.group.name, num_bytes)

    def _on_mail(self, hops: Callable[[Mail], Tensor]) -> Callable[[], Tensor]:
        group = self.group
        mail = Mail(self.net, group, next(self._calls), range(group.size), group.rank, self._workspace)
        return lambda: hops(mail)

    def _waited(self, op: str, seconds: float) -> None:
        """Count seconds that a caller waited for the messages."""
        row = self.net.ledger.rows.get(("send", self.group.name))
        if row is not None:
            row.exposed_seconds += seconds
