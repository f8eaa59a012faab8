"""The micro-batches of each rank: the global batch of a step, cut into virtual shards that replicas share.

Invariant: the micro-batches of a step (their samples and keys) do not depend on the number of replicas;
only which rank runs them does. Over all replicas every sample of the batch is in exactly one micro-batch.
This module moves no data. `TrainingFeed` combines the work of a rank with the loader that reads it, for a
sync rule.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field, replace
from typing import Any, Protocol

from paceline.data.sample_order import BatchOrder, SampleIndices
from paceline.errors import StrategyError, format_count
from paceline.state.keys import key


@dataclass(frozen=True, eq=False)
class MicroBatch:
    """A virtual shard of a step: the samples of one forward and backward pass.

    Args:
        step: global step.
        shard: virtual shard, in range(shards).
        indices: sample indices, int64 [N], N >= 1; read-only.
        key: seed of all random numbers in this micro-batch; the same on any rank.
        version: number of updates of the weights with which it is computed; None: the rank's current ones.
        seed: of the run; with the step and the index of a sample, it seeds what is drawn while that is read,
            however the batch is divided.
    """

    step: int
    shard: int
    indices: SampleIndices
    key: int
    version: int | None = None
    seed: int = 0


@dataclass(frozen=True, eq=False)
class LoadedBatch:
    """A micro-batch with its batch, on the device of the rank that reads it."""

    micro_batch: MicroBatch
    batch: Any


class MicroBatchWork(Protocol):
    """The micro-batches of one rank in each step.

    Sync rules use it without knowing what decides: an order of samples (`LockstepWork`), a server that
    assigns parts of batches, a client with its own data, or an actor that makes samples. The number of
    micro-batches and the micro-batches depend only on the step. Their order within a step does not matter:
    where bits matter, sums are keyed by shard.
    """

    @property
    def shards(self) -> int:
        """Return a number above that of every shard of a step, on any rank."""

    def num_samples(self, step: int) -> int:
        """Return the approximate number of samples of a step over all ranks; it only scales losses."""

    @property
    def steps_per_epoch(self) -> int:
        """Return the steps of one pass over the data; 0: there are no passes."""

    def num_micro_batches(self, step: int) -> int:
        """Return the number of micro-batches of this rank in a step."""

    def micro_batches(self, step: int, version: int | None = None) -> tuple[MicroBatch, ...]:
        """Return this rank's micro-batches of a step.

        Args:
            step: global step.
            version: of the weights that a server sends with them.
        """

    def part(self, number: int, of: int) -> MicroBatchWork:
        """Return the share of rank `number` if the same steps are divided among `of` ranks."""


def split_evenly(num_items: int, parts: int, part: int) -> range:
    """Return the contiguous share of `part` if items are divided among `parts` as evenly as possible.

    Shares are disjoint, cover range(num_items) in order, and differ in size by at most one. The larger shares
    are spread out and not first, so that the few samples of a tail batch do not all go to the first replica.
    """
    return range(num_items * part // parts, num_items * (part + 1) // parts)


@dataclass(frozen=True)
class LockstepWork:
    """The work of one replica if all replicas take part in every step.

    Args:
        order: the global batches.
        shards: virtual shards per step, independent of the number of replicas.
        seed: the seed of the run; keys of micro-batches derive from it.
        replica_rank: this replica, in range(num_replicas).
        num_replicas: at most `shards`.
        shares: number of shards of each replica; None: as even as possible.
    Raises:
        StrategyError: more replicas than virtual shards.
    """

    order: BatchOrder
    shards: int
    seed: int
    replica_rank: int = 0
    num_replicas: int = 1
    shares: tuple[int, ...] | None = None
    _dealt: dict[int, list[tuple[int, range]]] = field(
        default_factory=dict, init=False, repr=False, compare=False
    )

    def __post_init__(self) -> None:
        if self.num_replicas > self.shards:
            raise StrategyError(
                f"{self.num_replicas} replicas cannot share {format_count(self.shards, 'virtual shard')}:"
                " some would be idle",
                where="batch.shards",
                next_step=f"set batch.shards to {self.num_replicas} or more, or use"
                f" {format_count(self.shards, 'replica')}",
            )

    def num_samples(self, step: int) -> int:
        return self.order.batch_size(step)

    @property
    def steps_per_epoch(self) -> int:
        return self.order.steps_per_epoch

    def part(self, number: int, of: int) -> LockstepWork:
        return replace(self, replica_rank=number, num_replicas=of, shares=None)

    def dealt(self, shares: Sequence[int]) -> LockstepWork:
        """Return the same steps with another number of shards for each replica."""
        return replace(self, shares=tuple(shares))

    def num_own_samples(self, step: int) -> int:
        """Return the number of samples of this replica in `step`."""
        return sum(len(positions) for _, positions in self._places(step))

    def num_micro_batches(self, step: int) -> int:
        """Return the number of micro-batches of this replica in `step`, without computing their samples."""
        return len(self._places(step))

    def micro_batches(self, step: int, version: int | None = None) -> tuple[MicroBatch, ...]:
        """Return this replica's micro-batches of `step`, by shard; empty shards of a tail batch have none."""
        places = self._places(step)
        if not places:
            return ()
        # The shards of a replica are neighbours, so one range of the order covers all of them.
        first, last = places[0][1].start, places[-1][1].stop
        indices = self.order.batch(step, range(first, last))
        # All micro-batches are views of this array, so nothing may write to it.
        indices.flags.writeable = False
        return tuple(
            MicroBatch(
                step,
                shard,
                indices[p.start - first : p.stop - first],
                key(self.seed, "unit", step, shard),
                version,
                self.seed,
            )
            for shard, p in places
        )

    def _block(self) -> range:
        """Return the contiguous range of shards of this replica."""
        if self.shares is None:
            return split_evenly(self.shards, self.num_replicas, self.replica_rank)
        first = sum(self.shares[: self.replica_rank])
        return range(first, first + self.shares[self.replica_rank])

    def _places(self, step: int) -> list[tuple[int, range]]:
        """Return this replica's non-empty shards of `step`, each with its range of positions in the batch.

        They follow from the size of the batch, so they are cached by size.
        """
        num_samples = self.order.batch_size(step)
        places = self._dealt.get(num_samples)
        if places is None:
            places = self._dealt[num_samples] = self._deal(num_samples)
        return places

    def _deal(self, num_samples: int) -> list[tuple[int, range]]:
        places = [(shard, split_evenly(num_samples, self.shards, shard)) for shard in self._block()]
        return [(shard, positions) for shard, positions in places if positions]


_MIN_PAUSES = 20


class BatchStream(Iterator[LoadedBatch], AbstractContextManager["BatchStream"], Protocol):
    """An iterator of micro-batches with their batches; the caller that opens a stream closes it."""

    def close(self) -> None:
        """Release the workers and buffers of the stream; can be called twice."""


class BatchReader(Protocol):
    """A source of batches: a `SampleLoader` reads samples, `GeneratedBatches` make them on request.

    Attributes:
        cache_hits: samples that were found in the cache.
        cache_lookups: samples that were looked up there.
    """

    cache_hits: int
    cache_lookups: int

    def open(self, micro_batches: Iterable[MicroBatch]) -> BatchStream:
        """Start to read micro-batches, which may be endless and are taken when they are needed."""


def _pause_intervals(num_steps: int, intervals: Sequence[int]) -> Sequence[int]:
    """Return the intervals of pauses, with one that shows progress and lets a run be stopped."""
    progress = max(1, num_steps // _MIN_PAUSES)
    return [n for n in (*intervals, progress) if n > 0]


@dataclass(frozen=True, eq=False)
class TrainingFeed:
    """The data of a sync rule: the micro-batches of this rank and the loader that reads them.

    Args:
        work: this rank's micro-batches of any step.
        loader: reads them.
        num_steps: the length of the run.
        intervals: in steps, at which the state is needed, to be saved or evaluated.
    """

    work: MicroBatchWork
    loader: BatchReader
    num_steps: int
    intervals: Sequence[int] = ()

    def next_pause(self, step: int) -> int:
        """Return the next step after `step` before which all ranks must have the same state."""
        pauses = _pause_intervals(self.num_steps, self.intervals)
        return min(self.num_steps, *((step // n + 1) * n for n in pauses))

    def open(self, micro_batches: Iterable[MicroBatch]) -> BatchStream:
        """Start to read micro-batches; the caller closes the stream."""
        return self.loader.open(micro_batches)

    def from_step(self, step: int) -> BatchStream:
        """Start to read this rank's micro-batches from a step to the end of the run."""
        return self.open(self._micro_batches(step))

    def _micro_batches(self, step: int) -> Iterator[MicroBatch]:
        for k in range(step, self.num_steps):
            yield from self.work.micro_batches(k)
