"""Messages of one collective between ranks of a group, or of a part of it.

What a route that sends messages is: the hops of each collective on one rank, and what they cost.

The hops block, and work on contiguous tensors. The costs are closed forms, written without the hops, so that
what the ledger counts can be held against them.

A collective whose route is made of messages, one after another on a thread beside training.

The ledger counts every message; beside them stands what the closed form says, and `ByteLedger.require_forms`
holds the one against the other.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from copy import copy
from dataclasses import dataclass, replace
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from paceline.comm.collectives.collective_protocol import Collective, ReceiveBuffer, wait_counter
from paceline.comm.comm_thread import CommThread
from paceline.comm.handle import Handle
from paceline.comm.net import Net
from paceline.comm.routes.route_context import RouteContext, require_cpu
from paceline.comm.workspace import Workspace
from paceline.job.mesh import RankGroup, duplicate_group


@dataclass(frozen=True)
class RouteMessenger:
    """What a rank sends and receives by.

    Args:
        tag: of the collective; its messages do not meet those of another.
        places: of the ranks that take part, in the group.
        rank: this rank's place among these.
        workspace: of the thread that sends and receives.
    """

    net: Net
    group: RankGroup
    tag: int
    places: Sequence[int]
    rank: int
    workspace: Workspace

    @property
    def size(self) -> int:
        """How many take part."""
        return len(self.places)

    def among(self, ranks: Sequence[int]) -> RouteMessenger:
        """The same among some of these ranks, of which this is one."""
        return replace(self, places=[self.places[rank] for rank in ranks], rank=list(ranks).index(self.rank))

    def send(self, to: int, x: Tensor) -> None:
        """Send; what is empty is not sent."""
        if x.numel():
            self.net.send(x, self.group, self.places[to], self.tag).wait(exposed=False)

    def receive(self, source: int, out: Tensor) -> Tensor:
        """Wait for what a rank sends, and fill `out` with it."""
        if out.numel():
            self.net.receive(out, self.group, self.places[source], self.tag).wait(exposed=False)
        return out

    def exchange(self, to: int, x: Tensor, source: int, out: Tensor) -> Tensor:
        """Send to one rank while another's message arrives."""
        arriving = None
        if out.numel():
            arriving = self.net.receive(out, self.group, self.places[source], self.tag)
        self.send(to, x)
        if arriving is not None:
            arriving.wait(exposed=False)
        return out


class MessageCost(NamedTuple):
    """What one rank sends in a collective, in values, and how many rounds of messages the slowest rank
    waits for.
    """

    num_values: int
    rounds: int


class MessageRoute(Protocol):
    """The collectives of a route. `n` counts values: of `x`, of a row of `rows`, of what is broadcast."""

    def all_reduce(self, mail: RouteMessenger, x: Tensor) -> Tensor:
        """Sum `x` [n] in place."""

    def reduce_scatter(self, mail: RouteMessenger, rows: Tensor) -> Tensor:
        """The sum of row `mail.rank` of `rows` [P, n], in its place; the others may be changed."""

    def all_gather(self, mail: RouteMessenger, rows: Tensor) -> Tensor:
        """Fill in the rows of the other ranks, [P, n], in place."""

    def broadcast(self, mail: RouteMessenger, x: Tensor, source: int) -> Tensor:
        """Copy `x` [n] of `source`, in place."""

    def cost(self, op: str, size: int, rank: int, n: int, source: int = 0) -> MessageCost:
        """The closed form of a collective by its name."""


def pairwise_all_to_all(mail: RouteMessenger, rows: Tensor, out: Tensor) -> Tensor:
    """Send row i of `rows` [P, n] to rank i; what each rank sent here, in `out` [P, n]. P - 1 rounds, (P-1) n
    values.
    """
    out[mail.rank] = rows[mail.rank]
    for step in range(1, mail.size):
        to, source = (mail.rank + step) % mail.size, (mail.rank - step) % mail.size
        mail.exchange(to, rows[to], source, out[source])
    return out


def part_slice(n: int, size: int, place: int) -> slice:
    """Which of n values are part `place` of `size`; parts differ by one value at most."""
    return slice(n * place // size, n * (place + 1) // size)


def part_length(n: int, size: int, place: int) -> int:
    """How many that are."""
    part = part_slice(n, size, place)
    return int(part.stop) - int(part.start)


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

    def __init__(self, net: Net, group: RankGroup, hops: MessageRoute) -> None:
        self.net, self.group, self._hops = net, group, hops
        self._line = CommThread(f"{group.name}-messages", wait_counter(net.ledger, group.name, "send"))
        self._calls = itertools.count(1)
        self._workspace = Workspace()  # of the thread of the line

    def with_route(self, hops: MessageRoute) -> MessageCollective:
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

    def reduce_scatter(self, x: Tensor, key: str, arriving: ReceiveBuffer = None) -> Handle:
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
        """See `AllToAllCollective`: messages are counted by calls."""
        return False

    def all_to_all(self, x: Tensor, key: str, out: Tensor, tag: int = 0) -> Handle:
        """See `AllToAllCollective`; every rank writes to every other."""
        if self.group.size == 1 or x.numel() == 0:
            return Handle.ready(out.copy_(x))
        self._expect((self.group.size - 1) * x[0].numel() * x.element_size())
        return self._line.submit(
            "all_to_all", self._with_messenger(lambda mail: pairwise_all_to_all(mail, x, out))
        )

    def abort(self) -> None:
        """See `Collective`."""
        self._line.clear_error()

    def close(self) -> None:
        """End the thread; what was launched has been waited for."""
        self._line.close()

    def _submit(
        self, op: str, x: Tensor, n: int, hops: Callable[[RouteMessenger], Tensor], source: int = 0
    ) -> Handle:
        if self.group.size == 1 or x.numel() == 0:
            return Handle.ready(x)
        sent = self._hops.cost(op, self.group.size, self.group.rank, n, source)
        self._expect(sent.num_values * x.element_size())
        return self._line.submit(op, self._with_messenger(hops))

    def _expect(self, num_bytes: int) -> None:
        self.net.ledger.expect("send", self.group.name, num_bytes)

    def _with_messenger(self, hops: Callable[[RouteMessenger], Tensor]) -> Callable[[], Tensor]:
        group = self.group
        mail = RouteMessenger(
            self.net, group, next(self._calls), range(group.size), group.rank, self._workspace
        )
        return lambda: hops(mail)


def build_message_route(
    group: RankGroup, context: RouteContext, word: str, route: MessageRoute
) -> Collective:
    require_cpu(context, word, "NCCL has rings and trees of its own")
    found = MessageCollective(context.net, duplicate_group(group, word), route)
    context.close_callbacks.append(found.close)
    return context.apply_codec(found)
