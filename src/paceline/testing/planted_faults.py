"""Planted faults: known mistakes of distributed training, one component each, to prove that verification
finds them.

Every fault is a `Components` with one constructor replaced; nothing else of the session changes. Mistakes in
the data, in the reduction, in the update and in the schedule are here, with the diagnoses that name them
correctly.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from paceline.comm.collectives.collective_protocol import Collective
from paceline.comm.handle import Handle
from paceline.comm.reduction.bucket_reducer import BucketReducer
from paceline.comm.reduction.gradients import GradientReduction, Gradients, GradientSink
from paceline.comm.routes.native import NativeCollective
from paceline.comm.routes.shared_memory import SharedMemoryCollective
from paceline.comm.tally import StepTally
from paceline.data.work import LoadedBatch, LockstepWork, MicroBatch, MicroBatchWork
from paceline.federated.cohort_table import RETURNED, CohortTable
from paceline.federated.rounds import FederatedRounds
from paceline.optim.lr_schedule import LearningRateSchedule, build_schedule
from paceline.optim.slot_norms import SlotGroup
from paceline.parallel.data_parallel import ReplicatedRunner
from paceline.parallel.model_buffers import MicroBatchBuffers
from paceline.parallel.model_runner import LossSums, ModelRunner
from paceline.parallel.session_context import Components
from paceline.parallel.sharded_model import ShardedModel
from paceline.state.slot import TensorSlot
from paceline.sync.every_step import EveryStep
from paceline.sync.update import GradientNorm, PendingUpdate, UpdatePart, UpdateResult, UpdateStep

UpdateParts = dict[str, UpdatePart]


def no_clip(parts: UpdateParts) -> UpdateParts:
    """Leave out the clip."""
    return {**parts, "clip": lambda record: None}


def not_divided(parts: UpdateParts) -> UpdateParts:
    """Leave out the division by the count, so that the update uses the sum."""
    correct = parts["divide"]

    def divide(record: PendingUpdate) -> None:
        correct(record)
        record.divisor /= record.tally.count
        record.multiplier *= record.tally.count

    return {**parts, "divide": divide}


def divided_twice(num_replicas: int) -> Any:
    """Divide by the number of replicas a second time."""

    def edit(parts: UpdateParts) -> UpdateParts:
        correct = parts["divide"]

        def divide(record: PendingUpdate) -> None:
            correct(record)
            record.divisor *= num_replicas
            record.multiplier /= num_replicas

        return {**parts, "divide": divide}

    return edit


def step_twice(parts: UpdateParts) -> UpdateParts:
    """Call the optimizer's step a second time."""
    correct = parts["step"]

    def step(record: PendingUpdate) -> None:
        correct(record)
        record.state.optimizer.step()

    return {**parts, "step": step}


def no_step(parts: UpdateParts) -> UpdateParts:
    """Restore the parameters after the step of the optimizer."""
    correct = parts["step"]

    def step(record: PendingUpdate) -> None:
        before = [p.detach().clone() for p in record.updates.values()]
        correct(record)
        with torch.no_grad():
            for p, value in zip(record.updates.values(), before, strict=True):
                p.copy_(value)

    return {**parts, "step": step}


def clear_optimizer_state(parts: UpdateParts) -> UpdateParts:
    """Clear the state of the optimizer before every step."""
    correct = parts["step"]

    def step(record: PendingUpdate) -> None:
        record.state.optimizer.state.clear()
        correct(record)

    return {**parts, "step": step}


def decay_everything(parts: UpdateParts) -> UpdateParts:
    """Set the same weight decay for every parameter group."""
    correct = parts["step"]

    def step(record: PendingUpdate) -> None:
        for group in record.state.optimizer.param_groups:
            group["weight_decay"] = 0.3
        correct(record)

    return {**parts, "step": step}


def drift_per_rank(parts: UpdateParts) -> UpdateParts:
    """Add a different value on each rank after the step."""
    correct = parts["step"]

    def step(record: PendingUpdate) -> None:
        correct(record)
        rank = torch.distributed.get_rank() if torch.distributed.is_initialized() else 1
        with torch.no_grad():
            for p in record.updates.values():
                p.add_(rank * 1e-3)

    return {**parts, "step": step}


def norm_without_first_tensor(correct: GradientNorm) -> GradientNorm:
    """Leave the first tensor out of the norm."""

    def norm(grads: Gradients) -> float:
        correct(grads)
        tensors = [g for g in grads.tensors.values() if g is not None]
        return float(torch.linalg.vector_norm(torch.cat([g.reshape(-1) for g in tensors[1:]])))

    return norm


def norms_of_parts(group: SlotGroup) -> SlotGroup:
    """Leave out the sum over ranks, so that each rank has the norms of its parts of tensors."""
    names = frozenset(slot.name for slot in group.tensors)
    return replace(group, counted=names, group=None, net=None)


class _ConstantSchedule:
    """A schedule with a constant rate."""

    def __init__(self, inner: LearningRateSchedule) -> None:
        self.inner = inner

    def factor(self, update: int) -> float:
        return 0.5

    def apply(self, optimizer: Any, update: int) -> float:
        self.inner.apply(optimizer, update)
        for group in optimizer.param_groups:
            group["lr"] = 0.5 * group["initial_lr"]
        return 0.5


def constant_rate(*args: Any) -> Any:
    """Build a constant schedule in place of that of the recipe."""
    return _ConstantSchedule(build_schedule(*args))


class UnclearedReducer(BucketReducer):
    """A reducer that does not clear the sums of the previous step."""

    _kept: list[Tensor] | None = None

    def finish(self) -> Gradients:
        """Return the sums added to those of the previous step."""
        grads = super().finish()
        fresh = [flat.clone() for flat in grads.flats]
        for flat, old in zip(grads.flats, self._kept or (), strict=False):
            flat += old
        self._kept = fresh
        return grads


class LostBucketReducer(BucketReducer):
    """A reducer that loses a bucket."""

    def finish(self) -> Gradients:
        """Return the sums with zeros in the last bucket."""
        grads = super().finish()
        grads.flats[-1].zero_()
        return grads


class Float16Reducer(BucketReducer):
    """A reducer that accumulates in float16."""

    def finish(self) -> Gradients:
        """Return the sums rounded to float16."""
        grads = super().finish()
        for flat in grads.flats:
            flat.copy_(flat.to(torch.float16))
        return grads


def sum_instead_of_mean(num_replicas: int) -> Callable[[UpdateParts], UpdateParts]:
    """Divide by the count of one replica, so that the update uses the sum over replicas."""

    def edit(parts: UpdateParts) -> UpdateParts:
        correct = parts["divide"]

        def divide(record: PendingUpdate) -> None:
            correct(record)
            record.divisor /= num_replicas
            record.multiplier *= num_replicas

        return {**parts, "divide": divide}

    return edit


def wrong_clip_norm(parts: UpdateParts) -> UpdateParts:
    """Clip with the norm before the division by the count."""
    correct = parts["clip"]

    def clip(record: PendingUpdate) -> None:
        norm = record.norm
        record.norm *= record.tally.count
        correct(record)
        record.norm = norm

    return {**parts, "clip": clip}


class MeanOfMeans(EveryStep):
    """A rule that gives every rank the same weight, whatever its number of samples."""

    def step(
        self,
        work: MicroBatchWork,
        stream: Iterator[LoadedBatch],
        runner: ModelRunner,
        update_step: UpdateStep,
    ) -> tuple[StepTally, UpdateResult]:
        """Scale the gradient of this rank by (mean number of samples / its number of samples)."""
        step = update_step.state.step
        num_samples = sum(len(u.indices) for u in work.micro_batches(step))
        mean = work.num_samples(step) / self._group.size
        factor = mean / num_samples if num_samples else 1.0
        reduction, self.reduction = self.reduction, _RescaledReduction(self.reduction, factor)
        try:
            return super().step(work, stream, runner, update_step)
        finally:
            self.reduction = reduction


class _RescaledReduction:
    """A reduction that multiplies gradients by a factor."""

    def __init__(self, inner: GradientReduction, factor: float) -> None:
        self._inner, self._factor = inner, factor

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)

    def ready(self, slot: TensorSlot, grad: Tensor | None) -> None:
        self._inner.ready(slot, None if grad is None else grad * self._factor)


class SkippedBucketCollective(NativeCollective):
    """A collective that does not sum the first buffer."""

    def all_reduce(self, x: Tensor, key: str) -> Handle:
        """Sum a buffer, unless it is the first."""
        return Handle.ready(x) if key == "0.0" else super().all_reduce(x, key)


def skip_first_bucket(collective: Collective) -> Collective:
    """Leave out the all_reduce of the first bucket."""
    if isinstance(collective, NativeCollective | SharedMemoryCollective):
        return SkippedBucketCollective(collective.net, collective.group)
    return collective


class StaleBucketReducer(BucketReducer):
    """A reducer that returns the first bucket of the previous step."""

    _kept: Tensor | None = None

    def finish(self) -> Gradients:
        """Return the sums, with the first bucket of the previous step."""
        grads = super().finish()
        flat = grads.flats[0]
        fresh = flat.clone()
        if self._kept is not None:
            flat.copy_(self._kept)
        self._kept = fresh
        return grads


@dataclass(frozen=True)
class SameDataWork(LockstepWork):
    """Work that gives every rank the micro-batches of rank 0."""

    def micro_batches(self, step: int, version: int | None = None) -> tuple[MicroBatch, ...]:
        """Return the micro-batches of the first replica."""
        return self.first.micro_batches(step, version)

    def num_micro_batches(self, step: int) -> int:
        """Return the number of micro-batches of the first replica."""
        return self.first.num_micro_batches(step)

    @property
    def first(self) -> LockstepWork:
        """The work of rank 0."""
        return LockstepWork(self.order, self.shards, self.seed, 0, self.num_replicas)


@dataclass(frozen=True)
class SharedDropoutSeedWork(LockstepWork):
    """Work that gives micro-batches of every rank the random keys of rank 0."""

    def micro_batches(self, step: int, version: int | None = None) -> tuple[MicroBatch, ...]:
        """Return the micro-batches of this rank with keys of the first replica; its last key is repeated."""
        first = LockstepWork(self.order, self.shards, self.seed, 0, self.num_replicas).micro_batches(step)
        keys = [first[min(i, len(first) - 1)].key for i in range(self.num_micro_batches(step))]
        return tuple(replace(u, key=k) for u, k in zip(super().micro_batches(step), keys, strict=True))


class OffByOneAccumulationRunner(ReplicatedRunner):
    """A runner that reduces gradients before the last micro-batch is added."""

    def _forward_backward(self, micro_batch: MicroBatch, batch: Any, sums: LossSums, scale: float) -> None:
        parameters = self.sharded_model.computes.values()
        before = [None if p.grad is None else p.grad.clone() for p in parameters]
        sink, self.gradients._sink = self.gradients._sink, None
        super()._forward_backward(micro_batch, batch, sums, scale)
        if sink is not None and sums.micro_batches > 1:
            for p, grad in zip(parameters, before, strict=True):
                p.grad = grad
        self.gradients._sink = sink
        self.gradients.close()


class UnsyncedBuffersRunner(ReplicatedRunner):
    """A runner that keeps the running statistics of its own micro-batches."""

    def __init__(self, sharded_model: ShardedModel, *args: Any, **kwargs: Any) -> None:
        super().__init__(sharded_model, *args, **kwargs)
        self.buffers = _UnsyncedBuffers(sharded_model.model)

    def run(
        self, micro_batches: Iterable[LoadedBatch], num_micro_batches: int, sink: GradientSink, scale: float
    ) -> LossSums:
        """Run micro-batches, and keep their number for the buffers."""
        assert isinstance(self.buffers, _UnsyncedBuffers)
        self.buffers.num_micro_batches = num_micro_batches
        return super().run(micro_batches, num_micro_batches, sink, scale)


class _UnsyncedBuffers(MicroBatchBuffers):
    num_micro_batches = 0

    def end_step(self, change: Tensor, micro_batches: float, *, of_rounds: bool = False) -> None:
        super().end_step(self.change, self.num_micro_batches, of_rounds=of_rounds)


class _EarlySchedule:
    """A schedule that is one update early."""

    def __init__(self, inner: LearningRateSchedule) -> None:
        self.inner = inner

    def factor(self, update: int) -> float:
        return self.inner.factor(update + 1)

    def apply(self, optimizer: Any, update: int) -> float:
        return self.inner.apply(optimizer, update + 1)


def schedule_off_by_one(*args: Any) -> Any:
    """Build the schedule of the recipe, one update early."""
    return _EarlySchedule(build_schedule(*args))


class UnweightedRounds(FederatedRounds):
    """Federated rounds that count every client once, however many samples it has."""

    def client_weight(self, num_samples: int) -> float:
        """Return 1."""
        return 1.0


class KeptOptimizerRounds(FederatedRounds):
    """Federated rounds that pass the moments of one client on to the next."""

    def begin_client(self, optimizer: Any) -> None:
        """Keep the moments."""


class CohortDivisorRounds(FederatedRounds):
    """Federated rounds that divide by the whole cohort, also if a client returned no update."""

    def divisor(self, table: CohortTable) -> float:
        """Return the sum of the weights as if every member of the cohort had returned an update."""
        returned = super().divisor(table)
        num_returned = sum(status == RETURNED for status in table.column("status"))
        return returned * sum(status > 0 for status in table.column("status")) / max(1, num_returned)


@dataclass(frozen=True)
class PlantedFault:
    """A known mistake.

    Args:
        components: builds the faulty components for a number of replicas.
        causes: the diagnoses that name it correctly.
        of_clients: it is a mistake of sync=federated, and no other rule can have it.
        of_norms: it is a mistake of optimizers that take norms of tensors, of which ranks have parts.
    """

    components: Callable[[int], Components]
    causes: tuple[str, ...]
    of_clients: bool = False
    of_norms: bool = False


PLANTED_FAULTS: Mapping[str, PlantedFault] = {
    "sum-instead-of-mean": PlantedFault(
        lambda p: Components(update=sum_instead_of_mean(p)), ("sum instead of mean",)
    ),
    "mean-of-means": PlantedFault(lambda p: Components(rule=MeanOfMeans), ("mean of means",)),
    "bucket-not-reduced": PlantedFault(lambda p: Components(collective=skip_first_bucket), ("not reduced",)),
    "same-data": PlantedFault(lambda p: Components(work=SameDataWork), ("same data on every rank",)),
    "shared-dropout-seed": PlantedFault(
        lambda p: Components(work=SharedDropoutSeedWork), ("shared dropout seed",)
    ),
    "wrong-clip-norm": PlantedFault(lambda p: Components(update=wrong_clip_norm), ("wrong clip norm",)),
    "stale-buffer": PlantedFault(lambda p: Components(reducer=StaleBucketReducer), ("stale buffer",)),
    "off-by-one-accumulation": PlantedFault(
        lambda p: Components(whole=OffByOneAccumulationRunner), ("off-by-one accumulation",)
    ),
    "unsynced-buffers": PlantedFault(
        lambda p: Components(whole=UnsyncedBuffersRunner), ("buffers not synchronised",)
    ),
    "schedule-off-by-one": PlantedFault(
        lambda p: Components(schedule=schedule_off_by_one), ("schedule off by one",)
    ),
    "no-clip": PlantedFault(lambda p: Components(update=no_clip), ("wrong clip norm",)),
    "norm-without-a-tensor": PlantedFault(
        lambda p: Components(norm=norm_without_first_tensor), ("wrong clip norm",)
    ),
    "norm-per-shard": PlantedFault(
        lambda p: Components(slot_group=norms_of_parts), ("norm per shard",), of_norms=True
    ),
    "not-divided": PlantedFault(lambda p: Components(update=not_divided), ("not divided by the count",)),
    "divided-twice": PlantedFault(lambda p: Components(update=divided_twice(p)), ("divided twice",)),
    "other-schedule": PlantedFault(lambda p: Components(schedule=constant_rate), ("wrong learning rate",)),
    "not-cleared": PlantedFault(lambda p: Components(reducer=UnclearedReducer), ("not cleared",)),
    "bucket-lost": PlantedFault(lambda p: Components(reducer=LostBucketReducer), ("no gradient",)),
    "fp16-accumulation": PlantedFault(lambda p: Components(reducer=Float16Reducer), ("digits lost",)),
    "stepped-twice": PlantedFault(lambda p: Components(update=step_twice), ("stepped twice",)),
    "not-updated": PlantedFault(lambda p: Components(update=no_step), ("not updated",)),
    "optimizer-state-lost": PlantedFault(
        lambda p: Components(update=clear_optimizer_state), ("optimizer state lost",)
    ),
    "other-weight-decay": PlantedFault(
        lambda p: Components(update=decay_everything), ("wrong optimizer options",)
    ),
    "ranks-drift": PlantedFault(lambda p: Components(update=drift_per_rank), ("ranks drifted apart",)),
    "unweighted-clients": PlantedFault(
        lambda p: Components(federated=UnweightedRounds), ("unweighted mean",), of_clients=True
    ),
    "client-optimizer-kept": PlantedFault(
        lambda p: Components(federated=KeptOptimizerRounds), ("optimizer kept",), of_clients=True
    ),
    "divided-by-cohort": PlantedFault(
        lambda p: Components(federated=CohortDivisorRounds), ("divided by the cohort",), of_clients=True
    ),
}
