"""Reducers whose sums have the same bits on any number of ranks: one tree of additions over virtual shards.

A rank adds its shards up to the nodes of the tree that lie inside its block. What is left of the tree is
added by the owner of each slice, once the nodes of all ranks have arrived there; then owners tell the others.

Invariant: every gradient of every shard enters one tree (`comm.tree`), alike on any number of ranks.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial

import torch
from torch import Tensor, nn

from paceline.comm.buckets import drain, plan_buckets
from paceline.comm.exchange import Dealt, Exchange
from paceline.comm.reducer import Gradients
from paceline.comm.rows import Cuts, RowBuffer
from paceline.comm.tree import Carry
from paceline.comm.wire import Waits


class OrderedReducer:
    """A group of one, and what the others have in common: sums of this rank's shards, by node.

    Args:
        parameters: in the model's order.
        nodes: of this rank's block of shards.
    Exactness: bitwise.
    """

    by_unit = True

    def __init__(self, parameters: Sequence[nn.Parameter], nodes: Sequence[range]) -> None:
        self._carries = [Carry(nodes) for _ in parameters]
        self._place, self._is_last = range(0), False

    def begin(self) -> None:
        """Open a step."""
        for carry in self._carries:
            carry.close()

    def unit(self, shards: range, is_last: bool) -> None:
        """What is ready from now on belongs to these shards."""
        self._place, self._is_last = shards, is_last

    def ready(self, index: int, grad: Tensor | None) -> None:
        """Add the gradient to the tree; it is kept and changed."""
        self._carries[index].push(self._place, grad)

    def take(self) -> list[dict[int, Tensor]]:
        """By parameter, the sums by place of their node; those without a gradient are not there."""
        return [carry.close() for carry in self._carries]

    def finish(self) -> Gradients:
        """The sums; a tensor without a gradient is None."""
        tensors = [next(iter(sums.values()), None) for sums in self.take()]
        flats = [grad for grad in tensors if grad is not None]
        return Gradients(tensors, without_negative_zeros(flats), [])

    def commit(self) -> None:
        """Nothing is kept between steps."""

    def abort(self) -> None:
        """Drop the partial sums."""
        self.begin()

    def residuals(self) -> Sequence[tuple[str, int, Tensor]]:
        """Nothing is coded."""
        return ()

    def set_residuals(self, found: Mapping[tuple[str, int], Tensor]) -> None:
        """There are none to keep."""


class _Bucket:
    """Some parameters, with a buffer for each node of this rank."""

    def __init__(self, buffers: Sequence[RowBuffer], keys: Sequence[str]) -> None:
        self.buffers, self.keys = buffers, keys
        self.missing = set(buffers[0].cuts)
        self.handle: Waits | None = None

    def begin(self) -> None:
        self.missing, self.handle = set(self.buffers[0].cuts), None


class SpreadReducer(OrderedReducer):
    """Ordered sums over ranks, of which each gets the rows of its place in the shard group.

    Args:
        parameters: in the model's order.
        cuts: by parameter, the rows that each rank of the shard group gets.
        dealt: who holds which shards, and gets which rows.
        exchange: makes sums of what all ranks have.
        bucket_bytes: as for `BucketReducer`.
    Wire: with n bytes of gradients, P = R x S ranks of data and K nodes on the rank that has most,
        K (P-1)/P n + (R-1)/R n/S bytes; an all_reduce, 2 (P-1)/P n, where P = R = 2 and K = 1.
    """

    def __init__(
        self,
        parameters: Sequence[nn.Parameter],
        cuts: Cuts,
        dealt: Dealt,
        exchange: Exchange,
        bucket_bytes: int,
    ) -> None:
        super().__init__(parameters, dealt.covers[dealt.data.rank])
        self._parameters, self._row, self._exchange = parameters, dealt.row, exchange
        self._buckets = []
        for number, plan in enumerate(plan_buckets(parameters, bucket_bytes)):
            keys = [f"{number}.{node}" for node in range(dealt.num_nodes)]
            zeros = [partial(exchange.zeros, key=key) for key in keys]
            buffers = [RowBuffer(plan, parameters, cuts, dealt.replica.size, make) for make in zeros]
            self._buckets.append(_Bucket(buffers, keys))
        self._home = {i: bucket for bucket in self._buckets for i in bucket.missing}
        self._next = 0

    def begin(self) -> None:
        """Open a step."""
        super().begin()
        self._next = 0
        for bucket in self._buckets:
            bucket.begin()

    def ready(self, index: int, grad: Tensor | None) -> None:
        """Add the gradient to the tree; in the last unit it is complete, and a full bucket leaves."""
        super().ready(index, grad)
        if self._is_last:
            self._complete(index)
            self._launch_full()

    def _complete(self, index: int) -> None:
        """Cut the sums of this rank's nodes into their buffers."""
        bucket, sums = self._home[index], self._carries[index].close()
        for node, buffer in enumerate(bucket.buffers):
            value = sums.get(node)
            buffer.write(index, torch.zeros_like(self._parameters[index].data) if value is None else value)
        bucket.missing.discard(index)

    def _launch_full(self) -> None:
        while self._next < len(self._buckets) and not self._buckets[self._next].missing:
            bucket = self._buckets[self._next]
            rows = [buffer.rows for buffer in bucket.buffers]
            bucket.handle = self._exchange.launch(rows, bucket.keys)
            self._next += 1

    def finish(self) -> Gradients:
        """Wait for the sums of the own rows."""
        for bucket in self._buckets:
            for index in sorted(bucket.missing):
                self._complete(index)
        self._launch_full()
        arrived = []
        for bucket in self._buckets:
            handle, bucket.handle = bucket.handle, None
            arrived.append(handle.wait() if handle is not None else None)
        flats = without_negative_zeros([part.wait().view(-1) for part in arrived if part is not None])
        tensors: list[Tensor | None] = [None] * len(self._parameters)
        for bucket, flat in zip(self._buckets, flats, strict=True):
            for index, part in bucket.buffers[0].own(flat, self._row, self._parameters).items():
                tensors[index] = part
        return Gradients(tensors, flats, [])

    def abort(self) -> None:
        """Let what was launched end, well or badly; forget it."""
        drain(bucket.handle for bucket in self._buckets)
        super().abort()


def without_negative_zeros(flats: Sequence[Tensor]) -> Sequence[Tensor]:
    """-0.0 becomes 0.0, in place: whether nothing or a zero was added must not show."""
    if flats:
        torch._foreach_add_(list(flats), 0.0)
    return flats
