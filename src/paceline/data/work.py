"""Who does what: the global batch of a step, cut into virtual shards, and the shards dealt to replicas.

Invariant: the micro-batches of a step (their samples and their keys) do not depend on the number of replicas;
only who runs them does. Over all replicas every sample of the batch is in exactly one micro-batch.
This module moves no data; it is the whole of what a lockstep rule knows about data position.

The feed: which micro-batches there are, and how a rule reads them.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field, replace
from typing import Any, Protocol

from paceline.data.sample_order import BatchOrder, SampleIndices
from paceline.errors import StrategyError
from paceline.state.keys import key


@dataclass(frozen=True, eq=False)
class MicroBatch:
    """One virtual shard of one step: one forward and one backward pass.

    Args:
        step: global step.
        shard: virtual shard, in range(shards).
        indices: sample indices, int64 [N], N >= 1; read-only.
        key: seeds whatever is random in this micro-batch; equal wherever the micro-batch runs.
        version: how many updates the weights have had that it is computed with; None: those of its rank.
    """

    step: int
    shard: int
    indices: SampleIndices
    key: int
    version: int | None = None


@dataclass(frozen=True, eq=False)
class LoadedBatch:
    """A micro-batch and its batch, on the device of whoever reads it."""

    micro_batch: MicroBatch
    batch: Any


class MicroBatchWork(Protocol):
    """What one rank has to do in each step: how many micro-batches, which, with which version of the weights.

    Rules ask it, and do not know who decides: an order of samples (`LockstepWork`), a server that hands out
    parts, a client that has data of its own, an actor that makes samples. A number of micro-batches is asked
    for before they are; both depend on the step alone. Micro-batches of a step may come in any order: their
    sums are keyed by shard where bits matter.
    """

    @property
    def shards(self) -> int:
        """No shard of a step has a number as high as this, on any rank."""

    def num_samples(self, step: int) -> int:
        """About how many samples a step has over all ranks; scales losses, so it need not be exact."""

    @property
    def steps_per_epoch(self) -> int:
        """Steps of one pass over the data; 0: there is no such pass."""

    def num_micro_batches(self, step: int) -> int:
        """How many micro-batches this rank has in a step."""

    def micro_batches(self, step: int, version: int | None = None) -> tuple[MicroBatch, ...]:
        """This rank's micro-batches of a step.

        Args:
            version: of the weights that whoever hands them out sends along.
        """

    def part(self, number: int, of: int) -> MicroBatchWork:
        """The same steps dealt to `of` ranks, as the rank of this number has them."""


def split_evenly(num_items: int, parts: int, part: int) -> range:
    """The contiguous share of `part` when items are dealt to `parts` as evenly as possible.

    Shares are disjoint, cover range(num_items) in order, and differ in size by at most one. The larger shares
    are spread out rather than first, so that the few samples of a tail batch do not all fall to the first
    replica. Serves for samples, shards and files alike.
    """
    return range(num_items * part // parts, num_items * (part + 1) // parts)


@dataclass(frozen=True)
class LockstepWork:
    """The micro-batches of one replica when all replicas take part in every step.

    Args:
        order: the global batches.
        shards: virtual shards per step, independent of the number of replicas.
        seed: the seed of the run; keys of micro-batches derive from it.
        replica_rank: this replica, in range(num_replicas).
        num_replicas: at most `shards`.
        shares: how many of the shards each replica runs; None: as evenly as possible.
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
                f"{self.num_replicas} replicas cannot share {self.shards} virtual shards: some would idle",
                where="batch.shards",
                next_step=f"set batch.shards to {self.num_replicas} or more, or use {self.shards} replicas",
            )

    def num_samples(self, step: int) -> int:
        """See `MicroBatchWork`; exact."""
        return self.order.batch_size(step)

    @property
    def steps_per_epoch(self) -> int:
        """See `MicroBatchWork`."""
        return self.order.steps_per_epoch

    def part(self, number: int, of: int) -> LockstepWork:
        """See `MicroBatchWork`."""
        return replace(self, replica_rank=number, num_replicas=of, shares=None)

    def dealt(self, shares: Sequence[int]) -> LockstepWork:
        """The same steps, of which each replica runs so many shards."""
        return replace(self, shares=tuple(shares))

    def num_own_samples(self, step: int) -> int:
        """How many samples of `step` this replica has."""
        return sum(len(place) for _, place in self._places(step))

    def num_micro_batches(self, step: int) -> int:
        """How many micro-batches this replica has in `step`; no order is computed for it."""
        return len(self._places(step))

    def micro_batches(self, step: int, version: int | None = None) -> tuple[MicroBatch, ...]:
        """This replica's micro-batches of `step`, by shard; none for an empty shard of a tail batch."""
        places = self._places(step)
        if not places:
            return ()
        first, last = places[0][1].start, places[-1][1].stop
        indices = self.order.batch(step, range(first, last))
        indices.flags.writeable = False
        return tuple(
            MicroBatch(
                step,
                shard,
                indices[p.start - first : p.stop - first],
                key(self.seed, "unit", step, shard),
                version,
            )
            for shard, p in places
        )

    def _block(self) -> range:
        """The contiguous run of shards that is this replica's."""
        if self.shares is None:
            return split_evenly(self.shards, self.num_replicas, self.replica_rank)
        first = sum(self.shares[: self.replica_rank])
        return range(first, first + self.shares[self.replica_rank])

    def _places(self, step: int) -> list[tuple[int, range]]:
        """This replica's shards of `step` that are not empty, each with its places in the global batch.

        They follow from the size of the batch, so they are worked out once for each size.
        """
        num_samples = self.order.batch_size(step)
        found = self._dealt.get(num_samples)
        if found is None:
            found = self._dealt[num_samples] = self._deal(num_samples)
        return found

    def _deal(self, num_samples: int) -> list[tuple[int, range]]:
        mine = self._block()
        places = [(shard, split_evenly(num_samples, self.shards, shard)) for shard in mine]
        return [(shard, place) for shard, place in places if place]


_MIN_PAUSES = 20


class BatchStream(Iterator[LoadedBatch], AbstractContextManager["BatchStream"], Protocol):
    """Micro-batches with their batches, as somebody takes them; whoever opens a stream closes it."""

    def close(self) -> None:
        """Let go of what makes the batches; may be called twice."""


class BatchReader(Protocol):
    """Makes batches of micro-batches: a `SampleLoader` reads samples, `GeneratedBatches` asks whoever acts.

    Attributes:
        cache_hits, cache_lookups: samples that were taken from memory, and that were looked for there.
    """

    cache_hits: int
    cache_lookups: int

    def open(self, micro_batches: Iterable[MicroBatch]) -> BatchStream:
        """Start, finitely or endlessly; micro-batches are taken as they are needed."""


def _pause_intervals(num_steps: int, intervals: Sequence[int]) -> Sequence[int]:
    """Every so many steps a pause."""
    seen = max(1, num_steps // _MIN_PAUSES)  # so that progress shows and a run can be stopped
    return [n for n in (*intervals, seen) if n > 0]


@dataclass(frozen=True, eq=False)
class TrainingFeed:
    """What a rule trains on.

    Args:
        work: this replica's micro-batches of any step.
        loader: makes batches of them.
        num_steps: the length of the run.
        intervals: every so many steps the state is wanted, to be saved or evaluated.
    """

    work: MicroBatchWork
    loader: BatchReader
    num_steps: int
    intervals: Sequence[int] = ()

    def next_pause(self, step: int) -> int:
        """The next step, after `step`, before which a rule must come to rest if it does not at every step."""
        wanted = _pause_intervals(self.num_steps, self.intervals)
        return min(self.num_steps, *((step // n + 1) * n for n in wanted))

    def open(self, micro_batches: Iterable[MicroBatch]) -> BatchStream:
        """Start reading some micro-batches; whoever opens a stream closes it."""
        return self.loader.open(micro_batches)

    def from_step(self, step: int) -> BatchStream:
        """This replica's micro-batches from a step to the end of the run."""
        return self.open(self._micro_batches(step))

    def _micro_batches(self, step: int) -> Iterator[MicroBatch]:
        for k in range(step, self.num_steps):
            yield from self.work.micro_batches(k)
