"""Buckets: gradients are copied in as they become ready, and a full bucket is summed at once.

Buckets are launched in one order on every rank. Buffers are allocated once, where the wire sums them best.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress

import torch
from torch import Tensor, nn

from paceline.comm.reducer import Gradients, LocalReducer, Reducer, TakesSums
from paceline.comm.wire import Residual, Waits, Wire
from paceline.errors import CommunicationError


class _Bucket:
    """A flat buffer of the wire, and the parameters in it."""

    def __init__(
        self, indices: Sequence[int], parameters: Sequence[nn.Parameter], wire: Wire, key: str
    ) -> None:
        members = [parameters[i] for i in indices]
        self.flat = wire.buffer(sum(p.numel() for p in members), members[0].detach(), key)
        pieces = self.flat.split([p.numel() for p in members])
        self.views = {i: v.view_as(p) for i, v, p in zip(indices, pieces, members, strict=True)}
        self.missing = set(indices)
        self.handle: Waits | None = None

    def begin(self) -> None:
        self.missing = set(self.views)
        self.handle = None


class BucketReducer(TakesSums):
    """All-reduce in buckets, overlapped with backward.

    Args:
        parameters: those with a gradient, in the model's order; equal on every rank.
        wire: sums a bucket over the group.
        bucket_bytes: a bucket is closed once it holds this many bytes; one parameter is never split.
    Wire: one all_reduce a bucket; plainly 2 (P-1)/P n bytes in all for n bytes of gradients.
    Exactness: that of the wire; equal bits on every rank.
    Source: Li et al. 2020, PyTorch Distributed, arXiv:2006.15704, section 3.2 (bucketing and overlap).
    """

    def __init__(self, parameters: Sequence[nn.Parameter], wire: Wire, bucket_bytes: int) -> None:
        self._wire = wire
        self._buckets = [
            _Bucket(indices, parameters, wire, str(k))
            for k, indices in enumerate(plan_buckets(parameters, bucket_bytes))
        ]
        self._home = {i: bucket for bucket in self._buckets for i in bucket.views}
        self._next = 0

    @property
    def num_buckets(self) -> int:
        """How many all_reduces a step costs."""
        return len(self._buckets)

    def begin(self) -> None:
        """Open a step."""
        self._next = 0
        for bucket in self._buckets:
            bucket.begin()

    def ready(self, index: int, grad: Tensor | None) -> None:
        """Copy the gradient into its bucket; launch every full bucket whose turn it is."""
        bucket = self._home[index]
        view = bucket.views[index]
        if grad is None:
            view.zero_()
        else:
            view.copy_(grad)
        bucket.missing.discard(index)
        if not bucket.missing:
            self._launch_full()

    def finish(self) -> Gradients:
        """Wait for all buckets, in order; the norm of one is taken while others are on the way."""
        norms: list[Tensor] = []
        for bucket in self._buckets:
            if bucket.handle is None:
                raise CommunicationError(
                    f"parameters {sorted(bucket.missing)} were never called ready",
                    next_step="the layout announces every parameter once a step, None without a gradient",
                )
            bucket.handle.wait()
            bucket.handle = None
            norms += torch._foreach_norm([bucket.flat])
        tensors = [self._home[i].views[i] for i in range(len(self._home))]
        return Gradients(tensors, [bucket.flat for bucket in self._buckets], norms)

    def _launch_full(self) -> None:
        while self._next < len(self._buckets) and not self._buckets[self._next].missing:
            bucket = self._buckets[self._next]
            bucket.handle = self._wire.all_reduce(bucket.flat, str(self._next))
            self._next += 1

    def commit(self) -> None:
        """Keep what coding has lost."""
        self._wire.commit()

    def abort(self) -> None:
        """Let what was launched end, well or badly; forget it."""
        drain(bucket.handle for bucket in self._buckets)
        self._wire.abort()

    def residuals(self) -> Sequence[tuple[str, int, Tensor]]:
        """Sides `sent` and `owned`, cut along the parameters."""
        found: list[tuple[str, int, Tensor]] = []
        for key, residual in self._wire.residuals().items():
            bucket = self._buckets[int(key)]
            for side, flat in residual.flats(self._wire.group.rank, bucket.flat.numel()):
                pieces = flat.split([v.numel() for v in bucket.views.values()])
                found += [
                    (side, i, piece.view_as(v))
                    for (i, v), piece in zip(bucket.views.items(), pieces, strict=True)
                ]
        return found

    def set_residuals(self, found: Mapping[tuple[str, int], Tensor]) -> None:
        """The inverse of `residuals`."""
        group = self._wire.group
        self._wire.set_residuals(
            {
                str(k): Residual.of_flats(
                    {side: _flat_of(bucket.views, side, found) for side in ("sent", "owned")}, group
                )
                for k, bucket in enumerate(self._buckets)
            }
            if found
            else {}
        )


def _flat_of(views: Mapping[int, Tensor], side: str, found: Mapping[tuple[str, int], Tensor]) -> Tensor:
    return torch.cat([found.get((side, i), torch.zeros_like(v)).reshape(-1) for i, v in views.items()])


def drain(handles: Iterable[Waits | None]) -> None:
    """Wait for each with its own deadline; a failure is what an abort is for."""
    for handle in handles:
        if handle is not None:
            with suppress(CommunicationError):
                handle.wait()


def plan_buckets(parameters: Sequence[nn.Parameter], bucket_bytes: int) -> list[list[int]]:
    """Parameter indices by bucket, last parameter first (the order in which backward reaches them); pure.

    A bucket holds one dtype on one device, at least one parameter, and is closed when it has reached
    `bucket_bytes`.
    """
    return list(_closed(parameters, bucket_bytes))


def _closed(parameters: Sequence[nn.Parameter], bucket_bytes: int) -> Iterator[list[int]]:
    bucket: list[int] = []
    filled = 0
    for index in reversed(range(len(parameters))):
        p = parameters[index]
        if bucket and (filled >= bucket_bytes or not _alike(p, parameters[bucket[0]])):
            yield bucket
            bucket, filled = [], 0
        bucket.append(index)
        filled += p.numel() * p.element_size()
    if bucket:
        yield bucket


def _alike(a: Tensor, b: Tensor) -> bool:
    return a.dtype == b.dtype and a.device == b.device


def build_reducer(parameters: Sequence[nn.Parameter], wire: Wire, bucket_bytes: int) -> Reducer:
    """The reducer that suits the group: none needed for one rank, buckets for more."""
    if wire.group.size == 1:
        return LocalReducer(parameters)
    return BucketReducer(parameters, wire, bucket_bytes)
