"""Collectives that are made of messages between ranks, one after another on a thread beside training.

A `MessageRoute` is the algorithm of a collective: its sends and receives on one rank, which block and work on
contiguous tensors, and their cost. The costs are closed forms, written without looking at the sends, so that
`ByteLedger.require_expected_bytes` can compare them with the bytes that the ledger has counted.
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
    """The sends and receives of one rank in one collective.

    Args:
        tag: tag of the collective; its messages are not mixed up with those of another.
        group_ranks: the ranks that take part, as ranks of the group.
        rank: this rank's index in them.
        workspace: memory of the thread that sends and receives.
    """

    net: Net
    group: RankGroup
    tag: int
    group_ranks: Sequence[int]
    rank: int
    workspace: Workspace

    @property
    def size(self) -> int:
        """Number of ranks that take part."""
        return len(self.group_ranks)

    def among(self, ranks: Sequence[int]) -> RouteMessenger:
        """Return a messenger among some of these ranks, of which this is one."""
        return replace(
            self, group_ranks=[self.group_ranks[rank] for rank in ranks], rank=list(ranks).index(self.rank)
        )

    def send(self, to: int, x: Tensor) -> None:
        """Send, and wait until the memory may be changed; empty tensors are not sent."""
        if x.numel():
            self.net.send(x, self.group, self.group_ranks[to], self.tag).wait(exposed=False)

    def receive(self, source: int, out: Tensor) -> Tensor:
        """Wait for a message of a rank, and fill `out` with it."""
        if out.numel():
            self.net.receive(out, self.group, self.group_ranks[source], self.tag).wait(exposed=False)
        return out

    def exchange(self, to: int, x: Tensor, source: int, out: Tensor) -> Tensor:
        """Send to one rank while the message of another arrives in `out`."""
        # The receive is launched first, so that the peer can send while this rank does.
        arriving = None
        if out.numel():
            arriving = self.net.receive(out, self.group, self.group_ranks[source], self.tag)
        self.send(to, x)
        if arriving is not None:
            arriving.wait(exposed=False)
        return out


class MessageCost(NamedTuple):
    """The number of values that one rank sends in a collective, and the rounds of messages that the
    slowest rank waits for.
    """

    num_values: int
    rounds: int


class MessageRoute(Protocol):
    """The collectives of a route. `n` counts values: of `x`, of a row of `rows`, or of what is broadcast."""

    def all_reduce(self, messenger: RouteMessenger, x: Tensor) -> Tensor:
        """Sum `x` [n] in place."""

    def reduce_scatter(self, messenger: RouteMessenger, rows: Tensor) -> Tensor:
        """Sum row `messenger.rank` of `rows` [P, n] in place and return it; the other rows may be changed."""

    def all_gather(self, messenger: RouteMessenger, rows: Tensor) -> Tensor:
        """Fill in the rows of the other ranks, [P, n], in place."""

    def broadcast(self, messenger: RouteMessenger, x: Tensor, source: int) -> Tensor:
        """Copy `x` [n] of `source`, in place."""

    def cost(self, op: str, size: int, rank: int, n: int, source: int = 0) -> MessageCost:
        """Return the cost of a collective in closed form."""


def pairwise_all_to_all(messenger: RouteMessenger, rows: Tensor, out: Tensor) -> Tensor:
    """Send row i of `rows` [P, n] to rank i, and fill `out` [P, n] with what each rank sent here.

    Wire: P - 1 rounds, (P-1) n values.
    """
    out[messenger.rank] = rows[messenger.rank]
    for step in range(1, messenger.size):
        to, source = (messenger.rank + step) % messenger.size, (messenger.rank - step) % messenger.size
        messenger.exchange(to, rows[to], source, out[source])
    return out


def part_slice(n: int, size: int, index: int) -> slice:
    """Return the slice of part `index` of n values in `size` parts, which differ by one value at most."""
    return slice(n * index // size, n * (index + 1) // size)


def part_length(n: int, size: int, index: int) -> int:
    """Return the number of values of that part."""
    span = part_slice(n, size, index)
    return int(span.stop) - int(span.start)


class MessageCollective:
    """A collective that sends values as they are, along a message route.

    Args:
        group: with a process group of its own: its messages must not mix with others.
        route: the algorithm.
    Wire: `route.cost`.
    Exactness: that of rounding; the order of a sum depends on the route, with equal bits on every rank and in
        every run.
    """

    feedback = None

    def __init__(self, net: Net, group: RankGroup, route: MessageRoute) -> None:
        self.net, self.group, self._route = net, group, route
        self._thread = CommThread(
            f"{group.name}-messages", wait_counter(net.ledger, group.name, "send"), net.activity
        )
        # The number of the call is the tag of its messages: ranks call collectives in the same order.
        self._calls = itertools.count(1)
        # Only the thread uses it.
        self._workspace = Workspace()

    def with_route(self, route: MessageRoute) -> MessageCollective:
        """Return a collective with another route on the same process group and thread; closing one closes
        both.
        """
        # A shallow copy shares thread, counter and memory, so calls of both routes stay in one order.
        twin = copy(self)
        twin._route = route
        return twin

    def buffer(self, num_values: int, like: Tensor, key: str) -> Tensor:
        return like.new_zeros(num_values)

    def all_reduce(self, x: Tensor, key: str) -> Handle:
        flat = x.reshape(-1).contiguous()
        handle = self._submit(
            "all_reduce", flat, flat.numel(), lambda messenger: self._route.all_reduce(messenger, flat)
        )
        return handle.then(
            lambda total: x if total.data_ptr() == x.data_ptr() else x.copy_(total.view(x.shape))
        )

    def reduce_scatter(self, x: Tensor, key: str, arriving: ReceiveBuffer = None) -> Handle:
        """Sum rows; `x` is copied first unless the caller gives its memory away with `arriving`."""
        rank, is_copied = self.group.rank, arriving is None or not x.is_contiguous()
        rows = x.clone(memory_format=torch.contiguous_format) if is_copied else x
        if self.group.size == 1 or rows.numel() == 0:
            return Handle.ready(rows[rank])
        handle = self._submit(
            "reduce_scatter",
            rows,
            rows[0].numel(),
            lambda messenger: self._route.reduce_scatter(messenger, rows),
        )
        # A clone of the row, so that the copy of all rows can be freed.
        return handle.then(torch.clone) if is_copied else handle

    def all_gather(self, x: Tensor, key: str, out: Tensor | None = None) -> Handle:
        rows = x.new_empty(self.group.size, *x.shape) if out is None else out
        rows[self.group.rank] = x
        return self._submit(
            "all_gather", rows, x.numel(), lambda messenger: self._route.all_gather(messenger, rows)
        )

    def broadcast(self, x: Tensor, key: str, source: int = 0) -> Handle:
        flat = x.reshape(-1).contiguous()
        handle = self._submit(
            "broadcast",
            flat,
            flat.numel(),
            lambda messenger: self._route.broadcast(messenger, flat, source),
            source,
        )
        return handle.then(
            lambda copied: x if copied.data_ptr() == x.data_ptr() else x.copy_(copied.view(x.shape))
        )

    def in_any_order(self, x: Tensor) -> bool:
        """Return False: messages are matched by the number of the call."""
        return False

    def all_to_all(self, x: Tensor, key: str, out: Tensor, tag: int = 0) -> Handle:
        """Send a row to every other rank, in P - 1 rounds."""
        if self.group.size == 1 or x.numel() == 0:
            return Handle.ready(out.copy_(x))
        self._expect((self.group.size - 1) * x[0].numel() * x.element_size())
        return self._thread.submit(
            "all_to_all", self._with_messenger(lambda messenger: pairwise_all_to_all(messenger, x, out))
        )

    def abort(self) -> None:
        self._thread.clear_error()

    def close(self) -> None:
        """End the thread; everything that was launched has been waited for."""
        self._thread.close()

    def _submit(
        self, op: str, x: Tensor, n: int, run: Callable[[RouteMessenger], Tensor], source: int = 0
    ) -> Handle:
        if self.group.size == 1 or x.numel() == 0:
            return Handle.ready(x)
        sent = self._route.cost(op, self.group.size, self.group.rank, n, source)
        # The closed form is recorded at the launch, and compared with the ledger when nothing is in flight.
        self._expect(sent.num_values * x.element_size())
        return self._thread.submit(op, self._with_messenger(run))

    def _expect(self, num_bytes: int) -> None:
        self.net.ledger.expect("send", self.group.name, num_bytes)

    def _with_messenger(self, run: Callable[[RouteMessenger], Tensor]) -> Callable[[], Tensor]:
        group = self.group
        messenger = RouteMessenger(
            self.net, group, next(self._calls), range(group.size), group.rank, self._workspace
        )
        return lambda: run(messenger)


def build_message_route(
    group: RankGroup, context: RouteContext, word: str, route: MessageRoute
) -> Collective:
    """Build the collective of a message route, on a process group of its own."""
    require_cpu(context, word, "NCCL has rings and trees of its own")
    collective = MessageCollective(context.net, duplicate_group(group, word), route)
    context.close_callbacks.append(collective.close)
    return context.apply_codec(collective)
