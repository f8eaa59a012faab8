"""Known mistakes of distributed training, one piece each, to prove that verification finds them.

Every fault is a `Pieces` with one constructor exchanged; nothing else of the session changes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

from torch import Tensor

from paceline.comm import (
    Collective,
    Gradients,
    GradientSink,
    Handle,
    NativeCollective,
    Reducer,
    Reduction,
    Tally,
)
from paceline.comm.routes import SharedMemoryCollective
from paceline.data import LoadedBatch, LockstepWork, MicroBatch, Work
from paceline.layout import Holding, MicroBatchBuffers, Placed, Replicate, Sums
from paceline.optim import Schedule, build_schedule
from paceline.slot import Slot
from paceline.sync import EveryStep, Update, UpdateStep, Updating
from paceline.testing.faults_of_steps import (
    Emptied,
    Narrow,
    NotCleared,
    Parts,
    constant_rate,
    divided_twice,
    drifting,
    forget_state,
    no_clip,
    no_step,
    norm_of_some,
    not_divided,
    other_options,
    step_twice,
)
from paceline.training import Pieces


def sum_instead_of_mean(num_replicas: int) -> Callable[[Parts], Parts]:
    """Divide by the count of one rank, so that replicas add up."""

    def edit(parts: Parts) -> Parts:
        right = parts["divide"]

        def divide(record: Updating) -> None:
            right(record)
            record.divisor /= num_replicas
            record.multiplier *= num_replicas

        return {**parts, "divide": divide}

    return edit


def wrong_clip_norm(parts: Parts) -> Parts:
    """Clip with the norm before the division by the count."""
    right = parts["clip"]

    def clip(record: Updating) -> None:
        norm = record.norm
        record.norm *= record.tally.count
        right(record)
        record.norm = norm

    return {**parts, "clip": clip}


class MeanOfMeans(EveryStep):
    """Weights every rank alike, whatever its number of samples."""

    def step(
        self, work: Work, stream: Iterator[LoadedBatch], placed: Placed, update_step: UpdateStep
    ) -> tuple[Tally, Update]:
        """Scale this rank's gradient by (mean share / own share)."""
        step = update_step.state.step
        own = sum(len(u.indices) for u in work.micro_batches(step))
        fair = work.num_samples(step) / self._group.size
        kept, self.reducer = self.reducer, _Rescaled(self.reducer, fair / own if own else 1.0)
        try:
            return super().step(work, stream, placed, update_step)
        finally:
            self.reducer = kept


class _Rescaled:
    """A reduction of gradients times a factor."""

    def __init__(self, inner: Reduction, factor: float) -> None:
        self._inner, self._factor = inner, factor

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)

    def ready(self, slot: Slot, grad: Tensor | None) -> None:
        self._inner.ready(slot, None if grad is None else grad * self._factor)


class DeafCollective(NativeCollective):
    """Sums every buffer but the first."""

    def all_reduce(self, x: Tensor, key: str) -> Handle:
        """Leave the first buffer alone."""
        return Handle.ready(x) if key == "0.0" else super().all_reduce(x, key)


def deaf(collective: Collective) -> Collective:
    """Forget the all_reduce of the first bucket."""
    if isinstance(collective, NativeCollective | SharedMemoryCollective):
        return DeafCollective(collective.net, collective.group)
    return collective


class StaleBucket(Reducer):
    """Hands out the first bucket of the step before."""

    _kept: Tensor | None = None

    def finish(self) -> Gradients:
        """Swap the fresh sums for those of the last step."""
        grads = super().finish()
        flat = grads.flats[0]
        fresh = flat.clone()
        if self._kept is not None:
            flat.copy_(self._kept)
        self._kept = fresh
        return grads


@dataclass(frozen=True)
class SameData(LockstepWork):
    """Every rank takes the micro-batches of rank 0."""

    def micro_batches(self, step: int, version: int | None = None) -> tuple[MicroBatch, ...]:
        """The micro-batches of the first replica."""
        return self.first.micro_batches(step, version)

    def num_micro_batches(self, step: int) -> int:
        """As many as the first replica has."""
        return self.first.num_micro_batches(step)

    @property
    def first(self) -> LockstepWork:
        """The work of rank 0."""
        return LockstepWork(self.order, self.shards, self.seed, 0, self.num_replicas)


@dataclass(frozen=True)
class SharedDropoutSeed(LockstepWork):
    """The keys of a rank's micro-batches are those of rank 0."""

    def micro_batches(self, step: int, version: int | None = None) -> tuple[MicroBatch, ...]:
        """Own samples, keys of the first replica at the same place (its last one where it has fewer)."""
        first = LockstepWork(self.order, self.shards, self.seed, 0, self.num_replicas).micro_batches(step)
        keys = [first[min(place, len(first) - 1)].key for place in range(self.num_micro_batches(step))]
        return tuple(replace(u, key=k) for u, k in zip(super().micro_batches(step), keys, strict=True))


class OffByOneAccumulation(Replicate):
    """Announces the gradients before the last micro-batch has added to them."""

    def _forward_backward(self, micro_batch: MicroBatch, batch: Any, sums: Sums, scale: float) -> None:
        parameters = self.holding.computes.values()
        before = [None if p.grad is None else p.grad.clone() for p in parameters]
        sink, self.gradients._sink = self.gradients._sink, None
        super()._forward_backward(micro_batch, batch, sums, scale)
        if sink is not None and sums.micro_batches > 1:
            for p, grad in zip(parameters, before, strict=True):
                p.grad = grad
        self.gradients._sink = sink
        self.gradients.close()


class UnsyncedBuffers(Replicate):
    """Keeps the running statistics of its own micro-batches."""

    def __init__(self, holding: Holding, *args: Any, **kwargs: Any) -> None:
        super().__init__(holding, *args, **kwargs)
        self.buffers = _OwnBuffers(holding.model)

    def run(self, micro_batches: Iterable[LoadedBatch], count: int, sink: GradientSink, scale: float) -> Sums:
        """Remember how many micro-batches are this rank's own."""
        self.buffers.own_micro_batches = count  # type: ignore[attr-defined]
        return super().run(micro_batches, count, sink, scale)


class _OwnBuffers(MicroBatchBuffers):
    own_micro_batches = 0

    def end_step(self, change: Tensor, micro_batches: float) -> None:
        super().end_step(self.change, self.own_micro_batches)


class _EarlySchedule:
    """The rate of the next update."""

    def __init__(self, inner: Schedule) -> None:
        self.inner = inner

    def factor(self, update: int) -> float:
        return self.inner.factor(update + 1)

    def apply(self, optimizer: Any, update: int) -> float:
        return self.inner.apply(optimizer, update + 1)


def _schedule_off_by_one(*args: Any) -> Any:
    return _EarlySchedule(build_schedule(*args))


@dataclass(frozen=True)
class Fault:
    """A known mistake.

    Args:
        pieces: builds the faulty pieces for a number of replicas.
        causes: the diagnoses that name it rightly.
    """

    pieces: Callable[[int], Pieces]
    causes: tuple[str, ...]


FAULTS: Mapping[str, Fault] = {
    "sum-instead-of-mean": Fault(lambda p: Pieces(update=sum_instead_of_mean(p)), ("sum instead of mean",)),
    "mean-of-means": Fault(lambda p: Pieces(rule=MeanOfMeans), ("mean of means",)),
    "bucket-not-reduced": Fault(lambda p: Pieces(collective=deaf), ("not reduced",)),
    "same-data": Fault(lambda p: Pieces(work=SameData), ("same data on every rank",)),
    "shared-dropout-seed": Fault(lambda p: Pieces(work=SharedDropoutSeed), ("shared dropout seed",)),
    "wrong-clip-norm": Fault(lambda p: Pieces(update=wrong_clip_norm), ("wrong clip norm",)),
    "stale-buffer": Fault(lambda p: Pieces(reducer=StaleBucket), ("stale buffer",)),
    "off-by-one-accumulation": Fault(
        lambda p: Pieces(whole=OffByOneAccumulation), ("off-by-one accumulation",)
    ),
    "unsynced-buffers": Fault(lambda p: Pieces(whole=UnsyncedBuffers), ("buffers not synchronised",)),
    "schedule-off-by-one": Fault(lambda p: Pieces(schedule=_schedule_off_by_one), ("schedule off by one",)),
    "no-clip": Fault(lambda p: Pieces(update=no_clip), ("wrong clip norm",)),
    "norm-without-a-tensor": Fault(lambda p: Pieces(norm=norm_of_some), ("wrong clip norm",)),
    "not-divided": Fault(lambda p: Pieces(update=not_divided), ("not divided by the count",)),
    "divided-twice": Fault(lambda p: Pieces(update=divided_twice(p)), ("divided twice",)),
    "other-schedule": Fault(lambda p: Pieces(schedule=constant_rate), ("wrong learning rate",)),
    "not-cleared": Fault(lambda p: Pieces(reducer=NotCleared), ("not cleared",)),
    "bucket-lost": Fault(lambda p: Pieces(reducer=Emptied), ("no gradient",)),
    "fp16-accumulation": Fault(lambda p: Pieces(reducer=Narrow), ("digits lost",)),
    "stepped-twice": Fault(lambda p: Pieces(update=step_twice), ("stepped twice",)),
    "not-updated": Fault(lambda p: Pieces(update=no_step), ("not updated",)),
    "optimizer-state-lost": Fault(lambda p: Pieces(update=forget_state), ("optimizer state lost",)),
    "other-weight-decay": Fault(lambda p: Pieces(update=other_options), ("wrong optimizer options",)),
    "ranks-drift": Fault(lambda p: Pieces(update=drifting), ("ranks drifted apart",)),
}
