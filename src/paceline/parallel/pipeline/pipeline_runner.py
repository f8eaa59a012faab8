"""One stage of a pipeline as a layout.

Every stage reads the same micro-batches. A stage receives activations, runs its links, sends what comes out;
the last one runs the task's own loss on it. Gradients come back the same way (`passing`). A stage has one
chunk of the model, or several, and runs micro-batches whole or in parts.

Invariant: gradients are added over the micro-batches as autograd does it, and those of a chunk are handed on
while its last backward runs. In which order a stage works is a table (`paceline.pipeline_schedule`), proven before it
runs.

All stages of a pipeline as threads of one process: stage k computes while its neighbours do.

Each stage runs its links on a copy of the modules, hands activations and their gradients to its neighbours,
and keeps the gradients of its own parameters until all stages have ended; then all go to the sink,
micro-batch by micro-batch. Invariant: nobody writes a parameter while a stage runs, so every backward uses
the parameters of its forward, in whatever order the threads are run; the bits are those of one thread.
"""

from __future__ import annotations

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
from paceline.observe.step_stats import PhaseTimer
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
    GlobalRngGuard,
    ThreadedRunnerBase,
    WorkerThreads,
    copy_sharing_parameters,
)
from paceline.pipeline_schedule.schedule_table import (
    ActionKey,
    PipelineAction,
    ScheduleFactory,
    ScheduleTable,
    count_messages_by_source,
    part_samples,
    simulate_schedule,
)
from paceline.pipeline_schedule.standard_schedules import gpipe
from paceline.state.slot import TensorSlot
from paceline.task import Task

MAX_EVALUATION_LEAD = 2
"""Parts of messages that the next stage has not taken, when an evaluation goes on."""


class PipelineRunner:
    """One stage of one replica.

    Args:
        task: its loss; the first stage finds out from it what the model is called with.
        sharded_model: what this stage holds of the model.
        cut: this rank's stage.
        wire: to the stages before and after it.
        schedule: makes the order of forwards and backwards.
        overlap: see `GradientHooks`.
        seeds: seed PyTorch's own generators for every micro-batch; not where other threads share them.
        reports, counts: see `ReplicatedRunner`.
    """

    def __init__(
        self,
        task: Task,
        sharded_model: ShardedModel,
        cut: StagePartition,
        metric_names: MetricNames,
        *,
        wire: StageTransport,
        precision: MixedPrecision,
        phases: PhaseTimer,
        schedule: ScheduleFactory = gpipe,
        overlap: bool = True,
        seeds: bool = True,
        reports: bool = True,
        counts: bool = True,
    ) -> None:
        self.sharded_model, self.metric_names, self.cut = sharded_model, metric_names, cut
        told = reports and counts
        self.passing = ChunkExecutor(
            task, sharded_model, cut, wire, precision, phases, seeds=seeds, reports=told
        )
        release_gradients = (
            sharded_model.frees_gradients or sharded_model.updates_partially
        )  # what is updated has another shape than the gradient
        self.gradients = GradientHooks(
            sharded_model.computes, overlap=overlap, frees_gradients=release_gradients
        )
        self.peak_in_flight = 0
        self._wire, self._phases, self._loss, self._make_schedule = wire, phases, task.loss, schedule
        self._reports, self._counts, self._orders = reports, counts, dict[int, _StageOrder]()
        self._of_chunk, self._parts = _slots_by_chunk(sharded_model, cut), cut.parts[cut.stage]

    @property
    def buffers(self) -> MicroBatchBuffers:
        """See `ModelRunner`."""
        return self.passing.buffers

    @property
    def used(self) -> Collection[str]:
        """See `ModelRunner`."""
        return self.gradients.used

    @property
    def norms(self) -> Mapping[TensorSlot, Sequence[Tensor]]:
        """See `ModelRunner`."""
        return self.gradients.norms

    def run(
        self, micro_batches: Iterable[LoadedBatch], count: int, sink: GradientSink, scale: float
    ) -> LossSums:
        """See `ModelRunner`, in the order of the schedule."""
        self.begin_step()
        sums, flying = LossSums(self.metric_names, counts=self._counts), dict[ActionKey, InFlightMicroBatch]()
        order = self._order(count)
        self._wire.await_messages(order.awaited)
        loaded = _LoadedMicroBatches(micro_batches, self._phases)
        self.peak_in_flight = 0
        self.sharded_model.use.begin()
        for action in order.actions:
            if action.kind == "F":
                self._start(action, loaded, flying, sums, scale)
            elif action.place not in flying:  # it has no samples
                continue
            elif not action.ends(order.split):
                self.passing.backward(flying[action.place], split=True)
            else:
                self._end(action, flying.pop(action.place), sink, order)
            self.peak_in_flight = max(self.peak_in_flight, len(flying))
        self.flush()
        self.sharded_model.use.end()
        if not (count or sink.by_micro_batch):
            self.gradients.open(sink)
            self.gradients.close()
        return sums if self._reports else LossSums(self.metric_names)

    def _order(self, count: int) -> _StageOrder:
        """This stage's row of the table for so many micro-batches; each table is proven once."""
        if count not in self._orders:
            table = self._make_schedule(self.cut.num_stages, count)
            simulate_schedule(table, count)
            self._orders[count] = _StageOrder.of(table, self.cut.stage)
        return self._orders[count]

    def _start(
        self,
        action: PipelineAction,
        loaded: _LoadedMicroBatches,
        flying: dict[ActionKey, InFlightMicroBatch],
        sums: LossSums,
        scale: float,
    ) -> None:
        """A forward, if there is something to run: a small micro-batch may have fewer samples than parts."""
        micro_batch = loaded[action.micro_batch]
        if part_samples(len(micro_batch.micro_batch.indices), self._parts, action.part):
            flying[action.place] = self.passing.forward(action, micro_batch, sums, scale, None)
        if (action.chunk, action.part) == (self.cut.num_chunks - 1, self._parts - 1):
            loaded.drop(action.micro_batch)

    def _end(
        self,
        action: PipelineAction,
        in_flight_batch: InFlightMicroBatch,
        sink: GradientSink,
        order: _StageOrder,
    ) -> None:
        """A backward, or its second half, after which gradients may leave: the chunk's, if it is its last."""
        is_complete = action.part == self._parts - 1
        is_last = is_complete and order.last[action.chunk] == action.micro_batch
        leaves = is_last or (is_complete and sink.by_micro_batch)
        if leaves and sink.by_micro_batch:
            sink.micro_batch(range(in_flight_batch.shard, in_flight_batch.shard + 1), is_last)
        self.gradients.open(sink if leaves else None, self._of_chunk[action.chunk])
        if action.kind == "W":
            self.passing.end_backward(in_flight_batch)
        else:
            self.passing.backward(in_flight_batch)
        self.gradients.close()

    def begin_step(self) -> None:
        """Forget the gradients of the step before, and remember the buffers."""
        if not self.sharded_model.model.training:
            self.sharded_model.model.train()
        self.passing.train(True)
        self.gradients.begin()
        self.buffers.begin_step()

    def flush(self) -> None:
        """Wait until the neighbours have taken everything."""
        self._phases.begin("communication")
        self._wire.flush()

    @property
    def num_sent(self) -> int:
        """Parts of messages, so far."""
        return self._wire.num_sent

    def let_go(self, num_sent: int) -> None:
        """Of what was sent when so many parts were; the neighbours have taken it, or are about to."""
        self._wire.flush(most=self._wire.num_sent - num_sent)

    def abort(self) -> None:
        """See `ModelRunner`."""
        self.gradients.stop()
        self.sharded_model.use.drop()
        self._wire.abort()
        self.passing.abort()
        self.buffers.abort_step()

    def answer(self, micro_batches: Iterable[LoadedBatch], ask: ModelFunction) -> None:
        """See `ModelRunner`; batches pass through the stages one after another."""
        self.sharded_model.model.eval()
        self.passing.train(False)
        with torch.no_grad():
            self.sharded_model.use.begin()
            for loaded in micro_batches:
                self.passing.answer(loaded, ask)
                self._wire.flush(
                    most=MAX_EVALUATION_LEAD
                )  # the first stage must not run far ahead of the last
            self.flush()
            self.sharded_model.use.end()

    def evaluate(self, micro_batches: Iterable[LoadedBatch]) -> LossSums:
        """See `ModelRunner`."""
        sums = LossSums(self.metric_names)
        self.answer(micro_batches, lambda model, batch: sums.add(check_loss(self._loss(model, batch))))
        return sums if self._reports else LossSums(self.metric_names)


def _slots_by_chunk(sharded_model: ShardedModel, cut: StagePartition) -> list[list[TensorSlot]]:
    """What each chunk of a stage computes with, in the model's order."""
    homes = [(slot, cut.chunk_of(slot.name)) for slot in sharded_model.computes]
    return [[slot for slot, home in homes if home == chunk] for chunk in range(cut.num_chunks)]


class _StageOrder(NamedTuple):
    """What one stage does.

    Args:
        split: backwards in two halves.
        last: by chunk, the micro-batch whose backward ends last.
        awaited: by neighbour, how many messages it sends.
    """

    actions: Sequence[PipelineAction]
    split: frozenset[ActionKey]
    last: Mapping[int, int]
    awaited: Mapping[int, int]

    @classmethod
    def of(cls, table: ScheduleTable, stage: int) -> _StageOrder:
        actions = table.orders[stage]
        split = frozenset(a.place for a in actions if a.kind == "W")
        last = {a.chunk: a.micro_batch for a in actions if a.ends(split)}
        return cls(actions, split, last, count_messages_by_source(table, stage))


class _LoadedMicroBatches:
    """The micro-batches of a step, pulled as they are asked for."""

    def __init__(self, micro_batches: Iterable[LoadedBatch], phases: PhaseTimer) -> None:
        self._pulled, self._phases = iter(micro_batches), phases
        self._here: dict[int, LoadedBatch] = {}
        self._num_pulled = 0

    def __getitem__(self, number: int) -> LoadedBatch:
        self._phases.begin("data")
        while number >= self._num_pulled:
            self._here[self._num_pulled] = next(self._pulled)
            self._num_pulled += 1
        return self._here[number]

    def drop(self, number: int) -> None:
        """Nobody asks for it any more."""
        del self._here[number]


class ThreadedPipelineRunner(ThreadedRunnerBase):
    """One whole model, cut into stages that run side by side.

    Args:
        task: see `PipelineRunner`.
        sharded_model: of a whole model on the processor.
        schedule: see `PipelineRunner`.
        phases: of the first stage; the others run meanwhile.
        num_stages: and threads.
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
        holdings = [sharded_model, *map(unsharded_model, twins)]
        cuts = [partition_model(task, h.model, num_stages, k) for k, h in enumerate(holdings)]
        self._shared = frozenset(cuts[0].shared)
        clocks = [phases, *(PhaseTimer() for _ in holdings[1:])]
        self._wires, self._phases = thread_transports(num_stages, deadline_seconds), phases
        shared: dict[str, Any] = {
            "precision": precision,
            "schedule": schedule,
            "overlap": False,
            "seeds": False,
        }
        self._stages = [
            PipelineRunner(
                task, _restrict_to_stage(h, cut), cut, metric_names, wire=w, phases=clock, **shared
            )
            for h, cut, w, clock in zip(holdings, cuts, self._wires, clocks, strict=True)
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
        self, micro_batches: Iterable[LoadedBatch], count: int, sink: GradientSink, scale: float
    ) -> LossSums:
        """See `ModelRunner.run`; each stage works in the order of its schedule."""
        self._phases.begin("data")
        loaded = list(islice(micro_batches, count))
        for p in self.sharded_model.computes.values():
            p.grad = None  # of the step before; the stages have gradients of their own
        before = self.buffers.values()
        self.buffers.begin_step()
        for stage in self._stages:
            stage.buffers.reset(before)
        self._wires[0].abort()  # what stages said when they ended
        kept = [_StageGradients(stage, self._shared, loaded) for stage in self._stages]
        with GlobalRngGuard():
            sums = self._threads.run(
                [
                    partial(_run_stage, stage, wire, loaded, own, scale)
                    for stage, wire, own in zip(self._stages, self._wires, kept, strict=True)
                ]
            )
        self.buffers.sum_changes_of([stage.buffers for stage in self._stages])
        self.used = {name for stage in self._stages for name in stage.used}
        self._hand_on(kept, sink)
        return sums[-1]

    def _hand_on(self, kept: Sequence[_StageGradients], sink: GradientSink) -> None:
        """Every gradient once: shared ones meet inside their shard, as in the backward of one thread."""
        slots = [*self.sharded_model.computes]
        places = sorted({place for one in kept for _, place in one.shared}, key=lambda place: place.start)
        for place in places:
            sink.micro_batch(place, place == places[-1])
            for slot in (s for s in reversed(slots) if s.name in self._shared):
                sink.ready(slot, _sum_present([one.shared.get((slot, place)) for one in kept]))
        sums = [one.take() for one in kept]
        nodes = kept[0].nodes
        for k, node in enumerate(nodes):
            sink.micro_batch(node, k == len(nodes) - 1)
            for slot in (s for s in reversed(slots) if s.name not in self._shared):
                sink.ready(slot, _sum_present([found.get(slot, {}).get(k) for found in sums]))

    def abort(self) -> None:
        """See `ModelRunner`."""
        for stage in self._stages:
            stage.abort()
        self.buffers.abort_step()

    def answer(self, micro_batches: Iterable[LoadedBatch], ask: ModelFunction) -> None:
        """See `ModelRunner`; on this thread."""
        self._whole.answer(micro_batches, ask)

    def evaluate(self, micro_batches: Iterable[LoadedBatch]) -> LossSums:
        """See `ModelRunner`; on this thread."""
        return self._whole.evaluate(micro_batches)


class _StageGradients:
    """What one stage knows of its gradients: sums by node of the tree of additions, shared ones by shard."""

    by_micro_batch = True

    def __init__(self, stage: PipelineRunner, shared: Collection[str], loaded: Sequence[LoadedBatch]) -> None:
        self._shared = shared
        shards = [one.micro_batch.shard for one in loaded]
        self.nodes = covering_nodes(range(shards[0], shards[-1] + 1)) if shards else []
        self._sums = TreeReducer(stage.sharded_model.computes, self.nodes)
        self._place = range(0)
        self.shared: dict[tuple[TensorSlot, range], Tensor | None] = {}

    def micro_batch(self, shards: range, is_last: bool) -> None:
        self._place = shards
        self._sums.micro_batch(shards, is_last)

    def ready(self, slot: TensorSlot, grad: Tensor | None) -> None:
        if slot.name in self._shared:
            self.shared[slot, self._place] = grad
        else:
            self._sums.ready(slot, grad)

    def take(self) -> dict[TensorSlot, dict[int, Tensor]]:
        """By slot, the sums by place of their node."""
        return self._sums.take()


def _restrict_to_stage(sharded_model: ShardedModel, cut: StagePartition) -> ShardedModel:
    """What one stage computes with; the rest stays in memory, for the other threads."""
    own = {s: p for s, p in sharded_model.computes.items() if cut.stage in cut.holders[s.name]}
    return replace(sharded_model, computes=own)


def _run_stage(
    stage: PipelineRunner,
    wire: ThreadTransport,
    loaded: Sequence[LoadedBatch],
    kept: _StageGradients,
    scale: float,
) -> LossSums:
    try:
        return stage.run(loaded, len(loaded), kept, scale)
    finally:
        wire.leave()


def _sum_present(parts: Sequence[Tensor | None]) -> Tensor | None:
    """The sum of what there is; other stages have nothing of a parameter that only one holds."""
    there = [part for part in parts if part is not None]
    return sum(there[1:], start=there[0]) if there else None
