"""Gradients that leave with every micro-batch: a rank keeps sums of its own parts, and no whole gradient.

A bucket is copied in as its gradients become ready, scattered over the ranks that share the state, and its
memory is used again. What arrives is added to this rank's parts; once a step these are summed over the
replicas. Ranks may have run different numbers of micro-batches: at the end of a step they agree on the
largest number, and a rank that had fewer scatters zeros for the rest.

Invariant: scatters are launched in one order on every rank, and on a process group of their own, so whatever
else ranks send each other during backward comes before or after, in any order.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from paceline.comm.collectives import Collective
from paceline.comm.handle import Handle
from paceline.comm.net import Net
from paceline.comm.reduction.blocks import Blocks
from paceline.comm.reduction.gradients import Gradients
from paceline.comm.reduction.part_buffer import PartBuffer, Parts, plan_buckets
from paceline.comm.reduction.reducer import drain
from paceline.errors import CommunicationError
from paceline.mesh import Group
from paceline.slot import Slot

_MOST_UNDER_WAY = 2


@dataclass(frozen=True)
class Ways:
    """On which paths gradients go.

    Args:
        shard: scatters them; exact, on a process group of its own.
        replica: sums parts over the ranks that update the same; exact.
        group: the ranks of `shard`, by another process group, over which they agree.
        waits: whether a rank may wait for scatters during backward. Not if ranks wait for each other's
            parameters there: a rank that has run all its micro-batches gathers before it scatters.
    """

    shard: Collective
    replica: Collective
    group: Group
    net: Net
    waits: bool = True


@dataclass
class _Bucket:
    """Some slots that are scattered together.

    Args:
        shape: says where each part lies; it has no memory.
        total: this rank's row, summed over micro-batches [width].
        own_values: how many of them are values of parts; the rest is padding.
        own: these parts, in their shapes.
    """

    number: int
    shape: PartBuffer
    total: Tensor
    own_values: int
    missing: set[Slot]
    own: Mapping[Slot, Tensor]
    is_fresh: bool = True
    buffers: dict[int, PartBuffer] = field(default_factory=dict)
    block: int | None = None


class Scatterer:
    """Sums of parts, micro-batch by micro-batch.

    Args:
        tensors: what this rank computes with, by slot, in the model's order; equal on every rank of `ways`.
        parts: the part of each that every rank of the shard group gets.
        ways: over which ranks, how.
        bucket_bytes: see `Reducer`; a rank holds up to three such buckets at a time.
        counts: see `Reducer`.
        name: see `Reducer`.
    Wire: with K micro-batches on the rank that has most, K (S-1)/S n + 2 (R-1)/R n/S bytes for n bytes of
        gradients, S shard ranks and R replicas, and an all_reduce of 8 bytes.
    Exactness: sums have any order; equal bits on every rank that gets a part.
    Source: Rajbhandari et al. 2020, ZeRO, arXiv:1910.02054, section 5.2 (gradient partitioning).
    """

    by_micro_batch = True

    def __init__(
        self,
        tensors: Mapping[Slot, Tensor],
        parts: Parts,
        ways: Ways,
        bucket_bytes: int,
        *,
        counts: bool = True,
        name: str = "",
    ) -> None:
        self._tensors, self._parts, self._ways = tensors, parts, ways
        self._counts, self._name = counts, name
        self._row = ways.shard.group.rank
        self._buckets = [
            self._bucket(number, slots) for number, slots in enumerate(plan_buckets(tensors, bucket_bytes))
        ]
        self._home = {slot: bucket for bucket in self._buckets for slot in bucket.missing}
        self._blocks = self._make_blocks()
        self._under_way: deque[tuple[_Bucket, int, Handle]] = deque()
        self._next = self._rounds = self._launches = 0

    def _bucket(self, number: int, slots: Sequence[Slot]) -> _Bucket:
        shape = PartBuffer(
            slots, self._tensors, self._parts, lambda n, like: like.new_empty(n, device="meta")
        )
        like, width = self._tensors[slots[0]].detach(), shape.rows.shape[1]
        total = self._ways.replica.buffer(width, like, f"{self._name}{number}.own")
        own = sum(part.numel for s in slots if (part := self._parts[s][self._row]) is not None)
        return _Bucket(number, shape, total, own, set(slots), shape.views(total, self._row))

    def _make_blocks(self) -> Blocks:
        by_size = sorted(self._buckets, key=lambda bucket: bucket.shape.flat.numel())
        sizes = {bucket.total.dtype: bucket.shape.flat.numel() for bucket in by_size}
        return Blocks(sizes, self._buckets[0].total.device)

    def begin(self) -> None:
        """Open a step."""
        self._next = self._rounds = self._launches = 0
        for bucket in self._buckets:
            bucket.is_fresh, bucket.missing = True, set(bucket.shape.slots)

    def micro_batch(self, shards: range, is_last: bool) -> None:
        """What is ready from now on belongs to the next micro-batch; all of the one before is on its way."""
        self._require_nothing_missing()

    def ready(self, slot: Slot, grad: Tensor | None) -> None:
        """Copy a gradient; full buckets leave in turn."""
        bucket = self._home[slot]
        self._buffer_of(bucket).write(slot, grad)
        bucket.missing.discard(slot)
        while not self._buckets[self._next].missing:
            self._launch(self._buckets[self._next])
            self._next = (self._next + 1) % len(self._buckets)
            self._rounds += self._next == 0

    def close(self) -> None:
        """All micro-batches have run; agree on the largest number, and fill up to it with zeros."""
        self._require_nothing_missing()
        mine = torch.tensor([self._rounds], device=self._buckets[0].total.device)
        most = int(self._ways.net.all_reduce(mine, self._ways.group, "max").wait())
        for _ in range(self._rounds, most):
            for bucket in self._buckets:
                self._buffer_of(bucket).flat.zero_()
                self._launch(bucket)

    def finish(self) -> Gradients:
        """Wait for the sums of the own parts."""
        while self._under_way:
            self._settle()
        arriving = [self._over_replicas(bucket) for bucket in self._buckets]
        tensors: dict[Slot, Tensor | None] = {}
        norms: list[Tensor] = []
        for bucket, handle in zip(self._buckets, arriving, strict=True):
            total = handle.wait().view(-1)
            norms += torch._foreach_norm([total]) if self._counts else ()
            tensors.update(bucket.own)
        return Gradients(tensors, [bucket.total for bucket in self._buckets], norms)

    def commit(self) -> None:
        """Nothing is kept between steps."""

    def abort(self) -> None:
        """Let what was launched end, well or badly; forget it."""
        drain(handle for *_, handle in self._under_way)
        self._under_way.clear()
        self._blocks.give_all()
        for bucket in self._buckets:
            bucket.block = None
        self._ways.shard.abort()
        self._ways.replica.abort()
        self.begin()

    def lost(self) -> Sequence[tuple[str, Slot, Tensor]]:
        """Nothing is coded."""
        return ()

    def set_lost(self, found: Mapping[tuple[str, str], Tensor]) -> None:
        """There is no coder to take them."""

    # -- one bucket ---------------------------------------------------------------------------------------

    def _buffer_of(self, bucket: _Bucket) -> PartBuffer:
        """Where it is filled in; memory that another bucket has left, or new."""
        if bucket.block is None:
            self._take_what_came()
            bucket.block = self._blocks.take(bucket.total.dtype)
        block = bucket.block
        if block not in bucket.buffers:
            memory = self._blocks.memory[block]
            bucket.buffers[block] = PartBuffer(
                bucket.shape.slots, self._tensors, self._parts, lambda n, like: memory[:n]
            )
        return bucket.buffers[block]

    def _launch(self, bucket: _Bucket) -> None:
        self._take_what_came()
        turn = self._launches % _MOST_UNDER_WAY if self._ways.waits else bucket.number
        key = f"{self._name}{bucket.total.dtype}.{turn}"
        handle = self._ways.shard.reduce_scatter(self._buffer_of(bucket).rows, key)
        assert bucket.block is not None
        self._under_way.append((bucket, bucket.block, handle))
        bucket.block = None
        self._launches += 1
        bucket.missing = set(bucket.shape.slots)

    def _take_what_came(self) -> None:
        """Scatters that are complete; where this rank may wait, all but the last few."""
        while self._under_way:
            is_late = self._ways.waits and len(self._under_way) >= _MOST_UNDER_WAY
            if not (is_late or self._under_way[0][2].is_complete()):
                return
            self._settle()

    def _settle(self) -> None:
        """Wait for the scatter that was launched first, and add what it brings."""
        bucket, block, handle = self._under_way.popleft()
        arrived = handle.wait().view(-1)[: bucket.own_values]
        own = bucket.total[: bucket.own_values]
        (own.copy_ if bucket.is_fresh else own.add_)(arrived)
        bucket.is_fresh = False
        self._blocks.give(block)

    def _over_replicas(self, bucket: _Bucket) -> Handle:
        if bucket.is_fresh:  # nobody had a micro-batch
            bucket.total.zero_()
        bucket.total[bucket.own_values :].zero_()  # padding has other buckets' values
        return self._ways.replica.all_reduce(bucket.total, f"{self._name}{bucket.number}.own")

    def _require_nothing_missing(self) -> None:
        """Every slot of the micro-batch that was under way has been announced."""
        begun = self._next > 0 or any(bucket.block is not None for bucket in self._buckets)
        missing = [slot.name for bucket in self._buckets[self._next :] for slot in bucket.missing]
        if begun and missing:
            raise CommunicationError(
                f"{sorted(missing)} were never called ready",
                next_step="the layout announces every slot once a micro-batch, None without a gradient",
            )
