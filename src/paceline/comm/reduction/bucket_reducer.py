"""The bucket reducer: from gradients of this rank to sums of the parts that it updates, during backward.

Gradients are copied into flat buckets as they become ready; a full bucket is sent at once, and buckets are
launched in one order on every rank. A bucket has a row for each rank that gets a part of its tensors;
replicas are the case of one part. Buffers are allocated once, where sums of them cost least.

Invariant: after `finish` every rank that holds a part has the same sums of it, and a tensor without a
gradient on a rank counts as zero there. It only sums; the update step divides.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from functools import partial
from typing import Any, Protocol

import torch
from torch import Tensor

from paceline.comm.collectives.collective_protocol import Collective, ErrorFeedbackStore
from paceline.comm.handle import Handle, wait_ignoring_errors
from paceline.comm.reduction.bucket_buffers import PartBuffer, PartsBySlot, empty_on_device_of, plan_buckets
from paceline.comm.reduction.gradients import Gradients, LocalReducer
from paceline.comm.reduction.scatter_schedule import ScatterWindow
from paceline.comm.reduction.summation_tree import TreeAccumulator
from paceline.errors import CommunicationError
from paceline.observe.rank_activity import RankActivity, TracedCall
from paceline.state.slot import TensorSlot

_ROW_PREFIX = "replica-"
"""Prefix of the sides of errors of this rank's row, where buckets are scattered first."""


class BucketSum(Protocol):
    """The sum of a full bucket, of which this rank gets one row."""

    @property
    def row(self) -> int:
        """Index of that row."""

    @property
    def nodes(self) -> Sequence[range] | None:
        """Nodes of the tree of additions that this rank holds; None: sums may have any order."""

    @property
    def num_buffers(self) -> int:
        """Number of buffers of a bucket: one, or as many as the rank with most nodes holds of them."""

    @property
    def multiple(self) -> int:
        """The width of a row is a multiple of it."""

    @property
    def feedback(self) -> Mapping[str, ErrorFeedbackStore]:
        """Quantisation errors by the prefix of their side names: "" for whole buckets, else for rows."""

    def zeros(self, num_values: int, like: Tensor, key: str) -> Tensor:
        """Allocate a buffer [n]; collective."""

    def launch(self, rows: Sequence[Tensor], keys: Sequence[str]) -> Handle:
        """Launch the sum of [num_rows, width] for each node; the handle returns this rank's row, [width]."""

    def abort(self) -> None:
        """Drop the present step; all handles have ended."""


class UnorderedSum:
    """A bucket sum in any order: scatter the rows over the shard group, then sum this rank's row over the
    replicas.

    Args:
        turns: limits the scatters in flight; None: any number, each in memory of the collective.
    Wire: (S-1)/S n + 2 (R-1)/R n/S bytes for n bytes of gradients, S shard ranks and R replicas.
    Source: Li et al. 2020, PyTorch Distributed, arXiv:2006.15704, section 3.2 (bucketing and overlap);
    Rajbhandari et al. 2020, ZeRO, arXiv:1910.02054, sections 5.1 and 7.1.
    """

    nodes = None
    num_buffers = multiple = 1

    def __init__(self, shard: Collective, replica: Collective, turns: ScatterWindow | None = None) -> None:
        self._shard, self._replica, self._turns = shard, replica, turns
        self.row = shard.group.rank
        coded = {"": shard, _ROW_PREFIX: replica} if shard.group.size > 1 else {"": replica}
        self.feedback: dict[str, ErrorFeedbackStore] = {
            prefix: feedback
            for prefix, collective in coded.items()
            if (feedback := collective.feedback) is not None
        }

    def zeros(self, num_values: int, like: Tensor, key: str) -> Tensor:
        # The collective that runs first may need the buffer in memory of its own.
        first = self._shard if self._shard.group.size > 1 else self._replica
        if self._turns is not None:
            self._turns.expect(num_values, like, self._shard)
        return first.buffer(num_values, like, key)

    def launch(self, rows: Sequence[Tensor], keys: Sequence[str]) -> Handle:
        """Launch the scatter; the replicas' sum is launched when the scatter is waited for."""
        x, key = rows[0], keys[0]
        if self._shard.group.size == 1:
            return Handle.ready(self._replica.all_reduce(x.view(-1), key))
        if self._turns is None:
            scattered = self._shard.reduce_scatter(x, key)
        else:
            scattered = self._turns.scatter(self._shard, x, key)
        return scattered.then(lambda row: self._replica.all_reduce(row, key))

    def abort(self) -> None:
        if self._turns is not None:
            self._turns.abort()
        self._shard.abort()
        self._replica.abort()


class _ReduceBucket:
    """A bucket of some slots, with a buffer for each node of this rank; one where sums have any order."""

    def __init__(self, buffers: Sequence[PartBuffer], keys: Sequence[str], label: str) -> None:
        self.buffers, self.keys = buffers, keys
        self.call = TracedCall(label, sum(buffer.rows.nbytes for buffer in buffers))
        self.missing = set(buffers[0].slots)
        self.handle: Handle | None = None

    def begin(self) -> None:
        self.missing, self.handle = set(self.buffers[0].slots), None


class BucketReducer:
    """A reduction in buckets, overlapped with backward.

    Args:
        tensors: tensors that this rank computes with, by slot, in the model's order; equal on every rank of
            the sums.
        parts: the part of each that every rank of the shard group gets.
        sums: the sum of a full bucket.
        bucket_bytes: a bucket is closed once it holds this many bytes; one tensor is never split.
        counts: whether this rank counts its sums in the norm of the whole; another rank of its replica may
            hold the same.
        name: prefix of the keys of its buffers, where several reducers share the sums.
        activity: shows which bucket this rank waits for, and records their sums; None: it is not shown.
    Exactness: that of `sums`; equal bits on every rank that gets a part.
    """

    def __init__(
        self,
        tensors: Mapping[TensorSlot, Tensor],
        parts: PartsBySlot,
        sums: BucketSum,
        bucket_bytes: int,
        *,
        counts: bool = True,
        name: str = "",
        activity: RankActivity | None = None,
    ) -> None:
        self._tensors, self._sums, self._counts = tensors, sums, counts
        self._activity = activity or RankActivity()
        self.by_micro_batch = sums.nodes is not None
        self._accumulators = (
            {slot: TreeAccumulator(sums.nodes) for slot in tensors} if sums.nodes is not None else {}
        )
        self._shards, self._is_last = range(0), False
        self._buckets = []
        for number, slots in enumerate(plan_buckets(tensors, bucket_bytes)):
            # The key names a buffer in every step: error feedback is kept under it.
            keys = [f"{name}{number}.{k}" for k in range(sums.num_buffers)]
            buffers = [
                PartBuffer(slots, tensors, parts, partial(sums.zeros, key=key), sums.multiple) for key in keys
            ]
            self._buckets.append(_ReduceBucket(buffers, keys, f"bucket {name}{number}"))
        self._bucket_of = {slot: bucket for bucket in self._buckets for slot in bucket.missing}
        self._next = 0
        for bucket in self._buckets:
            self._describe(bucket)

    @property
    def num_buckets(self) -> int:
        """Number of launches of a step."""
        return len(self._buckets)

    def begin(self, num_micro_batches: int | None = None) -> None:
        """Open a step, after everything that an interrupted one has launched has ended."""
        wait_ignoring_errors(bucket.handle for bucket in self._buckets)
        self._next = 0
        for bucket in self._buckets:
            bucket.begin()
        for accumulator in self._accumulators.values():
            accumulator.close()

    def micro_batch(self, shards: range, is_last: bool) -> None:
        """Set the shards of the gradients from here on."""
        self._shards, self._is_last = shards, is_last

    def ready(self, slot: TensorSlot, grad: Tensor | None) -> None:
        """Take a gradient; after the last one of its slot, launch buckets that are full."""
        if self.by_micro_batch:
            self._accumulators[slot].push(self._shards, grad)
            if not self._is_last:
                return
        self._complete(slot, grad)
        self._launch_full()

    def _complete(self, slot: TensorSlot, grad: Tensor | None) -> None:
        bucket = self._bucket_of[slot]
        sums = self._accumulators[slot].close() if self.by_micro_batch else {0: grad}
        for k, buffer in enumerate(bucket.buffers):
            buffer.write(slot, sums.get(k))
        bucket.missing.discard(slot)

    def _launch_full(self) -> None:
        # Buckets are launched in order, so a full one may have to wait for those before it.
        while self._next < len(self._buckets) and not self._buckets[self._next].missing:
            bucket = self._buckets[self._next]
            self._activity.begin_bucket(bucket.call)
            bucket.handle = self._sums.launch([buffer.rows for buffer in bucket.buffers], bucket.keys)
            self._activity.bucket = None
            self._next += 1

    def close(self) -> None:
        """Fill slots that no micro-batch used with zeros, and launch the remaining buckets."""
        missing = [slot for bucket in self._buckets[self._next :] for slot in bucket.missing]
        # With a tree, a slot that was used in some micro-batches only is completed below.
        if missing and not self.by_micro_batch:
            raise CommunicationError(
                f"the gradients of {sorted(slot.name for slot in missing)} were never announced",
                next_step="the layout has to call ready for every slot once a step, with None if it has none",
            )
        for slot in missing:
            self._complete(slot, None)
        self._launch_full()

    def finish(self) -> Gradients:
        """Wait for the sums of this rank's parts, in order; norms are computed while others are in flight."""
        # First wait for all scatters: each wait launches the sum over the replicas, and these overlap.
        arriving = [
            self._wait(bucket, bucket.handle) for bucket in self._buckets if bucket.handle is not None
        ]
        tensors: dict[TensorSlot, Tensor | None] = {}
        flats: list[Tensor] = []
        norms: list[Tensor] = []
        for bucket, handle in zip(self._buckets, arriving, strict=True):
            flat = self._wait(bucket, handle).view(-1)
            self._activity.end_bucket(bucket.call)
            bucket.handle = None
            if self.by_micro_batch:
                clear_negative_zeros([flat])
            # Sums with one order have a norm with one order, too, which `CanonicalNorm` computes from the
            # parts.
            elif self._counts:
                norms += torch._foreach_norm([flat])
            flats.append(flat)
            tensors.update(bucket.buffers[0].own(flat, self._sums.row))
        coded = [*zip(norms, flats, strict=False)] if self._sums.feedback else []
        return Gradients(tensors, flats, norms, coded=coded)

    def _wait(self, bucket: _ReduceBucket, handle: Handle) -> Any:
        """Wait for a handle of a bucket; what it launches belongs to the bucket, too."""
        self._activity.bucket = bucket.call
        try:
            return handle.wait()
        finally:
            self._activity.bucket = None

    def commit(self, used: Collection[str] | None = None) -> None:
        """Keep the quantisation errors of this step."""
        for prefix, feedback in self._sums.feedback.items():
            if used is not None:
                self._restore(prefix, feedback, used)
            # Only these keys: other reducers may share the collective and its errors.
            feedback.commit([bucket.keys[0] for bucket in self._buckets])

    def _restore(self, prefix: str, feedback: ErrorFeedbackStore, used: Collection[str]) -> None:
        """Go back to the earlier errors of slots that were not used, and of padding, which has none."""
        for bucket in self._buckets:
            buffer = bucket.buffers[0]
            names = {slot.name for slot in buffer.slots}
            if buffer.has_gaps or not names <= {*used}:
                # The errors of unused slots and of padding go back to those before the step.
                places = ~buffer.places(names & {*used})
                feedback.restore(bucket.keys[0], places[self._sums.row] if prefix else places.view(-1))

    def abort(self) -> None:
        """Wait for all launches, ignoring errors, and drop the step."""
        wait_ignoring_errors(bucket.handle for bucket in self._buckets)
        # Only after all launches have ended: a collective may not be aborted while it is in flight.
        self._sums.abort()
        self.begin()

    def residuals(self) -> Sequence[tuple[str, TensorSlot, Tensor]]:
        """Return the errors of whole buckets, and (`replica-...`) of this rank's row."""
        residuals: list[tuple[str, TensorSlot, Tensor]] = []
        for prefix, feedback in self._sums.feedback.items():
            for bucket in self._buckets:
                buffer = bucket.buffers[0]
                for side, flat in feedback.residuals(
                    bucket.keys[0], self._span(buffer, prefix).numel()
                ).items():
                    values = self._over(buffer, prefix, flat)
                    for slot in buffer.slots:
                        value = empty_on_device_of(self._tensors[slot]).new_zeros(slot.sizes)
                        residuals.append((f"{prefix}{side}", slot, values.read(slot, value)))
        return residuals

    def set_residuals(self, residuals: Mapping[tuple[str, str], Tensor]) -> None:
        """Continue from these errors; those of rows that are not encoded any more are sent with whole
        buckets.
        """
        feedback = self._sums.feedback
        residuals = _move_to_whole_buckets(residuals, [_ROW_PREFIX] if _ROW_PREFIX not in feedback else [])
        sides = {side for side, _ in residuals}
        for prefix, store in feedback.items():
            own_sides = [
                side.removeprefix(prefix) for side in sorted(sides) if _prefix_of_side(side) == prefix
            ]
            for bucket in self._buckets:
                store.clear(bucket.keys[0])
            for bucket in self._buckets if own_sides else ():
                buffer, flats = bucket.buffers[0], {}
                for side in own_sides:
                    flats[side] = torch.zeros_like(self._span(buffer, prefix))
                    values = self._over(buffer, prefix, flats[side])
                    for slot in buffer.slots:
                        values.write(slot, residuals.get((f"{prefix}{side}", slot.name)))
                store.set_residuals(bucket.keys[0], flats)

    def rescale(self, factor: float) -> None:
        for feedback in self._sums.feedback.values():
            feedback.rescale(factor, [bucket.keys[0] for bucket in self._buckets])

    def _describe(self, bucket: _ReduceBucket) -> None:
        """Set the positions of matrices in a bucket."""
        buffer = bucket.buffers[0]
        for prefix, feedback in self._sums.feedback.items():
            feedback.describe(bucket.keys[0], buffer.matrices(self._sums.row if prefix else None))

    def _span(self, buffer: PartBuffer, prefix: str) -> Tensor:
        """Return the encoded part of a buffer: all of it, or this rank's row."""
        return buffer.rows[self._sums.row] if prefix else buffer.flat

    def _over(self, buffer: PartBuffer, prefix: str, flat: Tensor) -> PartBuffer:
        """Return the encoded part of a buffer in other memory: the buffer itself holds gradients of the
        last step.
        """
        return buffer.over(flat, self._sums.row if prefix else None)


class TreeReducer(LocalReducer):
    """The reduction of a group of one whose shards are added in the order of the tree.

    Args:
        nodes: nodes of the tree that this rank holds.
    Exactness: bitwise.
    """

    by_micro_batch = True

    def __init__(self, tensors: Mapping[TensorSlot, Tensor], nodes: Sequence[range]) -> None:
        super().__init__(tensors, counts=False)
        self._accumulators = {slot: TreeAccumulator(nodes) for slot in tensors}
        self._shards = range(0)

    def begin(self, num_micro_batches: int | None = None) -> None:
        """Drop partial sums."""
        super().begin()
        for accumulator in self._accumulators.values():
            accumulator.close()

    def micro_batch(self, shards: range, is_last: bool) -> None:
        """Set the shards of the gradients from here on."""
        self._shards = shards

    def ready(self, slot: TensorSlot, grad: Tensor | None) -> None:
        """Add the gradient to the tree; it is kept and changed."""
        self._accumulators[slot].push(self._shards, grad)

    def take(self) -> dict[TensorSlot, dict[int, Tensor]]:
        """Return the sums by slot and index of their node, without those that have no gradient."""
        return {slot: accumulator.close() for slot, accumulator in self._accumulators.items()}

    def finish(self) -> Gradients:
        """Return the sums of the only node; a tensor without a gradient is None."""
        self._grads = {slot: next(iter(sums.values()), None) for slot, sums in self.take().items()}
        gradients = super().finish()
        clear_negative_zeros(gradients.flats)
        return gradients


def clear_negative_zeros(flats: Sequence[Tensor]) -> Sequence[Tensor]:
    """Turn -0.0 into 0.0, in place, so that it does not show whether a zero was added."""
    if flats:
        torch._foreach_add_(list(flats), 0.0)
    return flats


def _prefix_of_side(side: str) -> str:
    """Return the prefix of a side; empty for whole buckets."""
    return _ROW_PREFIX if side.startswith(_ROW_PREFIX) else ""


def _move_to_whole_buckets(
    residuals: Mapping[tuple[str, str], Tensor], dropped_prefixes: Sequence[str]
) -> Mapping[tuple[str, str], Tensor]:
    """Return errors with those of rows that are not encoded any more added to those of whole buckets."""
    moved_residuals = {
        key: value for key, value in residuals.items() if _prefix_of_side(key[0]) not in dropped_prefixes
    }
    for (side, name), value in residuals.items():
        if _prefix_of_side(side) in dropped_prefixes and not side.endswith("factor"):
            target = "velocity" if side.endswith("velocity") else "sent", name
            moved_residuals[target] = moved_residuals[target] + value if target in moved_residuals else value
    return moved_residuals
