"""All stages of a pipeline as threads of one process: stage k computes while its neighbours do.

Each stage runs its links on a copy of the modules, hands activations and their gradients to its neighbours,
and keeps the gradients of its own parameters until all stages have ended; then all go to the sink, unit by
unit. Invariant: nobody writes a parameter while a stage runs, so every backward uses the parameters of its
forward, in whatever order the threads are run; the bits are those of one thread.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from functools import partial
from itertools import islice

from torch import Tensor, nn

from paceline.comm.ordered import OrderedReducer
from paceline.comm.tree import cover
from paceline.data import LoadedUnit
from paceline.layout.pipeline.placed import Pipeline
from paceline.layout.pipeline.stage import cut_model
from paceline.layout.pipeline.wire import ThreadWire, thread_wires
from paceline.layout.placed import GradSink
from paceline.layout.precision import Precision
from paceline.layout.replicate import Replicate
from paceline.layout.sums import Sums
from paceline.layout.threads import LedByFirst, NobodyDraws, Threads, around_the_same_parameters
from paceline.observe import Phases
from paceline.slot import trained_parameters
from paceline.task import Task


class StageThreads(LedByFirst):
    """One whole model, cut into stages that run side by side.

    Args:
        task: see `Pipeline`.
        model: on the processor.
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
        model: nn.Module,
        metric_names: tuple[str, ...],
        *,
        precision: Precision,
        phases: Phases,
        num_stages: int,
        deadline_seconds: float,
    ) -> None:
        models = [model, *(around_the_same_parameters(model, "stages") for _ in range(num_stages - 1))]
        cuts = [cut_model(task, m, trained_parameters(m), num_stages, k) for k, m in enumerate(models)]
        clocks = [phases, *(Phases() for _ in models[1:])]
        self._wires, self._phases = thread_wires(num_stages, deadline_seconds), phases
        self._stages = [
            Pipeline(task, m, cut, metric_names, wire=w, precision=precision, phases=clock, seeds=False)
            for m, cut, w, clock in zip(models, cuts, self._wires, clocks, strict=True)
        ]
        self._first, self._threads = self._stages[0], Threads(num_stages, "stage", deadline_seconds)
        self._whole = Replicate(
            model, task.loss, metric_names, precision=precision, phases=phases, overlap=False, seeds=False
        )
        self.used: Sequence[bool] = ()

    def run(self, units: Iterable[LoadedUnit], num_units: int, sink: GradSink, scale: float) -> Sums:
        """See `Placed.run`; each unit is a micro-batch, in the order of GPipe."""
        with self._phases.during("data"):
            loaded = list(islice(units, num_units))
        before = self.buffers.values()
        for stage in self._stages[1:]:
            stage.buffers.reset(before)
        self._wires[0].abort()  # what stages said when they ended
        kept = [_Kept(stage, loaded) for stage in self._stages]
        with NobodyDraws():
            sums = self._threads.run(
                [
                    partial(_run_stage, stage, wire, loaded, own, scale)
                    for stage, wire, own in zip(self._stages, self._wires, kept, strict=True)
                ]
            )
        for stage in self._stages[1:]:
            self.buffers.add_changes(stage.buffers)
        self.used = [any(stage.used[i] for stage in self._stages) for i in range(len(self.parameters))]
        _hand_on(kept, self._stages[0].cut.tied, sink)
        return sums[-1]

    def abort(self) -> None:
        """See `Placed`."""
        for stage in self._stages:
            stage.abort()

    def evaluate(self, units: Iterable[LoadedUnit]) -> Sums:
        """See `Placed`; on this thread."""
        return self._whole.evaluate(units)


class _Kept:
    """What one stage knows of its gradients: sums by node of the tree of additions, tied ones by shard."""

    by_unit = True

    def __init__(self, stage: Pipeline, loaded: Sequence[LoadedUnit]) -> None:
        self.own, self._tied = stage.cut.own, stage.cut.tied
        shards = [one.unit.shard for one in loaded]
        self.nodes = cover(range(shards[0], shards[-1] + 1)) if shards else []
        self._sums = OrderedReducer(stage.parameters, self.nodes)
        self._place = range(0)
        self.tied: dict[tuple[int, range], Tensor | None] = {}

    def unit(self, shards: range, is_last: bool) -> None:
        self._place = shards
        self._sums.unit(shards, is_last)

    def ready(self, index: int, grad: Tensor | None) -> None:
        if index in self._tied:
            self.tied[index, self._place] = grad
        else:
            self._sums.ready(index, grad)

    def take(self) -> list[dict[int, Tensor]]:
        """By parameter, the sums by place of their node."""
        return self._sums.take()


def _run_stage(
    stage: Pipeline, wire: ThreadWire, loaded: Sequence[LoadedUnit], kept: _Kept, scale: float
) -> Sums:
    try:
        return stage.run(loaded, len(loaded), kept, scale)
    finally:
        wire.leave()


def _hand_on(kept: Sequence[_Kept], tied: Mapping[int, int], sink: GradSink) -> None:
    """Every gradient once: tied ones meet inside their shard, as in the backward of one thread."""
    places = sorted({place for one in kept for _, place in one.tied}, key=lambda place: place.start)
    for place in places:
        sink.unit(place, place == places[-1])
        for index in sorted(tied, reverse=True):
            sink.ready(index, _added([one.tied.get((index, place)) for one in kept]))
    sums = [one.take() for one in kept]
    nodes = kept[0].nodes
    for k, node in enumerate(nodes):
        sink.unit(node, k == len(nodes) - 1)
        for index in reversed(range(len(sums[0]))):
            if index not in tied:
                sink.ready(index, _added([found[index].get(k) for found in sums]))


def _added(parts: Sequence[Tensor | None]) -> Tensor | None:
    """The sum of what there is; other stages have nothing of a parameter that only one holds."""
    there = [part for part in parts if part is not None]
    return sum(there[1:], start=there[0]) if there else None
