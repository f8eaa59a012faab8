"""Reductions of a group of one: nothing is sent.

The reducer: gradients of this rank in, sums of the parts that it updates out, while backward goes on.

Gradients are copied into flat buckets as they become ready; a full bucket leaves at once, and buckets are
launched in one order on every rank. A bucket has a row for each rank that gets a part of its tensors, so that
replicas are the case of one part. Buffers are allocated once, where they are summed best.

Invariant: after `finish` every rank that holds a part has the same sums of it, and a tensor that had no
gradient on a rank counted as zero there. It sums; dividing is the update step's work.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from functools import partial
from typing import Protocol

import torch
from torch import Tensor

from paceline.comm.collectives.collective_protocol import Collective, ErrorFeedbackStore
from paceline.comm.handle import Handle, wait_ignoring_errors
from paceline.comm.reduction.bucket_buffers import PartBuffer, PartsBySlot, empty_on_device_of, plan_buckets
from paceline.comm.reduction.gradients import Gradients, LocalReducer
from paceline.comm.reduction.scatter_schedule import ScatterWindow
from paceline.comm.reduction.summation_tree import TreeAccumulator
from paceline.errors import CommunicationError
from paceline.state.slot import TensorSlot


class TreeReducer(LocalReducer):
    """A group of one whose shards are added in the order of the tree.

    Args:
        nodes: of the tree, that this rank holds.
    Exactness: bitwise.
    """

    by_micro_batch = True

    def __init__(self, tensors: Mapping[TensorSlot, Tensor], nodes: Sequence[range]) -> None:
        super().__init__(tensors, counts=False)
        self._carries = {slot: TreeAccumulator(nodes) for slot in tensors}
        self._place = range(0)

    def begin(self, num_micro_batches: int | None = None) -> None:
        """Drop partial sums."""
        super().begin()
        for carry in self._carries.values():
            carry.close()

    def micro_batch(self, shards: range, is_last: bool) -> None:
        """What is ready from now on belongs to these shards."""
        self._place = shards

    def ready(self, slot: TensorSlot, grad: Tensor | None) -> None:
        """Add the gradient to the tree; it is kept and changed."""
        self._carries[slot].push(self._place, grad)

    def take(self) -> dict[TensorSlot, dict[int, Tensor]]:
        """By slot, the sums by place of their node; those without a gradient are not there."""
        return {slot: carry.close() for slot, carry in self._carries.items()}

    def finish(self) -> Gradients:
        """The sums of the only node; a tensor without a gradient is None."""
        self._grads = {slot: next(iter(sums.values()), None) for slot, sums in self.take().items()}
        found = super().finish()
        clear_negative_zeros(found.flats)
        return found


def clear_negative_zeros(flats: Sequence[Tensor]) -> Sequence[Tensor]:
    """-0.0 becomes 0.0, in place: whether nothing or a zero was added must not show."""
    if flats:
        torch._foreach_add_(list(flats), 0.0)
    return flats


_ROW_PREFIX = "replica-"
"""In front of what coding loses of the own row, where buckets are scattered first."""


class BucketSum(Protocol):
    """How a full bucket becomes the sum of the row that this rank gets."""

    @property
    def row(self) -> int:
        """The index of that row."""

    @property
    def nodes(self) -> Sequence[range] | None:
        """The nodes of the tree of additions that this rank holds; None: sums may have any order."""

    @property
    def num_buffers(self) -> int:
        """How many buffers a bucket has: one, or as many as the rank with most nodes holds of them."""

    @property
    def multiple(self) -> int:
        """The width of a row is a multiple of it."""

    @property
    def feedback(self) -> Mapping[str, ErrorFeedbackStore]:
        """What coding loses, by a word before its sides: of whole buckets (empty word), and of rows."""

    def zeros(self, num_values: int, like: Tensor, key: str) -> Tensor:
        """A buffer [n]; collective."""

    def launch(self, rows: Sequence[Tensor], keys: Sequence[str]) -> Handle:
        """Begin, with [num_rows, width] for each node; the handle returns a handle of the sum, [width]."""

    def abort(self) -> None:
        """Forget the present step; all handles have ended."""


class UnorderedSum:
    """Scatter the rows over the shard group, then sum the own row over the replicas.

    Args:
        turns: of scatters; None: any number is under way at a time, each in memory of the path.
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
            word: found for word, one in coded.items() if (found := one.feedback) is not None
        }

    def zeros(self, num_values: int, like: Tensor, key: str) -> Tensor:
        """See `BucketSum`."""
        first = self._shard if self._shard.group.size > 1 else self._replica
        if self._turns is not None:
            self._turns.expect(num_values, like, self._shard)
        return first.buffer(num_values, like, key)

    def launch(self, rows: Sequence[Tensor], keys: Sequence[str]) -> Handle:
        """See `BucketSum`."""
        x, key = rows[0], keys[0]
        if self._shard.group.size == 1:
            return Handle.ready(self._replica.all_reduce(x.view(-1), key))
        if self._turns is None:
            scattered = self._shard.reduce_scatter(x, key)
        else:
            scattered = self._turns.scatter(self._shard, x, key)
        return scattered.then(lambda own: self._replica.all_reduce(own, key))

    def abort(self) -> None:
        """See `BucketSum`."""
        if self._turns is not None:
            self._turns.abort()
        self._shard.abort()
        self._replica.abort()


class _ReduceBucket:
    """Some slots, with a buffer for each node of this rank; one where sums have any order."""

    def __init__(self, buffers: Sequence[PartBuffer], keys: Sequence[str]) -> None:
        self.buffers, self.keys = buffers, keys
        self.missing = set(buffers[0].slots)
        self.handle: Handle | None = None

    def begin(self) -> None:
        self.missing, self.handle = set(self.buffers[0].slots), None


class BucketReducer:
    """Sums in buckets, overlapped with backward.

    Args:
        tensors: what this rank computes with, by slot, in the model's order; equal on every rank of the sums.
        parts: the part of each that every rank of the shard group gets.
        sums: over which ranks, how.
        bucket_bytes: a bucket is closed once it holds this many bytes; one tensor is never split.
        counts: whether this rank counts what it gets in the norm of the whole; another rank of its replica
            may hold the same.
        name: in front of the keys of its buffers, where several reducers share the sums.
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
    ) -> None:
        self._tensors, self._sums, self._counts = tensors, sums, counts
        self.by_micro_batch = sums.nodes is not None
        self._carries = (
            {slot: TreeAccumulator(sums.nodes) for slot in tensors} if sums.nodes is not None else {}
        )
        self._place, self._is_last = range(0), False
        self._buckets = []
        for number, slots in enumerate(plan_buckets(tensors, bucket_bytes)):
            keys = [f"{name}{number}.{k}" for k in range(sums.num_buffers)]
            buffers = [
                PartBuffer(slots, tensors, parts, partial(sums.zeros, key=key), sums.multiple) for key in keys
            ]
            self._buckets.append(_ReduceBucket(buffers, keys))
        self._home = {slot: bucket for bucket in self._buckets for slot in bucket.missing}
        self._next = 0
        for bucket in self._buckets:
            self._describe(bucket)

    @property
    def num_buckets(self) -> int:
        """How many launches a step costs."""
        return len(self._buckets)

    def begin(self, num_micro_batches: int | None = None) -> None:
        """Open a step; what an interrupted one has left under way ends first."""
        wait_ignoring_errors(bucket.handle for bucket in self._buckets)
        self._next = 0
        for bucket in self._buckets:
            bucket.begin()
        for carry in self._carries.values():
            carry.close()

    def micro_batch(self, shards: range, is_last: bool) -> None:
        """What is ready from now on belongs to these shards."""
        self._place, self._is_last = shards, is_last

    def ready(self, slot: TensorSlot, grad: Tensor | None) -> None:
        """Take a gradient; the last one of its slot is filled in, and full buckets leave in turn."""
        if self.by_micro_batch:
            self._carries[slot].push(self._place, grad)
            if not self._is_last:
                return
        self._complete(slot, grad)
        self._launch_full()

    def _complete(self, slot: TensorSlot, grad: Tensor | None) -> None:
        bucket = self._home[slot]
        found = self._carries[slot].close() if self.by_micro_batch else {0: grad}
        for k, buffer in enumerate(bucket.buffers):
            buffer.write(slot, found.get(k))
        bucket.missing.discard(slot)

    def _launch_full(self) -> None:
        while self._next < len(self._buckets) and not self._buckets[self._next].missing:
            bucket = self._buckets[self._next]
            bucket.handle = self._sums.launch([buffer.rows for buffer in bucket.buffers], bucket.keys)
            self._next += 1

    def close(self) -> None:
        """All micro-batches have run: what is missing was nowhere used. A rank without one has zeros only."""
        missing = [slot for bucket in self._buckets[self._next :] for slot in bucket.missing]
        if missing and not self.by_micro_batch:
            raise CommunicationError(
                f"{sorted(slot.name for slot in missing)} were never called ready",
                next_step="the layout announces every slot once a step, None without a gradient",
            )
        for slot in missing:
            self._complete(slot, None)
        self._launch_full()

    def finish(self) -> Gradients:
        """Wait for the sums of the own parts, in order; norms are taken while others are on the way."""
        arriving = [bucket.handle.wait() for bucket in self._buckets if bucket.handle is not None]
        tensors: dict[TensorSlot, Tensor | None] = {}
        flats: list[Tensor] = []
        norms: list[Tensor] = []
        for bucket, handle in zip(self._buckets, arriving, strict=True):
            flat = handle.wait().view(-1)
            bucket.handle = None
            if self.by_micro_batch:
                clear_negative_zeros([flat])
            elif self._counts:
                norms += torch._foreach_norm([flat])
            flats.append(flat)
            tensors.update(bucket.buffers[0].own(flat, self._sums.row))
        coded = [*zip(norms, flats, strict=False)] if self._sums.feedback else []
        return Gradients(tensors, flats, norms, coded=coded)

    def commit(self, used: Collection[str] | None = None) -> None:
        """Keep what coding has lost."""
        for word, feedback in self._sums.feedback.items():
            if used is not None:
                self._restore(word, feedback, used)
            feedback.commit([bucket.keys[0] for bucket in self._buckets])  # others may share the path

    def _restore(self, word: str, feedback: ErrorFeedbackStore, used: Collection[str]) -> None:
        """Of what is not used nothing was sent, and between parts nothing is lost."""
        for bucket in self._buckets:
            buffer = bucket.buffers[0]
            names = {slot.name for slot in buffer.slots}
            if buffer.has_gaps or not names <= {*used}:
                places = ~buffer.places(names & {*used})
                feedback.restore(bucket.keys[0], places[self._sums.row] if word else places.view(-1))

    def abort(self) -> None:
        """Wait for all launches, ignoring errors, and drop the step."""
        wait_ignoring_errors(bucket.handle for bucket in self._buckets)
        self._sums.abort()
        self.begin()

    def residuals(self) -> Sequence[tuple[str, TensorSlot, Tensor]]:
        """See `GradientReduction`; of whole buckets, and (`replica-...`) of the own row."""
        found: list[tuple[str, TensorSlot, Tensor]] = []
        for word, feedback in self._sums.feedback.items():
            for bucket in self._buckets:
                buffer = bucket.buffers[0]
                for side, flat in feedback.residuals(
                    bucket.keys[0], self._span(buffer, word).numel()
                ).items():
                    values = self._over(buffer, word, flat)
                    for slot in buffer.slots:
                        own = empty_on_device_of(self._tensors[slot]).new_zeros(slot.sizes)
                        found.append((f"{word}{side}", slot, values.read(slot, own)))
        return found

    def set_residuals(self, found: Mapping[tuple[str, str], Tensor]) -> None:
        """See `GradientReduction`."""
        feedback = self._sums.feedback
        found = _move_to_whole_buckets(found, [_ROW_PREFIX] if _ROW_PREFIX not in feedback else [])
        sides = {side for side, _ in found}
        for word, one in feedback.items():
            own = [side.removeprefix(word) for side in sorted(sides) if _prefix_of_side(side) == word]
            for bucket in self._buckets:
                one.clear(bucket.keys[0])
            for bucket in self._buckets if own else ():
                buffer, flats = bucket.buffers[0], {}
                for side in own:
                    flats[side] = torch.zeros_like(self._span(buffer, word))
                    values = self._over(buffer, word, flats[side])
                    for slot in buffer.slots:
                        values.write(slot, found.get((f"{word}{side}", slot.name)))
                one.set_residuals(bucket.keys[0], flats)

    def rescale(self, factor: float) -> None:
        """See `GradientReduction`."""
        for feedback in self._sums.feedback.values():
            feedback.rescale(factor, [bucket.keys[0] for bucket in self._buckets])

    def _describe(self, bucket: _ReduceBucket) -> None:
        """Tell those who code where matrices lie."""
        buffer = bucket.buffers[0]
        for word, feedback in self._sums.feedback.items():
            feedback.describe(bucket.keys[0], buffer.matrices(self._sums.row if word else None))

    def _span(self, buffer: PartBuffer, word: str) -> Tensor:
        """What is coded of a buffer: all of it, or the own row."""
        return buffer.rows[self._sums.row] if word else buffer.flat

    def _over(self, buffer: PartBuffer, word: str, flat: Tensor) -> PartBuffer:
        """What is coded of a buffer, in other memory: the buffer has the gradients of the last step."""
        return buffer.over(flat, self._sums.row if word else None)


def _prefix_of_side(side: str) -> str:
    """What stands in front of a side: nothing for whole buckets."""
    return _ROW_PREFIX if side.startswith(_ROW_PREFIX) else ""


def _move_to_whole_buckets(
    found: Mapping[tuple[str, str], Tensor], gone: Sequence[str]
) -> Mapping[tuple[str, str], Tensor]:
    """Where rows are not coded any more, what they have lost is sent with whole buckets."""
    kept = {place: value for place, value in found.items() if _prefix_of_side(place[0]) not in gone}
    for (side, name), value in found.items():
        if _prefix_of_side(side) in gone and not side.endswith("factor"):
            into = "velocity" if side.endswith("velocity") else "sent", name
            kept[into] = kept[into] + value if into in kept else value
    return kept
