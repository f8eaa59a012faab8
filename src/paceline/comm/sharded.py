"""The reducer of sharded optimizer state: each rank of the shard group gets the sums of its own rows.

A bucket has one row of the buffer for every shard rank; in it lie that rank's rows of every parameter. A
bucket is scattered as soon as it is full; the own row is then summed over the replicas.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor, nn

from paceline.comm.buckets import drain, plan_buckets
from paceline.comm.net import Net
from paceline.comm.reducer import Gradients, Reducer, TakesSums, WrappedReducer
from paceline.comm.rows import Cuts, RowBuffer, rows_of
from paceline.comm.wire import Residual, Waits, Wire
from paceline.errors import CommunicationError
from paceline.mesh import Group


class _Bucket:
    def __init__(self, buffer: RowBuffer) -> None:
        self.buffer = buffer
        self.missing = set(buffer.cuts)
        self.handle: Waits | None = None

    def begin(self) -> None:
        self.missing, self.handle = set(self.buffer.cuts), None


class ShardedReducer(TakesSums):
    """Reduce-scatter in buckets over the shard group, then all_reduce of the own row over the replicas.

    Args:
        parameters: all trained ones, in the model's order.
        cuts: who owns which rows.
        shard: sums over the shard group.
        replica: sums over the replicas.
        bucket_bytes: as for `BucketReducer`.
    Wire: (S-1)/S n + 2 (R-1)/R n/S bytes for n bytes of gradients, S shard ranks and R replicas.
    Source: Rajbhandari et al. 2020, ZeRO, arXiv:1910.02054, sections 5.1 and 7.1.
    """

    def __init__(
        self, parameters: Sequence[nn.Parameter], cuts: Cuts, shard: Wire, replica: Wire, bucket_bytes: int
    ) -> None:
        self._parameters, self._shard, self._replica = parameters, shard, replica
        self._buckets = [
            _Bucket(RowBuffer(indices, parameters, cuts))
            for indices in plan_buckets(parameters, bucket_bytes)
        ]
        self._home = {i: bucket for bucket in self._buckets for i in bucket.buffer.cuts}
        self._next = 0

    def begin(self) -> None:
        """Open a step."""
        self._next = 0
        for bucket in self._buckets:
            bucket.begin()

    def ready(self, index: int, grad: Tensor | None) -> None:
        """Cut the gradient into its bucket; launch every full bucket whose turn it is."""
        bucket = self._home[index]
        bucket.buffer.write(index, torch.zeros_like(self._parameters[index]) if grad is None else grad)
        bucket.missing.discard(index)
        while self._next < len(self._buckets) and not self._buckets[self._next].missing:
            bucket = self._buckets[self._next]
            bucket.handle = self._shard.reduce_scatter(bucket.buffer.rows, str(self._next))
            self._next += 1

    def finish(self) -> Gradients:
        """Wait for the own rows; the sum of one over the replicas goes on while the next arrives."""
        if self._next < len(self._buckets):
            missing = sorted(self._buckets[self._next].missing)
            raise CommunicationError(
                f"parameters {missing} were never called ready",
                next_step="the layout announces every parameter once a step, None without a gradient",
            )
        rows = []
        for k, bucket in enumerate(self._buckets):
            handle, bucket.handle = bucket.handle, None
            if handle is not None:
                rows.append(self._replica.all_reduce(handle.wait(), str(k)))
        flats = [row.wait() for row in rows]
        tensors: list[Tensor | None] = [None] * len(self._parameters)
        for bucket, flat in zip(self._buckets, flats, strict=True):
            for index, part in bucket.buffer.own(flat, self._shard.group.rank, self._parameters).items():
                tensors[index] = part
        return Gradients(tensors, flats, torch._foreach_norm(flats))

    def commit(self) -> None:
        """Keep what coding has lost."""
        self._shard.commit()
        self._replica.commit()

    def abort(self) -> None:
        """Let what was launched end, well or badly; forget it."""
        drain(bucket.handle for bucket in self._buckets)
        self._shard.abort()
        self._replica.abort()

    def residuals(self) -> Sequence[tuple[str, int, Tensor]]:
        """Sides `sent` (scattered) and `replica-sent`, `replica-owned` (of the own row)."""
        found = []
        for key, residual in self._shard.residuals().items():
            found += self._cut(key, "sent", residual.sent)
        for key, residual in self._replica.residuals().items():
            buffer = self._buckets[int(key)].buffer
            for side, flat in residual.flats(self._replica.group.rank, buffer.rows.shape[1]):
                rows = torch.zeros_like(buffer.rows)
                rows[self._shard.group.rank] = flat
                found += self._cut(key, f"replica-{side}", rows)
        return found

    def _cut(self, key: str, side: str, rows: Tensor) -> list[tuple[str, int, Tensor]]:
        buffer = self._buckets[int(key)].buffer
        buffer.rows.copy_(rows)
        return [(side, i, buffer.read(i, torch.zeros_like(self._parameters[i].data))) for i in buffer.cuts]

    def set_residuals(self, found: Mapping[tuple[str, int], Tensor]) -> None:
        """The inverse of `residuals`."""
        sides = {side for side, _ in found}
        shard: dict[str, Residual] = {}
        replica: dict[str, Residual] = {}
        for k, bucket in enumerate(self._buckets):
            if "sent" in sides:
                shard[str(k)] = Residual(self._rows(bucket.buffer, "sent", found))
            if "replica-sent" in sides:
                rank = self._shard.group.rank
                flats = {
                    side: self._rows(bucket.buffer, f"replica-{side}", found)[rank]
                    for side in ("sent", "owned")
                }
                replica[str(k)] = Residual.of_flats(flats, self._replica.group)
        self._shard.set_residuals(shard)
        self._replica.set_residuals(replica)

    def _rows(self, buffer: RowBuffer, side: str, found: Mapping[tuple[str, int], Tensor]) -> Tensor:
        buffer.rows.zero_()
        for i in buffer.cuts:
            if (side, i) in found:
                buffer.write(i, found[side, i])
        return buffer.rows.clone()


class ParameterGather:
    """After an update, give every shard rank the rows that the others updated.

    Wire: (S-1)/S n bytes, in one all_gather for each dtype.
    """

    def __init__(self, parameters: Sequence[nn.Parameter], cuts: Cuts, group: Group, net: Net) -> None:
        self._parameters, self._group, self._net = parameters, group, net
        self._buffers = [
            RowBuffer(indices, parameters, cuts) for indices in plan_buckets(parameters, _EVERYTHING)
        ]

    def __call__(self) -> None:
        """Collective over the shard group."""
        for buffer in self._buffers:
            for index in buffer.cuts:
                mine = rows_of(self._parameters[index].data, buffer.cuts[index][self._group.rank])
                buffer.views[self._group.rank][index].copy_(mine.reshape(-1))
            row = buffer.rows[self._group.rank : self._group.rank + 1]
            buffer.rows.copy_(torch.cat(self._net.all_gather(row, self._group).wait()))
            for index in buffer.cuts:
                buffer.read(index, self._parameters[index].data)


_EVERYTHING = 2**62


class AgreedNorm(WrappedReducer):
    """A reducer whose ranks hold different parts of the gradient: their norm is that of all parts.

    Args:
        inner: gives this rank's parts.
        group: the ranks whose parts make one gradient.
    Wire: one all_reduce of 8 bytes.
    """

    def __init__(self, inner: Reducer, group: Group, net: Net) -> None:
        super().__init__(inner)
        self._group, self._net = group, net

    def finish(self) -> Gradients:
        """The parts, with the norm of the whole."""
        grads = self.inner.finish()
        device = grads.flats[0].device if grads.flats else torch.device("cpu")
        total = torch.tensor(sum(float(n) ** 2 for n in grads.norms), dtype=torch.float64, device=device)
        norm = self._net.all_reduce(total, self._group).wait().sqrt()
        return Gradients(grads.tensors, grads.flats, [norm], grads.scale)
