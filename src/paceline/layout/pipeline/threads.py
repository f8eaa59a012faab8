"""All stages of a pipeline as threads of one process: stage k computes while its neighbours do.

Each stage runs its links on a copy of the modules, hands activations and their gradients to its neighbours,
and keeps the gradients of its own parameters until all stages have ended; then all go to the sink,
micro-batch by micro-batch. Invariant: nobody writes a parameter while a stage runs, so every backward uses
the parameters of its forward, in whatever order the threads are run; the bits are those of one thread.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from dataclasses import replace
from functools import partial
from itertools import islice
from typing import Any

from torch import Tensor

from paceline.comm import GradientSink
from paceline.comm.reduction import TreeReducer, cover
from paceline.data import LoadedBatch
from paceline.layout.holding import Holding, hold_whole
from paceline.layout.pipeline.placed import Pipeline
from paceline.layout.pipeline.stage import Cut, cut_model
from paceline.layout.pipeline.wire import ThreadWire, thread_wires
from paceline.layout.placed import Ask
from paceline.layout.precision import Precision
from paceline.layout.replicate import Replicate
from paceline.layout.sums import MetricNames, Sums
from paceline.layout.threads import LedByFirst, NobodyDraws, Threads, around_the_same_parameters
from paceline.observe import Phases
from paceline.schedule import MakeTable
from paceline.slot import Slot
from paceline.task import Task


class StageThreads(LedByFirst):
    """One whole model, cut into stages that run side by side.

    Args:
        task: see `Pipeline`.
        holding: of a whole model on the processor.
        schedule: see `Pipeline`.
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
        holding: Holding,
        metric_names: MetricNames,
        *,
        precision: Precision,
        phases: Phases,
        schedule: MakeTable,
        num_stages: int,
        deadline_seconds: float,
    ) -> None:
        twins = (around_the_same_parameters(holding.model, "stages") for _ in range(num_stages - 1))
        holdings = [holding, *map(hold_whole, twins)]
        cuts = [cut_model(task, h.model, num_stages, k) for k, h in enumerate(holdings)]
        self._shared = frozenset(cuts[0].shared)
        clocks = [phases, *(Phases() for _ in holdings[1:])]
        self._wires, self._phases = thread_wires(num_stages, deadline_seconds), phases
        shared: dict[str, Any] = {
            "precision": precision,
            "schedule": schedule,
            "overlap": False,
            "seeds": False,
        }
        self._stages = [
            Pipeline(task, _of_stage(h, cut), cut, metric_names, wire=w, phases=clock, **shared)
            for h, cut, w, clock in zip(holdings, cuts, self._wires, clocks, strict=True)
        ]
        self._threads = Threads(num_stages, "stage", deadline_seconds)
        self._first = self._whole = Replicate(
            holding, task.loss, metric_names, precision=precision, phases=phases, overlap=False, seeds=False
        )
        self.used: Collection[str] = ()

    def run(self, micro_batches: Iterable[LoadedBatch], count: int, sink: GradientSink, scale: float) -> Sums:
        """See `Placed.run`; each stage works in the order of its schedule."""
        self._phases.begin("data")
        loaded = list(islice(micro_batches, count))
        for p in self.holding.computes.values():
            p.grad = None  # of the step before; the stages have gradients of their own
        before = self.buffers.values()
        self.buffers.begin_step()
        for stage in self._stages:
            stage.buffers.reset(before)
        self._wires[0].abort()  # what stages said when they ended
        kept = [_Kept(stage, self._shared, loaded) for stage in self._stages]
        with NobodyDraws():
            sums = self._threads.run(
                [
                    partial(_run_stage, stage, wire, loaded, own, scale)
                    for stage, wire, own in zip(self._stages, self._wires, kept, strict=True)
                ]
            )
        self.buffers.take_sum([stage.buffers for stage in self._stages])
        self.used = {name for stage in self._stages for name in stage.used}
        self._hand_on(kept, sink)
        return sums[-1]

    def _hand_on(self, kept: Sequence[_Kept], sink: GradientSink) -> None:
        """Every gradient once: shared ones meet inside their shard, as in the backward of one thread."""
        slots = [*self.holding.computes]
        places = sorted({place for one in kept for _, place in one.shared}, key=lambda place: place.start)
        for place in places:
            sink.micro_batch(place, place == places[-1])
            for slot in (s for s in reversed(slots) if s.name in self._shared):
                sink.ready(slot, _added([one.shared.get((slot, place)) for one in kept]))
        sums = [one.take() for one in kept]
        nodes = kept[0].nodes
        for k, node in enumerate(nodes):
            sink.micro_batch(node, k == len(nodes) - 1)
            for slot in (s for s in reversed(slots) if s.name not in self._shared):
                sink.ready(slot, _added([found.get(slot, {}).get(k) for found in sums]))

    def abort(self) -> None:
        """See `Placed`."""
        for stage in self._stages:
            stage.abort()
        self.buffers.abort_step()

    def answer(self, micro_batches: Iterable[LoadedBatch], ask: Ask) -> None:
        """See `Placed`; on this thread."""
        self._whole.answer(micro_batches, ask)

    def evaluate(self, micro_batches: Iterable[LoadedBatch]) -> Sums:
        """See `Placed`; on this thread."""
        return self._whole.evaluate(micro_batches)


class _Kept:
    """What one stage knows of its gradients: sums by node of the tree of additions, shared ones by shard."""

    by_micro_batch = True

    def __init__(self, stage: Pipeline, shared: Collection[str], loaded: Sequence[LoadedBatch]) -> None:
        self._shared = shared
        shards = [one.micro_batch.shard for one in loaded]
        self.nodes = cover(range(shards[0], shards[-1] + 1)) if shards else []
        self._sums = TreeReducer(stage.holding.computes, self.nodes)
        self._place = range(0)
        self.shared: dict[tuple[Slot, range], Tensor | None] = {}

    def micro_batch(self, shards: range, is_last: bool) -> None:
        self._place = shards
        self._sums.micro_batch(shards, is_last)

    def ready(self, slot: Slot, grad: Tensor | None) -> None:
        if slot.name in self._shared:
            self.shared[slot, self._place] = grad
        else:
            self._sums.ready(slot, grad)

    def take(self) -> dict[Slot, dict[int, Tensor]]:
        """By slot, the sums by place of their node."""
        return self._sums.take()


def _of_stage(holding: Holding, cut: Cut) -> Holding:
    """What one stage computes with; the rest stays in memory, for the other threads."""
    own = {s: p for s, p in holding.computes.items() if cut.stage in cut.holders[s.name]}
    return replace(holding, computes=own)


def _run_stage(
    stage: Pipeline, wire: ThreadWire, loaded: Sequence[LoadedBatch], kept: _Kept, scale: float
) -> Sums:
    try:
        return stage.run(loaded, len(loaded), kept, scale)
    finally:
        wire.leave()


def _added(parts: Sequence[Tensor | None]) -> Tensor | None:
    """The sum of what there is; other stages have nothing of a parameter that only one holds."""
    there = [part for part in parts if part is not None]
    return sum(there[1:], start=there[0]) if there else None
