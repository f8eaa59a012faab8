"""Scatters in the order in which their buckets were full, launched as soon as their way is free.

Gradients that leave with every micro-batch: a rank keeps sums of its own parts, and no whole gradient.

A bucket is copied in as its gradients become ready, scattered over the ranks that share the state, and its
memory is used again. What arrives is added to this rank's parts; once a step these are summed over the
replicas. Ranks may run different numbers of micro-batches: they agree on the largest, and a rank that has
fewer scatters zeros for the rest.

Invariant: scatters are launched in one order on every rank, and on a process group of their own, so whatever
else ranks send each other during backward comes before or after, in any order. A rank waits for a scatter
only where every other rank has launched it, or will without this one.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from paceline.comm.collectives.collective_protocol import ReceiveBuffer
from paceline.comm.handle import Handle, wait_ignoring_errors
from paceline.comm.reduction.bucket_buffers import (
    MAX_IN_FLIGHT,
    BlockPool,
    PartBuffer,
    PartsBySlot,
    bucket_bytes_of,
    empty_on_device_of,
    plan_buckets,
)
from paceline.comm.reduction.gradients import Gradients
from paceline.comm.reduction.scatter_schedule import ScatterPaths, max_unconfirmed_buckets
from paceline.errors import CommunicationError
from paceline.state.slot import TensorSlot


@dataclass
class _ScatterBucket:
    """Some slots that are scattered together.

    Args:
        shape: says where each part lies; it has no memory.
        total: this rank's row, summed over micro-batches [width].
        num_own_values: how many of them are values of parts; the rest is padding.
        own: these parts, in their shapes.
    """

    number: int
    shape: PartBuffer
    total: Tensor
    num_own_values: int
    missing: set[TensorSlot]
    own: Mapping[TensorSlot, Tensor]
    is_fresh: bool = True
    buffers: dict[int, PartBuffer] = field(default_factory=dict)
    block: int | None = None


@dataclass
class BucketScatter:
    """One bucket of one micro-batch on its way.

    Args:
        rows: of all ranks, in block number `block`.
        key: of its way; there is one scatter at a time on it.
        number: of scatters before it in the step.
        arriving: see `Collective.reduce_scatter`.
    """

    bucket: _ScatterBucket
    block: int
    rows: Tensor
    key: str
    number: int
    arriving: ReceiveBuffer = None
    handle: Handle | None = None


class ScatterQueue:
    """Scatters that wait for their way, and those that are under way.

    Invariant: scatters are launched in the order of `add`, the same on every rank; two on one way never
    meet, as a route may have one memory for it. A rank waits for what `ScatterPaths` says that it may, and once it is
    `closing` for all: then no rank needs anything from this one but its scatters.

    Where two are under way, it waits for the first before the next, or as soon as it may. So many that they
    hold what is behind (see `ScatterPacer`) are the most at a time; others queue.

    Args:
        sizes: bytes of all buckets, in the order of `add`.
        came: is given each that is complete, in their order.
        launch_zeros: see `ScatterProgress`.
    """

    def __init__(
        self,
        ways: ScatterPaths,
        sizes: Sequence[int],
        came: Callable[[BucketScatter, Tensor], None],
        launch_zeros: Callable[[int], None],
    ) -> None:
        self._ways, self._came, pace = ways, came, ways.pace
        self._launched = None if pace is None else pace.join(launch_zeros)
        self._most = MAX_IN_FLIGHT if pace is None else max_unconfirmed_buckets(sizes, pace.unconfirmed_bytes)
        self._queued: deque[BucketScatter] = deque()
        self._under_way: deque[BucketScatter] = deque()
        self.closing = False

    def begin(self) -> None:
        """A step; nothing is under way."""
        self.closing = False
        if self._launched is not None:
            self._launched.launched_here = self._launched.launched_everywhere = 0

    def add(self, scatter: BucketScatter) -> None:
        """A bucket is full."""
        self._queued.append(scatter)
        self.go_on()

    def go_on(self) -> None:
        """Take what came, and launch what can be."""
        while self._under_way and self._can_settle(is_late=len(self._under_way) >= MAX_IN_FLIGHT):
            self._settle()
        while self._queued:
            while not self._has_place(self._queued[0]):
                if not self._can_settle(is_late=True):
                    return
                self._settle()
            self._launch(self._queued.popleft())

    def _has_place(self, scatter: BucketScatter) -> bool:
        """Whether it may be under way beside what is."""
        is_full = len(self._under_way) >= self._most
        return not is_full and all(one.key != scatter.key for one in self._under_way)

    def _launch(self, scatter: BucketScatter) -> None:
        scatter.handle = self._ways.shard.reduce_scatter(scatter.rows, scatter.key, scatter.arriving)
        self._under_way.append(scatter)
        if self._launched is not None:
            self._launched.launched_here = scatter.number + 1

    @property
    def queues(self) -> bool:
        """Whether a scatter waits for its way."""
        return bool(self._queued)

    @property
    def num_bytes(self) -> int:
        """Of the buckets that are under way."""
        return sum(one.rows.nbytes for one in self._under_way)

    def end(self) -> None:
        """Wait for all."""
        self.closing = True
        self.go_on()
        while self._under_way:
            self._settle()

    def drop(self) -> None:
        """Let what was launched end, well or badly; forget it."""
        wait_ignoring_errors(one.handle for one in self._under_way)
        self._under_way.clear()
        self._queued.clear()

    def _can_settle(self, *, is_late: bool) -> bool:
        """Whether the first one is there, or is late and may be waited for."""
        first = self._under_way[0]
        assert first.handle is not None
        if first.handle.is_complete():
            return True
        may_wait = self._launched is None or self.closing or first.number < self._launched.launched_everywhere
        return is_late and may_wait

    def _settle(self) -> None:
        first = self._under_way.popleft()
        assert first.handle is not None
        self._came(first, first.handle.wait())


_NUM_BLOCKS = MAX_IN_FLIGHT + 1  # one is being filled in


class ScatterReducer:
    """Sums of parts, micro-batch by micro-batch.

    Args:
        tensors: what this rank computes with, by slot, in the model's order; equal on every rank of `ways`.
        parts: the part of each that every rank of the shard group gets.
        ways: over which ranks, how.
        bucket_bytes: see `BucketReducer` and `bucket_bytes_of`; a rank keeps up to three such buckets. With a `ScatterPacer`
            it has for a while as many as `unconfirmed_bytes` of gradients lie in, and three. Where ranks use
            blocks in different orders, and in the first backward, others queue, up to all of a micro-batch.
        counts: see `BucketReducer`.
        name: see `BucketReducer`.
    Wire: with K micro-batches on the rank that has most, K (S-1)/S n + 2 (R-1)/R n/S bytes for n bytes of
        gradients, S shard ranks and R replicas, and an all_reduce of 8 bytes.
    Exactness: sums have any order; equal bits on every rank that gets a part.
    Source: Rajbhandari et al. 2020, ZeRO, arXiv:1910.02054, section 5.2 (gradient partitioning).
    """

    by_micro_batch = True

    def __init__(
        self,
        tensors: Mapping[TensorSlot, Tensor],
        parts: PartsBySlot,
        ways: ScatterPaths,
        bucket_bytes: int,
        *,
        counts: bool = True,
        name: str = "",
    ) -> None:
        self._tensors, self._parts, self._ways = tensors, parts, ways
        self._counts, self._name = counts, name
        self._row = ways.shard.group.rank
        together = bucket_bytes_of(tensors.values(), bucket_bytes)
        self._buckets = [
            self._bucket(number, slots) for number, slots in enumerate(plan_buckets(tensors, together))
        ]
        self._home = {slot: bucket for bucket in self._buckets for slot in bucket.missing}
        self.blocks = self._make_blocks()
        sizes = [bucket.shape.flat.nbytes for bucket in self._buckets]
        self.launches: ScatterQueue = ScatterQueue(ways, sizes, self._came, self._launch_zeros)
        self._next = self._rounds = self._num_added = 0
        self._has_begun = False  # a gradient of a micro-batch came, and not all did
        self._agreed: Handle | None = None

    def _bucket(self, number: int, slots: Sequence[TensorSlot]) -> _ScatterBucket:
        shape = PartBuffer(
            slots, self._tensors, self._parts, lambda n, like: like.new_empty(n, device="meta")
        )
        like, width = empty_on_device_of(self._tensors[slots[0]]), shape.rows.shape[1]
        total = self._ways.replica.buffer(width, like, f"{self._name}{number}.own")
        own = sum(part.numel for s in slots if (part := self._parts[s][self._row]) is not None)
        return _ScatterBucket(number, shape, total, own, set(slots), shape.views(total, self._row))

    def _make_blocks(self) -> BlockPool:
        by_size = sorted(self._buckets, key=lambda bucket: bucket.shape.flat.numel())
        sizes = {bucket.total.dtype: bucket.shape.flat.numel() for bucket in by_size}
        kept = (
            _NUM_BLOCKS if self._ways.pace is None else 0
        )  # where there are more, each is as large as needed
        return BlockPool(sizes, self._buckets[0].total.device, kept, self._ways.memory, self._name)

    def begin(self, num_micro_batches: int | None = None) -> None:
        """Open a step."""
        self._agreed = None if num_micro_batches is None else self._agree(num_micro_batches)
        self._next = self._rounds = self._num_added = 0
        self._has_begun = False
        self.launches.begin()
        for bucket in self._buckets:
            bucket.is_fresh, bucket.missing = True, set(bucket.shape.slots)

    def micro_batch(self, shards: range, is_last: bool) -> None:
        """What is ready from now on belongs to the next micro-batch; all of the one before is on its way."""
        self._require_nothing_missing()

    def ready(self, slot: TensorSlot, grad: Tensor | None) -> None:
        """Copy a gradient; full buckets leave in turn."""
        self._has_begun, bucket = True, self._home[slot]
        self._buffer_of(bucket).write(slot, grad)
        bucket.missing.discard(slot)
        while not self._buckets[self._next].missing:
            self._add()

    def close(self) -> None:
        """All micro-batches have run; fill up to the largest number with zeros."""
        self._require_nothing_missing()
        self.launches.closing = True
        agreed = self._agree(self._rounds) if self._agreed is None else self._agreed
        num_scatters = int(agreed.wait()) * len(self._buckets)
        while self._num_added < num_scatters:
            self._add_zeros()

    def finish(self) -> Gradients:
        """Wait for the sums of the own parts."""
        self.launches.end()
        arriving = [self._over_replicas(bucket) for bucket in self._buckets]
        tensors: dict[TensorSlot, Tensor | None] = {}
        norms: list[Tensor] = []
        for bucket, handle in zip(self._buckets, arriving, strict=True):
            total = handle.wait().view(-1)
            norms += torch._foreach_norm([total]) if self._counts else ()
            tensors.update(bucket.own)
        return Gradients(tensors, [bucket.total for bucket in self._buckets], norms)

    def commit(self, used: Collection[str] | None = None) -> None:
        """Nothing is kept between steps."""

    def abort(self) -> None:
        """Let what was launched end, well or badly; forget it."""
        self.launches.drop()
        self.blocks.release_all()
        for bucket in self._buckets:
            bucket.block = None
            bucket.buffers = {b: x for b, x in bucket.buffers.items() if b in self.blocks.memory}
        self._ways.shard.abort()
        self._ways.replica.abort()
        self.begin()

    def residuals(self) -> Sequence[tuple[str, TensorSlot, Tensor]]:
        """Nothing is coded."""
        return ()

    def set_residuals(self, found: Mapping[tuple[str, str], Tensor]) -> None:
        """There is no coder to take them."""

    def rescale(self, factor: float) -> None:
        """Nothing is coded."""

    def _agree(self, mine: int) -> Handle:
        """Launch it; the handle returns the largest number."""
        said = torch.tensor([mine], device=self._buckets[0].total.device)
        return self._ways.net.all_reduce(said, self._ways.group, "max")

    # -- one bucket ---------------------------------------------------------------------------------------

    def _buffer_of(self, bucket: _ScatterBucket) -> PartBuffer:
        """Where it is filled in; memory that another bucket has left, or new."""
        if bucket.block is None:
            self.launches.go_on()
            bucket.block = self.blocks.take(bucket.total.dtype, bucket.shape.flat.numel())
        block = bucket.block
        if block not in bucket.buffers:
            memory = self.blocks.memory[block]
            bucket.buffers[block] = PartBuffer(
                bucket.shape.slots, self._tensors, self._parts, lambda n, like: memory[:n]
            )
        return bucket.buffers[block]

    def _launch_zeros(self, num_scatters: int) -> None:
        """Scatter zeros until so many buckets have left in this step, or one would have to queue."""
        self.launches.go_on()
        while self._num_added < num_scatters and not self.launches.queues:
            self._add_zeros()

    def _add_zeros(self) -> None:
        self._buffer_of(self._buckets[self._next]).flat.zero_()
        self._add()

    def _add(self) -> None:
        """The next bucket leaves."""
        bucket, number = self._buckets[self._next], self._num_added
        buffer, block = self._buffer_of(bucket), bucket.block
        assert block is not None
        turn = number % MAX_IN_FLIGHT if self._ways.pace is None else bucket.number
        key = f"{self._name}{bucket.total.dtype}.{turn}"
        bucket.block, bucket.missing = None, set(bucket.shape.slots)
        self._num_added, self._next = number + 1, (self._next + 1) % len(self._buckets)
        if self._next == 0:
            self._rounds, self._has_begun = self._rounds + 1, False
        arriving = self.blocks.arriving(buffer.rows, number % MAX_IN_FLIGHT)
        self.launches.add(BucketScatter(bucket, block, buffer.rows, key, number, arriving))

    def _came(self, scatter: BucketScatter, row: Tensor) -> None:
        """Add what a scatter brings."""
        bucket = scatter.bucket
        own = bucket.total[: bucket.num_own_values]
        (own.copy_ if bucket.is_fresh else own.add_)(row.view(-1)[: bucket.num_own_values])
        bucket.is_fresh = False
        if not self.blocks.release(scatter.block):
            del bucket.buffers[scatter.block]

    def _over_replicas(self, bucket: _ScatterBucket) -> Handle:
        if bucket.is_fresh:  # nobody had a micro-batch
            bucket.total.zero_()
        bucket.total[bucket.num_own_values :].zero_()  # padding has other buckets' values
        return self._ways.replica.all_reduce(bucket.total, f"{self._name}{bucket.number}.own")

    def _require_nothing_missing(self) -> None:
        """Every slot of the micro-batch that was under way has been announced."""
        missing = [slot.name for bucket in self._buckets[self._next :] for slot in bucket.missing]
        if self._has_begun and missing:
            raise CommunicationError(
                f"{sorted(missing)} were never called ready",
                next_step="the layout announces every slot once a micro-batch, None without a gradient",
            )
