"""The scatter reducer: gradients leave with every micro-batch, and a rank keeps only sums of its own parts.

A bucket is copied in as its gradients become ready, scattered over the ranks that share the state, and its
memory is used again. The scattered row is added to this rank's parts; once a step these are summed over the
replicas. Ranks may run different numbers of micro-batches: they agree on the largest, and a rank that has
fewer scatters zeros for the rest.

Invariant: the scatters of all reductions of a rank are launched and waited for in one order, which is equal
on every rank (`ScatterOrder`), on a process group of their own, so other communication of backward may come
before or after, in any order. With an order for each reduction, two ranks could each wait for a scatter of
the reduction that the other has not reached. A rank waits for a scatter only if every other rank has launched
it, or will without this one.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
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
from paceline.observe.rank_activity import TracedCall
from paceline.state.slot import TensorSlot


@dataclass
class _ScatterBucket:
    """A bucket of some slots that are scattered together.

    Args:
        shape: layout of the parts; it has no memory.
        total: this rank's row, summed over micro-batches [width].
        num_own_values: number of values of parts in it; the rest is padding.
        own: these parts, in their shapes.
        full: blocks that hold all gradients of a micro-batch and wait for their turn, the oldest first.
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
    full: deque[int] = field(default_factory=deque)


@dataclass
class BucketScatter:
    """The scatter of one bucket of one micro-batch.

    Args:
        rows: rows of all ranks, in block number `block`.
        key: key of the collective; there is one scatter at a time with it.
        number: number of scatters before it in the step.
        on_complete: called with the scatter and this rank's row of the sum.
        arriving: see `Collective.reduce_scatter`.
    """

    bucket: _ScatterBucket
    block: int
    rows: Tensor
    key: str
    number: int
    on_complete: Callable[[BucketScatter, Tensor], None]
    arriving: ReceiveBuffer = None
    handle: Handle | None = None
    call: TracedCall | None = None


class ScatterQueue:
    """A queue of scatters that wait for their key, and those that are in flight.

    Invariant: scatters are launched in the order of `add`, the same on every rank; two with one key are never
    in flight together, as a route may have one memory for it. A rank waits for a scatter only if
    `ScatterPaths` allows it, and for any once it is `closing`: then no rank needs anything from this one but
    its scatters.

    Where two are in flight, it waits for the first before the next, or as soon as it may. At most as many are
    in flight as hold the unconfirmed bytes (see `ScatterPacer`); others are queued.

    Args:
        launch_zeros: see `ScatterProgress`.
    """

    def __init__(self, paths: ScatterPaths, launch_zeros: Callable[[int], None]) -> None:
        self._paths, pace = paths, paths.pace
        self._progress = None if pace is None else pace.join(launch_zeros)
        self._max_in_flight = MAX_IN_FLIGHT
        self._queued: deque[BucketScatter] = deque()
        self._in_flight: deque[BucketScatter] = deque()
        self.closing = False

    def set_sizes(self, sizes: Sequence[int]) -> None:
        """Set the bytes of all buckets, in the order of `add`."""
        if self._paths.pace is not None:
            self._max_in_flight = max_unconfirmed_buckets(sizes, self._paths.pace.unconfirmed_bytes)
        elif not self._paths.waits:
            # As many as a micro-batch has: none of them is waited for in backward.
            self._max_in_flight = max(MAX_IN_FLIGHT, len(sizes))

    def begin(self) -> None:
        """Open a step; nothing is in flight."""
        self.closing = False
        if self._progress is not None:
            self._progress.launched_here = self._progress.launched_everywhere = 0

    def add(self, scatter: BucketScatter) -> None:
        """Queue a bucket that is full, and launch it if possible."""
        self._queued.append(scatter)
        self.advance()

    def advance(self) -> None:
        """Finish scatters that are complete, and launch those that can be."""
        while self._in_flight and self._can_finish_first(is_late=len(self._in_flight) >= MAX_IN_FLIGHT):
            self._finish_first()
        while self._queued:
            while not self._may_launch(self._queued[0]):
                if not self._can_finish_first(is_late=True):
                    return
                self._finish_first()
            self._launch(self._queued.popleft())

    def _may_launch(self, scatter: BucketScatter) -> bool:
        """Return whether a scatter may be in flight beside the others."""
        is_full = len(self._in_flight) >= self._max_in_flight
        return not is_full and all(
            scatter_in_flight.key != scatter.key for scatter_in_flight in self._in_flight
        )

    def _launch(self, scatter: BucketScatter) -> None:
        activity = self._paths.net.activity
        scatter.call = TracedCall(f"bucket {scatter.key}", scatter.rows.nbytes)
        activity.begin_bucket(scatter.call)
        scatter.handle = self._paths.shard.reduce_scatter(scatter.rows, scatter.key, scatter.arriving)
        activity.bucket = None
        self._in_flight.append(scatter)
        if self._progress is not None:
            self._progress.launched_here = scatter.number + 1

    @property
    def queues(self) -> bool:
        """True if a scatter is waiting to be launched."""
        return bool(self._queued)

    @property
    def num_bytes(self) -> int:
        """Bytes of the buckets in flight."""
        return sum(scatter_in_flight.rows.nbytes for scatter_in_flight in self._in_flight)

    def end(self) -> None:
        """Wait for all scatters."""
        self.closing = True
        self.advance()
        while self._in_flight:
            self._finish_first()

    def drop(self) -> None:
        """Wait for the scatters in flight, ignoring errors, and forget all."""
        wait_ignoring_errors(scatter_in_flight.handle for scatter_in_flight in self._in_flight)
        self._in_flight.clear()
        self._queued.clear()

    def _can_finish_first(self, *, is_late: bool) -> bool:
        """Return whether the first scatter is complete, or is late and may be waited for."""
        first = self._in_flight[0]
        assert first.handle is not None
        if first.handle.is_complete():
            return True
        # A scatter that every rank has launched ends without this rank's help.
        may_wait = (
            self.closing
            or (self._progress is None and self._paths.waits)
            or (self._progress is not None and first.number < self._progress.launched_everywhere)
        )
        return is_late and may_wait

    def _finish_first(self) -> None:
        first = self._in_flight.popleft()
        assert first.handle is not None and first.call is not None
        row = first.handle.wait()
        self._paths.net.activity.end_bucket(first.call)
        first.on_complete(first, row)


class ScatterOrder:
    """The order in which the reductions of a rank scatter their buckets, equal on all ranks of the group.

    In a round every bucket of every reduction has one turn, in the order in which backward completes their
    gradients. A bucket that is full before its turn waits in its block.

    Args:
        paths: the shard group and its agreement; equal for all reductions of the order.
        slots: of the model, in its order; those of the reductions are among them.
    """

    def __init__(self, paths: ScatterPaths, slots: Iterable[TensorSlot]) -> None:
        self._paths, self._positions = paths, {slot: number for number, slot in enumerate(slots)}
        self._members: list[ScatterReducer] = []
        self._turns: list[tuple[ScatterReducer, _ScatterBucket]] = []
        self.launches = ScatterQueue(paths, self._launch_zeros)
        self._num_added = 0
        self._agreed: Handle | None = None

    def join(self, member: ScatterReducer, buckets: Sequence[_ScatterBucket]) -> None:
        """Add the buckets of a reduction; all ranks add equal ones."""
        self._members.append(member)
        self._turns += [(member, bucket) for bucket in buckets]
        # Backward completes the first tensor of a bucket last. The sort is stable.
        self._turns.sort(key=lambda turn: -min(self._positions[slot] for slot in turn[1].shape.slots))
        self.launches.set_sizes([bucket.shape.flat.nbytes for _, bucket in self._turns])

    def begin(self, member: ScatterReducer, num_micro_batches: int | None) -> None:
        """Open a step, once for all reductions."""
        if member is not self._members[0]:
            return
        self._agreed = None if num_micro_batches is None else self._agree(num_micro_batches)
        self._num_added = 0
        self.launches.begin()

    def advance(self) -> None:
        """Send the buckets whose turn it is and that are full."""
        while self._next_turn()[1].full:
            self._send_next()

    def close(self, num_micro_batches: int) -> None:
        """Scatter zeros up to the largest number of micro-batches of any rank; of all reductions at once.

        Args:
            num_micro_batches: of this rank; not read if `begin` knew it.
        """
        # From here on no rank needs anything else of this one, so it may wait for any scatter.
        self.launches.closing = True
        if self._agreed is None:
            self._agreed = self._agree(num_micro_batches)
        num_scatters = int(self._agreed.wait()) * len(self._turns)
        while self._num_added < num_scatters:
            self._send_next()
        if not self._paths.waits:
            # Any number is in flight here, and in shared memory each ends only where all ranks wait for it:
            # a rank that went on would leave the others waiting.
            self.launches.end()

    def _next_turn(self) -> tuple[ScatterReducer, _ScatterBucket]:
        return self._turns[self._num_added % len(self._turns)]

    def _send_next(self) -> None:
        """Send the bucket whose turn it is; zeros if it is not full."""
        member, bucket = self._next_turn()
        if not bucket.full:
            member.fill_with_zeros(bucket)
        number, self._num_added = self._num_added, self._num_added + 1
        self.launches.add(member.take_scatter(bucket, number))

    def _launch_zeros(self, num_scatters: int) -> None:
        """Scatter zeros until `num_scatters` buckets have left in this step, or one would have to queue."""
        self.launches.advance()
        while self._num_added < num_scatters and not self.launches.queues:
            self._send_next()

    def _agree(self, num_rounds: int) -> Handle:
        """Launch an all_reduce; the handle returns the largest number of any rank."""
        largest = torch.tensor([num_rounds], device=self._turns[0][1].total.device)
        return self._paths.net.all_reduce(largest, self._paths.group, "max")


# One more than are in flight, as one is being filled in.
_NUM_BLOCKS = MAX_IN_FLIGHT + 1


class ScatterReducer:
    """A reduction of parts, micro-batch by micro-batch.

    Args:
        tensors: tensors that this rank computes with, by slot, in the model's order; equal on every rank of
            `paths`.
        parts: the part of each that every rank of the shard group gets.
        paths: the collectives.
        bucket_bytes: see `BucketReducer` and `bucket_bytes_of`; a rank keeps up to three such buckets. With a
            `ScatterPacer` it has for a while as many as hold `unconfirmed_bytes` of gradients, and three.
            Where ranks use blocks in different orders, and in the first backward, others are queued, up to
            all of a micro-batch.
        counts: see `BucketReducer`.
        name: see `BucketReducer`.
        order: of the scatters of all reductions of this rank; None if this is the only one.
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
        paths: ScatterPaths,
        bucket_bytes: int,
        *,
        counts: bool = True,
        name: str = "",
        order: ScatterOrder | None = None,
    ) -> None:
        self._tensors, self._parts, self._paths = tensors, parts, paths
        self._counts, self._name = counts, name
        self._row = paths.shard.group.rank
        together = bucket_bytes_of(tensors.values(), bucket_bytes)
        self._buckets = [
            self._bucket(number, slots) for number, slots in enumerate(plan_buckets(tensors, together))
        ]
        self._bucket_of = {slot: bucket for bucket in self._buckets for slot in bucket.missing}
        self.blocks = self._make_blocks()
        self._order = ScatterOrder(paths, tensors) if order is None else order
        self._order.join(self, self._buckets)
        self.launches = self._order.launches
        self._num_micro_batches = 0
        # Slots whose gradient of the present micro-batch has not come; all of them between two.
        self._unannounced = set(self._bucket_of)

    def _bucket(self, number: int, slots: Sequence[TensorSlot]) -> _ScatterBucket:
        shape = PartBuffer(
            slots, self._tensors, self._parts, lambda n, like: like.new_empty(n, device="meta")
        )
        like, width = empty_on_device_of(self._tensors[slots[0]]), shape.rows.shape[1]
        num_own_values = sum(part.numel for s in slots if (part := self._parts[s][self._row]) is not None)
        # A rank that gets nothing, as under central storage, needs no memory for it.
        num_values = width if num_own_values else 1
        total = self._paths.replica.buffer(num_values, like, f"{self._name}{number}.own")
        return _ScatterBucket(number, shape, total, num_own_values, set(slots), shape.views(total, self._row))

    def _make_blocks(self) -> BlockPool:
        # The last one of each dtype in the dictionary is the largest.
        by_size = sorted(self._buckets, key=lambda bucket: bucket.shape.flat.numel())
        sizes = {bucket.total.dtype: bucket.shape.flat.numel() for bucket in by_size}
        # Where there are more, each is as large as needed.
        num_kept = _NUM_BLOCKS if self._bounds_in_flight else 0
        return BlockPool(sizes, self._buckets[0].total.device, num_kept, self._paths.memory, self._name)

    @property
    def _bounds_in_flight(self) -> bool:
        """Return whether at most `MAX_IN_FLIGHT` scatters are in flight: a few blocks serve them all."""
        return self._paths.pace is None and self._paths.waits

    def begin(self, num_micro_batches: int | None = None) -> None:
        """Open a step."""
        self._order.begin(self, num_micro_batches)
        self._num_micro_batches, self._unannounced = 0, set(self._bucket_of)
        for bucket in self._buckets:
            bucket.is_fresh, bucket.missing = True, set(bucket.shape.slots)

    def micro_batch(self, shards: range, is_last: bool) -> None:
        """Check that all gradients of the micro-batch before were announced."""
        self._require_nothing_missing()

    def ready(self, slot: TensorSlot, grad: Tensor | None) -> None:
        """Copy a gradient; buckets that are full leave in turn."""
        bucket = self._bucket_of[slot]
        self._buffer_of(bucket).write(slot, grad)
        bucket.missing.discard(slot)
        self._unannounced.discard(slot)
        if not self._unannounced:
            self._num_micro_batches, self._unannounced = self._num_micro_batches + 1, set(self._bucket_of)
        if not bucket.missing:
            self._mark_full(bucket)
            self._order.advance()

    def close(self) -> None:
        """Scatter zeros up to the largest number of micro-batches of any rank."""
        self._require_nothing_missing()
        self._order.close(self._num_micro_batches)

    def finish(self) -> Gradients:
        """Wait for the sums of this rank's parts."""
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
        """Do nothing: no state is kept between steps."""

    def abort(self) -> None:
        """Wait for the scatters in flight, ignoring errors, and drop the step."""
        self.launches.drop()
        self.blocks.release_all()
        for bucket in self._buckets:
            bucket.block = None
            bucket.full.clear()
            # Views of blocks that were freed must not keep their memory.
            bucket.buffers = {b: x for b, x in bucket.buffers.items() if b in self.blocks.memory}
        self._paths.shard.abort()
        self._paths.replica.abort()
        self.begin()

    def residuals(self) -> Sequence[tuple[str, TensorSlot, Tensor]]:
        """Return none: nothing is encoded."""
        return ()

    def set_residuals(self, residuals: Mapping[tuple[str, str], Tensor]) -> None:
        """Do nothing: nothing is encoded."""

    def rescale(self, factor: float) -> None:
        """Do nothing: nothing is encoded."""

    # -- one bucket ---------------------------------------------------------------------------------------

    def _buffer_of(self, bucket: _ScatterBucket) -> PartBuffer:
        """Return the buffer that is being filled; memory that another bucket has left, or new memory."""
        if bucket.block is None:
            # First free the blocks of scatters that are complete.
            self.launches.advance()
            bucket.block = self.blocks.take(bucket.total.dtype, bucket.shape.flat.numel())
        block = bucket.block
        if block not in bucket.buffers:
            memory = self.blocks.memory[block]
            bucket.buffers[block] = PartBuffer(
                bucket.shape.slots, self._tensors, self._parts, lambda n, like: memory[:n]
            )
        return bucket.buffers[block]

    def fill_with_zeros(self, bucket: _ScatterBucket) -> None:
        """Fill a bucket that no micro-batch of this rank fills."""
        self._buffer_of(bucket).flat.zero_()
        self._mark_full(bucket)

    def _mark_full(self, bucket: _ScatterBucket) -> None:
        """Take the block out of the bucket, which can be filled again."""
        assert bucket.block is not None
        bucket.full.append(bucket.block)
        bucket.block, bucket.missing = None, set(bucket.shape.slots)

    def take_scatter(self, bucket: _ScatterBucket, number: int) -> BucketScatter:
        """Return the scatter of the oldest full block of a bucket, whose number in the step is `number`."""
        block = bucket.full.popleft()
        rows = bucket.buffers[block].rows
        # Few keys let a route keep few buffers; where more scatters are in flight, each bucket has its own.
        turn = number % MAX_IN_FLIGHT if self._bounds_in_flight else bucket.number
        key = f"{self._name}{bucket.total.dtype}.{turn}"
        arriving = self.blocks.arriving(rows, number % MAX_IN_FLIGHT)
        return BucketScatter(bucket, block, rows, key, number, self._on_complete, arriving)

    def _on_complete(self, scatter: BucketScatter, row: Tensor) -> None:
        """Add the result of a scatter to this rank's row."""
        bucket = scatter.bucket
        own_sums = bucket.total[: bucket.num_own_values]
        (own_sums.copy_ if bucket.is_fresh else own_sums.add_)(row.view(-1)[: bucket.num_own_values])
        bucket.is_fresh = False
        if not self.blocks.release(scatter.block):
            del bucket.buffers[scatter.block]

    def _over_replicas(self, bucket: _ScatterBucket) -> Handle:
        # No rank had a micro-batch.
        if bucket.is_fresh:
            bucket.total.zero_()
        # The padding of a bucket that is used again may hold values of another.
        bucket.total[bucket.num_own_values :].zero_()
        return self._paths.replica.all_reduce(bucket.total, f"{self._name}{bucket.number}.own")

    def _require_nothing_missing(self) -> None:
        """Raise an error if a slot of the present micro-batch has not been announced."""
        if len(self._unannounced) < len(self._bucket_of):
            raise CommunicationError(
                f"the gradients of {sorted(slot.name for slot in self._unannounced)} were never announced",
                next_step="the layout has to call ready for every slot, with None if it has no gradient",
            )
