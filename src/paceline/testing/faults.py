"""Known mistakes of distributed training, one piece each, to prove that verification finds them.

Every fault is a `Pieces` with one constructor exchanged; nothing else of the session changes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from torch import Tensor, nn

from paceline.comm import BucketReducer, Gradients, PlainWire, Reducer, Tally
from paceline.comm.reducer import WrappedReducer
from paceline.comm.wire import Waits
from paceline.data import LoadedUnit, LockstepWork, Stream, Unit
from paceline.layout import GradSink, Placed, Replicate, Sums, UnitBuffers
from paceline.optim import Schedule, build_schedule
from paceline.sync import EveryStep, Tail, Update, UpdateTail
from paceline.training import Pieces


class SumInsteadOfMean(UpdateTail):
    """Divides by the count of one rank, so P replicas add up."""

    num_replicas = 2

    def apply(self, grads: Gradients, tally: Tally) -> Update:
        """Pretend that the global count is the local one."""
        return super().apply(grads, replace(tally, count=tally.count / self.num_replicas))


class MeanOfMeans(EveryStep):
    """Weights every rank alike, whatever its number of samples."""

    def step(self, work: LockstepWork, stream: Stream, placed: Placed, tail: Tail) -> tuple[Tally, Update]:
        """Scale this rank's gradient by (mean share / own share)."""
        step = tail.state.step
        own = sum(len(u.indices) for u in work.units(step))
        fair = work.order.batch_size(step) / work.num_replicas
        kept, self.reducer = self.reducer, _RescaledReducer(self.reducer, fair / own if own else 1.0)
        try:
            return super().step(work, stream, placed, tail)
        finally:
            self.reducer = kept


class _RescaledReducer(WrappedReducer):
    def __init__(self, inner: Reducer, factor: float) -> None:
        super().__init__(inner)
        self.factor = factor

    def ready(self, index: int, grad: Tensor | None) -> None:
        self.inner.ready(index, None if grad is None else grad * self.factor)


class _DeafWire(PlainWire):
    """Sums every buffer but the first."""

    def all_reduce(self, x: Tensor, key: str) -> Waits:
        alone = replace(self.group, ranks=self.group.ranks[:1], rank=0, handle=None)
        return self.net.all_reduce(x, alone if key == "0" else self.group)


class OneBucketNotReduced(BucketReducer):
    """Forgets the all_reduce of the first bucket."""

    def __init__(self, parameters: Sequence[nn.Parameter], wire: PlainWire, bucket_bytes: int) -> None:
        super().__init__(parameters, _DeafWire(wire.net, wire.group), bucket_bytes)


class StaleBucket(BucketReducer):
    """Hands out the first bucket of the step before."""

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self._kept: Tensor | None = None

    def finish(self) -> Gradients:
        """Swap the fresh sums for those of the last step."""
        grads = super().finish()
        flat = self._buckets[0].flat
        fresh = flat.clone()
        if self._kept is not None:
            flat.copy_(self._kept)
        self._kept = fresh
        return grads


@dataclass(frozen=True)
class SameData(LockstepWork):
    """Every rank takes the units of rank 0."""

    def units(self, step: int) -> tuple[Unit, ...]:
        """The units of the first replica."""
        return self.first.units(step)

    def num_units(self, step: int) -> int:
        """As many as the first replica has."""
        return self.first.num_units(step)

    @property
    def first(self) -> LockstepWork:
        """The work of rank 0."""
        return LockstepWork(self.order, self.shards, self.seed, 0, self.num_replicas)


@dataclass(frozen=True)
class SharedDropoutSeed(LockstepWork):
    """The keys of a rank's units are those of rank 0."""

    def units(self, step: int) -> tuple[Unit, ...]:
        """Own samples, keys of the first replica at the same place (its last one where it has fewer)."""
        first = LockstepWork(self.order, self.shards, self.seed, 0, self.num_replicas).units(step)
        keys = [first[min(place, len(first) - 1)].key for place in range(self.num_units(step))]
        return tuple(replace(u, key=k) for u, k in zip(super().units(step), keys, strict=True))


class WrongClipNorm(UpdateTail):
    """Clips with the norm before the division by the count."""

    def apply(self, grads: Gradients, tally: Tally) -> Update:
        """Remember the count, for the wrong norm."""
        self._count = tally.count
        return super().apply(grads, tally)

    def _clip(self, norm: float) -> float:
        return super()._clip(norm * self._count)


class OffByOneAccumulation(Replicate):
    """Announces the gradients before the last micro-batch has added to them."""

    def _forward_backward(self, loaded: LoadedUnit, sums: Sums, scale: float) -> None:
        before = [None if p.grad is None else p.grad.clone() for p in self.parameters]
        sink, self._sink = self._sink, None
        super()._forward_backward(loaded, sums, scale)
        if sink is not None and sums.units > 1:
            for p, grad in zip(self.parameters, before, strict=True):
                p.grad = grad
        self._sink = sink


class UnsyncedBuffers(Replicate):
    """Keeps the running statistics of its own units."""

    def __init__(self, model: nn.Module, *args: Any, **kwargs: Any) -> None:
        super().__init__(model, *args, **kwargs)
        self.buffers = _OwnBuffers(model)

    def run(self, units: Iterable[LoadedUnit], num_units: int, sink: GradSink, scale: float) -> Sums:
        """Remember how many units are this rank's own."""
        self.buffers.own_units = num_units  # type: ignore[attr-defined]
        return super().run(units, num_units, sink, scale)


class _OwnBuffers(UnitBuffers):
    own_units = 0

    def end_step(self, change: Tensor, units: float) -> None:
        super().end_step(self.change, self.own_units)


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


def _tail_for(world: int) -> type[UpdateTail]:
    return type("SumInsteadOfMean", (SumInsteadOfMean,), {"num_replicas": world})


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
    "sum-instead-of-mean": Fault(lambda p: Pieces(tail=_tail_for(p)), ("sum instead of mean",)),
    "mean-of-means": Fault(lambda p: Pieces(rule=MeanOfMeans), ("mean of means",)),
    "bucket-not-reduced": Fault(lambda p: Pieces(reducer=OneBucketNotReduced), ("not reduced",)),
    "same-data": Fault(lambda p: Pieces(work=SameData), ("same data on every rank",)),
    "shared-dropout-seed": Fault(lambda p: Pieces(work=SharedDropoutSeed), ("shared dropout seed",)),
    "wrong-clip-norm": Fault(lambda p: Pieces(tail=WrongClipNorm), ("wrong clip norm",)),
    "stale-buffer": Fault(lambda p: Pieces(reducer=StaleBucket), ("stale buffer",)),
    "off-by-one-accumulation": Fault(
        lambda p: Pieces(placed=OffByOneAccumulation), ("off-by-one accumulation",)
    ),
    "unsynced-buffers": Fault(lambda p: Pieces(placed=UnsyncedBuffers), ("buffers not synchronised",)),
    "schedule-off-by-one": Fault(lambda p: Pieces(schedule=_schedule_off_by_one), ("schedule off by one",)),
}
