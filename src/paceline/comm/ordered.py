"""Reducers whose sums have the same bits on any number of ranks: one tree of additions over virtual shards.

A rank adds its shards up to the nodes of the tree that lie inside its block. What is left of the tree is
added by the owner of each slice, once the nodes of all ranks have arrived there; then owners tell the others.

Invariant: every gradient of every shard enters one tree (`comm.tree`), alike on any number of ranks.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor, nn

from paceline.comm.buckets import drain, plan_buckets
from paceline.comm.net import Net
from paceline.comm.reducer import Gradients
from paceline.comm.rows import Cuts, RowBuffer
from paceline.comm.tree import Carry, cover, tree_sum
from paceline.comm.wire import Waits
from paceline.mesh import Group


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

    def __init__(self, buffers: Sequence[RowBuffer]) -> None:
        self.buffers = buffers
        self.missing = set(buffers[0].cuts)
        self.handle: Waits | None = None

    def begin(self) -> None:
        self.missing, self.handle = set(self.buffers[0].cuts), None


class SpreadReducer(OrderedReducer):
    """Ordered sums over ranks, of which each gets the rows of its place in the shard group.

    Args:
        parameters: in the model's order.
        cuts: by parameter, the rows that each rank of the shard group gets.
        blocks: the virtual shards of each rank of `data`: contiguous, in order.
        data: who shares the shards of a step.
        replica: those of `data` that get the same rows.
        bucket_bytes: as for `BucketReducer`.
    Wire: with n bytes of gradients, P = R x S ranks of data and K nodes on the rank that has most,
        K (P-1)/P n + (R-1)/R n/S bytes; an all_reduce, 2 (P-1)/P n, where P = R = 2 and K = 1.
    """

    def __init__(
        self,
        parameters: Sequence[nn.Parameter],
        cuts: Cuts,
        blocks: Sequence[range],
        *,
        data: Group,
        replica: Group,
        net: Net,
        bucket_bytes: int,
    ) -> None:
        self._covers = [cover(block) for block in blocks]
        super().__init__(parameters, self._covers[data.rank])
        self._parameters, self._net, self._data, self._replica = parameters, net, data, replica
        self._num_nodes = max(len(nodes) for nodes in self._covers)
        self._buckets = [
            _Bucket([RowBuffer(plan, parameters, cuts, replica.size) for _ in range(self._num_nodes)])
            for plan in plan_buckets(parameters, bucket_bytes)
        ]
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
            bucket.handle = self._launch([buffer.rows for buffer in bucket.buffers])
            self._next += 1

    @property
    def _commutes(self) -> bool:
        """Whether there is but one addition left, which the backend cannot do in another order."""
        return self._data.size == self._replica.size == 2 and self._num_nodes == 1

    def _launch(self, rows: Sequence[Tensor]) -> Waits:
        if self._commutes:
            return self._net.all_reduce(rows[0], self._data)
        by_slice = [r.view(r.shape[0], self._replica.size, -1).transpose(0, 1).flatten(0, 1) for r in rows]
        parts = by_slice[0].unsqueeze(1) if len(rows) == 1 else torch.stack(by_slice, 1)
        return self._net.all_to_all(list(parts), self._data)

    def finish(self) -> Gradients:
        """Wait for the sums of the own rows."""
        for bucket in self._buckets:
            for index in sorted(bucket.missing):
                self._complete(index)
        self._launch_full()
        arrived = []
        for bucket in self._buckets:
            handle, bucket.handle = bucket.handle, None
            arrived.append(self._added(handle.wait()) if handle is not None else None)
        flats = without_negative_zeros([part.wait().view(-1) for part in arrived if part is not None])
        tensors: list[Tensor | None] = [None] * len(self._parameters)
        for bucket, flat in zip(self._buckets, flats, strict=True):
            for index, part in bucket.buffers[0].own(flat, self._row, self._parameters).items():
                tensors[index] = part
        return Gradients(tensors, flats, [])

    @property
    def _row(self) -> int:
        """This rank's place in the shard group."""
        return self._data.rank % (self._data.size // self._replica.size)

    def _added(self, arrived: Tensor | list[Tensor]) -> Waits:
        """Add the nodes of all ranks for the own slice, and exchange slices among the replicas."""
        if isinstance(arrived, Tensor):
            return _Here(arrived)
        nodes = [
            (node, part[k])
            for nodes, part in zip(self._covers, arrived, strict=True)
            for k, node in enumerate(nodes)
        ]
        own = tree_sum([node for node, _ in nodes], [value for _, value in nodes])
        return _Joined(self._net.all_gather(own, self._replica))

    def abort(self) -> None:
        """Let what was launched end, well or badly; forget it."""
        drain(bucket.handle for bucket in self._buckets)
        super().abort()


class _Here:
    def __init__(self, value: Tensor) -> None:
        self._value = value

    def wait(self) -> Tensor:
        return self._value


class _Joined:
    def __init__(self, parts: Waits) -> None:
        self._parts = parts

    def wait(self) -> Tensor:
        return torch.cat(self._parts.wait())


def without_negative_zeros(flats: Sequence[Tensor]) -> Sequence[Tensor]:
    """-0.0 becomes 0.0, in place: whether nothing or a zero was added must not show."""
    if flats:
        torch._foreach_add_(list(flats), 0.0)
    return flats
