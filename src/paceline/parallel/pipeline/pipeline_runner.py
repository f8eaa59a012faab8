"""Runners of a pipeline: one stage of it on this rank, or all stages as threads of one process.

Every stage reads the same micro-batches. A stage receives activations, runs its links and sends the outputs;
the last one runs the task's own loss on them. Gradients return the same way (`forward_backward`). A stage
has one chunk of the model or several, and runs micro-batches whole or in parts. The order in which it works
is a table (`paceline.pipeline_schedule`) that is simulated before it runs.

Invariant: gradients are added over the micro-batches as autograd does it, and those of a chunk are handed on
while its last backward runs. With threads, parameters are never written while a stage runs, so every
backward uses the parameters of its forward, in whatever order the threads run, and the bits are those of one
thread.
"""

from __future__ import annotations

import time
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from itertools import islice
from typing import Any, NamedTuple

import torch
from torch import Tensor

from paceline.comm.reduction.bucket_reducer import TreeReducer
from paceline.comm.reduction.gradients import GradientSink
from paceline.comm.reduction.summation_tree import covering_nodes
from paceline.data.work import LoadedBatch
from paceline.models.training_mode import evaluating
from paceline.observe.step_stats import PhaseTimer
from paceline.parallel.batch_gather import whole_batch_scope
from paceline.parallel.data_parallel import ReplicatedRunner
from paceline.parallel.gradient_hooks import GradientHooks
from paceline.parallel.mixed_precision import MixedPrecision
from paceline.parallel.model_buffers import MicroBatchBuffers
from paceline.parallel.model_runner import LossSums, MetricNames, ModelFunction, check_loss
from paceline.parallel.pipeline.forward_backward import ChunkExecutor, InFlightMicroBatch
from paceline.parallel.pipeline.p2p import StageTransport, ThreadTransport, thread_transports
from paceline.parallel.pipeline.stage_partition import StagePartition, partition_model
from paceline.parallel.sharded_model import ShardedModel, unsharded_model
from paceline.parallel.thread_workers import (
    FlagCopier,
    GlobalRngGuard,
    ThreadedRunnerBase,
    WorkerThreads,
    copy_sharing_parameters,
)
from paceline.pipeline_schedule.schedule_table import (
    ActionKey,
    MeasuredSchedule,
    PipelineAction,
    ScheduleFactory,
    ScheduleTable,
    ScheduleTimeline,
    TimelineRow,
    count_messages_by_source,
    part_samples,
    simulate_schedule,
)
from paceline.pipeline_schedule.standard_schedules import gpipe
from paceline.state.slot import TensorSlot
from paceline.task import Task

MAX_EVALUATION_LEAD = 2
"""Most message parts of an evaluation that the next stage has not received yet."""


class PipelineRunner:
    """Runner of one stage of one replica.

    Args:
        task: its loss; the first stage learns from it what the model is called with.
        sharded_model: the part of the model that this stage holds.
        cut: this rank's stage.
        transport: to the stages before and after it.
        schedule: makes the order of forwards and backwards.
        overlap: hand gradients on during backward; see `GradientHooks`.
        seeds: seed the global generators for every micro-batch; off if other threads share them.
        reports, counts: see `ReplicatedRunner`.
    """

    def __init__(
        self,
        task: Task,
        sharded_model: ShardedModel,
        cut: StagePartition,
        metric_names: MetricNames,
        *,
        transport: StageTransport,
        precision: MixedPrecision,
        phases: PhaseTimer,
        schedule: ScheduleFactory = gpipe,
        overlap: bool = True,
        seeds: bool = True,
        reports: bool = True,
        counts: bool = True,
    ) -> None:
        self.sharded_model, self.metric_names, self.cut = sharded_model, metric_names, cut
        self.executor = ChunkExecutor(
            task, sharded_model, cut, transport, precision, phases, seeds=seeds, reports=reports and counts
        )
        # A rank that updates a part of a tensor cannot keep the gradient in `.grad` of the whole: the
        # shapes differ.
        release_gradients = sharded_model.frees_gradients or sharded_model.updates_partially
        self.gradients = GradientHooks(
            sharded_model.computes, overlap=overlap, frees_gradients=release_gradients
        )
        self.peak_in_flight = 0
        self._schedule: MeasuredSchedule | None = None
        self._transport, self._phases, self._loss, self._make_schedule = (
            transport,
            phases,
            task.loss,
            schedule,
        )
        self._reports, self._counts, self._orders = reports, counts, dict[int, _StageOrder]()
        self._slots_of_chunk, self._num_parts = _slots_by_chunk(sharded_model, cut), cut.parts[cut.stage]

    @property
    def buffers(self) -> MicroBatchBuffers:
        return self.executor.buffers

    @property
    def precision(self) -> MixedPrecision:
        """Precision of forward and backward; it can be set between two runs."""
        return self.executor.precision

    @precision.setter
    def precision(self, precision: MixedPrecision) -> None:
        self.executor.precision = precision

    @property
    def used(self) -> Collection[str]:
        return self.gradients.used

    @property
    def norms(self) -> Mapping[TensorSlot, Sequence[Tensor]]:
        return self.gradients.norms

    @property
    def schedule(self) -> MeasuredSchedule | None:
        return self._schedule

    def run(
        self, micro_batches: Iterable[LoadedBatch], num_micro_batches: int, sink: GradientSink, scale: float
    ) -> LossSums:
        """Run the micro-batches in the order of the schedule."""
        self.begin_step()
        sums, in_flight = (
            LossSums(self.metric_names, counts=self._counts),
            dict[ActionKey, InFlightMicroBatch](),
        )
        order = self._order(num_micro_batches)
        self._transport.await_messages(order.awaited)
        loaded = _LoadedMicroBatches(micro_batches, self._phases)
        self.peak_in_flight = 0
        self.sharded_model.use.begin()
        measured: list[TimelineRow] = []
        for action in order.actions:
            if action.kind == "F":
                self._start(action, loaded, in_flight, sums, scale)
            # Without samples of the part, its forward was not run.
            if action.place not in in_flight:
                continue
            if action.ends(order.split):
                self._end(action, in_flight.pop(action.place), sink, order)
            elif action.kind == "B":
                self.executor.backward(in_flight[action.place], split=True)
            began = self.executor.began
            measured.append(TimelineRow(began, self.cut.stage, *action, time.perf_counter() - began))
            self.peak_in_flight = max(self.peak_in_flight, len(in_flight))
        self._schedule = MeasuredSchedule(order.planned, measured)
        # Tensors that were sent must not be freed or changed before the neighbours have received them.
        self.flush()
        self.sharded_model.use.end()
        # Without a micro-batch no backward runs, and the sink still expects every slot once.
        if not (num_micro_batches or sink.by_micro_batch):
            self.gradients.open(sink)
            self.gradients.close()
        return sums if self._reports else LossSums(self.metric_names)

    def _order(self, num_micro_batches: int) -> _StageOrder:
        """Return this stage's row of the table for `num_micro_batches`; each table is checked once."""
        if num_micro_batches not in self._orders:
            table = self._make_schedule(self.cut.num_stages, num_micro_batches)
            planned = simulate_schedule(table, num_micro_batches)
            self._orders[num_micro_batches] = _StageOrder.of(table, self.cut.stage, planned)
        return self._orders[num_micro_batches]

    def _start(
        self,
        action: PipelineAction,
        loaded: _LoadedMicroBatches,
        in_flight: dict[ActionKey, InFlightMicroBatch],
        sums: LossSums,
        scale: float,
    ) -> None:
        """Run a forward, unless the part has no samples, since a micro-batch may have fewer than parts."""
        micro_batch = loaded[action.micro_batch]
        if part_samples(len(micro_batch.micro_batch.indices), self._num_parts, action.part):
            in_flight[action.place] = self.executor.forward(action, micro_batch, sums, scale, None)
        # No backward reads the batch, so it is freed after its last forward.
        if (action.chunk, action.part) == (self.cut.num_chunks - 1, self._num_parts - 1):
            loaded.drop(action.micro_batch)

    def _end(
        self,
        action: PipelineAction,
        in_flight_batch: InFlightMicroBatch,
        sink: GradientSink,
        order: _StageOrder,
    ) -> None:
        """Run a backward or its second half; after the last one of a chunk, hand on its gradients."""
        is_complete = action.part == self._num_parts - 1
        is_last = is_complete and order.last[action.chunk] == action.micro_batch
        # Parts add to one gradient, which is that of the micro-batch only after its last part.
        hands_on = is_last or (is_complete and sink.by_micro_batch)
        if hands_on and sink.by_micro_batch:
            sink.micro_batch(range(in_flight_batch.shard, in_flight_batch.shard + 1), is_last)
        self.gradients.open(sink if hands_on else None, self._slots_of_chunk[action.chunk])
        if action.kind == "W":
            self.executor.end_backward(in_flight_batch)
        else:
            self.executor.backward(in_flight_batch)
        self.gradients.close()

    def begin_step(self) -> None:
        """Drop the gradients of the last step, and save the buffers."""
        self.executor.enter_training(self.sharded_model.model)
        self.gradients.begin()
        self.buffers.begin_step()

    def flush(self) -> None:
        """Wait until the neighbours have received everything."""
        self._phases.begin("communication")
        self._transport.flush()

    @property
    def num_sent(self) -> int:
        """Number of message parts sent so far."""
        return self._transport.num_sent

    def wait_until_received(self, num_sent: int) -> None:
        """Wait for the receivers of what was sent before `num_sent` was read; its memory is free then."""
        self._transport.flush(most=self._transport.num_sent - num_sent)

    def abort(self) -> None:
        self.gradients.stop()
        self.sharded_model.use.drop()
        self._transport.abort()
        self.executor.abort()
        self.buffers.abort_step()

    def forward_only(self, micro_batches: Iterable[LoadedBatch], function: ModelFunction) -> None:
        """Run the forward of each batch; several batches can be on their way through the stages."""
        models = (self.sharded_model.model, *self.executor.chunks)
        with torch.no_grad(), evaluating(*models), whole_batch_scope():
            self.sharded_model.use.begin()
            for loaded in micro_batches:
                self.executor.forward_only(loaded, function)
                # Without a backward, nothing else keeps the first stage from running far ahead of the last.
                self._transport.flush(most=MAX_EVALUATION_LEAD)
            self.flush()
            self.sharded_model.use.end()

    def evaluate(self, micro_batches: Iterable[LoadedBatch]) -> LossSums:
        sums = LossSums(self.metric_names)
        self.forward_only(micro_batches, lambda model, batch: sums.add(check_loss(self._loss(model, batch))))
        return sums if self._reports else LossSums(self.metric_names)


def _slots_by_chunk(sharded_model: ShardedModel, cut: StagePartition) -> list[list[TensorSlot]]:
    """Return what each chunk of a stage computes with, in the order of the model."""
    homes = [(slot, cut.chunk_of(slot.name)) for slot in sharded_model.computes]
    return [[slot for slot, home in homes if home == chunk] for chunk in range(cut.num_chunks)]


class _StageOrder(NamedTuple):
    """Actions of one stage in a step.

    Args:
        split: actions whose backward is split in two halves.
        last: by chunk, the micro-batch whose backward ends last.
        awaited: by neighbour, the number of messages it sends.
        planned: the simulation of all stages.
    """

    actions: Sequence[PipelineAction]
    split: frozenset[ActionKey]
    last: Mapping[int, int]
    awaited: Mapping[int, int]
    planned: ScheduleTimeline

    @classmethod
    def of(cls, table: ScheduleTable, stage: int, planned: ScheduleTimeline) -> _StageOrder:
        actions = table.orders[stage]
        split = frozenset(a.place for a in actions if a.kind == "W")
        last = {a.chunk: a.micro_batch for a in actions if a.ends(split)}
        return cls(actions, split, last, count_messages_by_source(table, stage), planned)


class _LoadedMicroBatches:
    """Micro-batches of a step, loaded when they are first needed."""

    def __init__(self, micro_batches: Iterable[LoadedBatch], phases: PhaseTimer) -> None:
        self._iterator, self._phases = iter(micro_batches), phases
        self._loaded: dict[int, LoadedBatch] = {}
        self._num_loaded = 0

    def __getitem__(self, number: int) -> LoadedBatch:
        self._phases.begin("data")
        while number >= self._num_loaded:
            self._loaded[self._num_loaded] = next(self._iterator)
            self._num_loaded += 1
        return self._loaded[number]

    def drop(self, number: int) -> None:
        """Free a micro-batch that no action needs any more."""
        del self._loaded[number]


class ThreadedPipelineRunner(ThreadedRunnerBase):
    """Runner of a whole model that is split into stages, which run in parallel as threads.

    Each stage runs its links on a copy of the modules, sends activations and gradients to its neighbours,
    and keeps the gradients of its own parameters until all stages have ended. Then all of them go to the
    sink, micro-batch by micro-batch.

    Args:
        task, schedule: see `PipelineRunner`.
        sharded_model: a whole model on the CPU.
        phases: timer of the first stage; the others run at the same time.
        num_stages: number of stages and threads.
        deadline_seconds: the longest that a stage waits for another.
    Raises:
        TaskError: the model cannot be copied, or is no chain.
        StrategyError: it has fewer links than stages.
    """

    def __init__(
        self,
        task: Task,
        sharded_model: ShardedModel,
        metric_names: MetricNames,
        *,
        precision: MixedPrecision,
        phases: PhaseTimer,
        schedule: ScheduleFactory,
        num_stages: int,
        deadline_seconds: float,
    ) -> None:
        twins = (copy_sharing_parameters(sharded_model.model, "stages") for _ in range(num_stages - 1))
        sharded_models = [sharded_model, *map(unsharded_model, twins)]
        self._flags = FlagCopier(sharded_model.model, [stage.model for stage in sharded_models[1:]])
        cuts = [
            partition_model(task, sharded.model, num_stages, k) for k, sharded in enumerate(sharded_models)
        ]
        self._shared = frozenset(cuts[0].shared)
        clocks = [phases, *(PhaseTimer() for _ in sharded_models[1:])]
        self._transports, self._phases = thread_transports(num_stages, deadline_seconds), phases
        # Threads share the global generators, and gradients reach the sink only after all stages have ended.
        options: dict[str, Any] = {
            "precision": precision,
            "schedule": schedule,
            "overlap": False,
            "seeds": False,
        }
        self._stages = [
            PipelineRunner(
                task,
                _restrict_to_stage(sharded, cut),
                cut,
                metric_names,
                transport=transport,
                phases=clock,
                **options,
            )
            for sharded, cut, transport, clock in zip(
                sharded_models, cuts, self._transports, clocks, strict=True
            )
        ]
        self._threads = WorkerThreads(num_stages, "stage", deadline_seconds)
        self._first = self._whole = ReplicatedRunner(
            sharded_model,
            task.loss,
            metric_names,
            precision=precision,
            phases=phases,
            overlap=False,
            seeds=False,
        )
        self.used: Collection[str] = ()

    def run(
        self, micro_batches: Iterable[LoadedBatch], num_micro_batches: int, sink: GradientSink, scale: float
    ) -> LossSums:
        """Run the micro-batches; each stage works in the order of its schedule."""
        self._flags.copy()
        self._phases.begin("data")
        # Loaded before the threads start, since they cannot share an iterator.
        loaded = list(islice(micro_batches, num_micro_batches))
        for p in self.sharded_model.computes.values():
            # The stages have gradients of their own; these are of the step before.
            p.grad = None
        before = self.buffers.values()
        self.buffers.begin_step()
        for stage in self._stages:
            # Each stage has copies of the buffers, which do not have the changes of the last step.
            stage.buffers.reset(before)
        # Empty the queues: they contain what stages sent when they left the last step.
        self._transports[0].abort()
        stage_gradients = [_StageGradients(stage, self._shared, loaded) for stage in self._stages]
        with GlobalRngGuard():
            sums = self._threads.run(
                [
                    partial(_run_stage, stage, transport, loaded, gradients, scale)
                    for stage, transport, gradients in zip(
                        self._stages, self._transports, stage_gradients, strict=True
                    )
                ]
            )
        self.buffers.sum_changes_of([stage.buffers for stage in self._stages])
        self.used = {name for stage in self._stages for name in stage.used}
        self._hand_on(stage_gradients, sink)
        return sums[-1]

    @property
    def schedule(self) -> MeasuredSchedule | None:
        stages = [stage.schedule for stage in self._stages]
        rows = [row for stage in stages if stage is not None for row in stage.measured]
        return stages[0] and replace(stages[0], measured=rows)

    def _hand_on(self, stage_gradients: Sequence[_StageGradients], sink: GradientSink) -> None:
        """Hand on every gradient once, those of shared parameters by shard, as a single thread does."""
        slots = [*self.sharded_model.computes]
        shard_ranges = sorted(
            {shards for gradients in stage_gradients for _, shards in gradients.shared},
            key=lambda shards: shards.start,
        )
        for shards in shard_ranges:
            sink.micro_batch(shards, shards == shard_ranges[-1])
            for slot in (s for s in reversed(slots) if s.name in self._shared):
                sink.ready(
                    slot,
                    _sum_present([gradients.shared.get((slot, shards)) for gradients in stage_gradients]),
                )
        sums = [gradients.take() for gradients in stage_gradients]
        nodes = stage_gradients[0].nodes
        for k, node in enumerate(nodes):
            sink.micro_batch(node, k == len(nodes) - 1)
            for slot in (s for s in reversed(slots) if s.name not in self._shared):
                sink.ready(slot, _sum_present([by_slot.get(slot, {}).get(k) for by_slot in sums]))

    def abort(self) -> None:
        for stage in self._stages:
            stage.abort()
        self.buffers.abort_step()

    def forward_only(self, micro_batches: Iterable[LoadedBatch], function: ModelFunction) -> None:
        self._whole.forward_only(micro_batches, function)

    def evaluate(self, micro_batches: Iterable[LoadedBatch]) -> LossSums:
        """Evaluate the whole model on this thread."""
        return self._whole.evaluate(micro_batches)


class _StageGradients:
    """Sink for the gradients of one stage: sums by node of the summation tree, shared ones by shard."""

    by_micro_batch = True

    def __init__(self, stage: PipelineRunner, shared: Collection[str], loaded: Sequence[LoadedBatch]) -> None:
        self._shared = shared
        shards = [micro_batch.micro_batch.shard for micro_batch in loaded]
        self.nodes = covering_nodes(range(shards[0], shards[-1] + 1)) if shards else []
        self._sums = TreeReducer(stage.sharded_model.computes, self.nodes)
        self._shards = range(0)
        self.shared: dict[tuple[TensorSlot, range], Tensor | None] = {}

    def micro_batch(self, shards: range, is_last: bool) -> None:
        self._shards = shards
        self._sums.micro_batch(shards, is_last)

    def ready(self, slot: TensorSlot, grad: Tensor | None) -> None:
        if slot.name in self._shared:
            self.shared[slot, self._shards] = grad
        else:
            self._sums.ready(slot, grad)

    def take(self) -> dict[TensorSlot, dict[int, Tensor]]:
        """Return the sums by slot, and in it by index of their node."""
        return self._sums.take()


def _restrict_to_stage(sharded_model: ShardedModel, cut: StagePartition) -> ShardedModel:
    """Return the model with what one stage computes with; the rest stays in memory for other threads."""
    computes = {s: p for s, p in sharded_model.computes.items() if cut.stage in cut.holders[s.name]}
    return replace(sharded_model, computes=computes)


def _run_stage(
    stage: PipelineRunner,
    transport: ThreadTransport,
    loaded: Sequence[LoadedBatch],
    gradients: _StageGradients,
    scale: float,
) -> LossSums:
    try:
        return stage.run(loaded, len(loaded), gradients, scale)
    finally:
        # Also after an error, so that no neighbour waits until its deadline.
        transport.leave()


def _sum_present(grads: Sequence[Tensor | None]) -> Tensor | None:
    """Return the sum of the gradients that exist; a stage has none of a parameter that another one holds."""
    present = [grad for grad in grads if grad is not None]
    return sum(present[1:], start=present[0]) if present else None
