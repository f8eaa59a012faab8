"""One stage of a pipeline as a layout.

Every stage reads the same micro-batches. A stage receives activations, runs its links, sends what comes out;
the last one runs the task's own loss on it. Gradients come back the same way (`passing`). A stage has one
chunk of the model, or several, and runs micro-batches whole or in parts.

Invariant: gradients are added over the micro-batches as autograd does it, and those of a chunk are handed on
while its last backward runs. In which order a stage works is a table (`paceline.schedule`), proven before it
runs.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from paceline.comm import GradientSink
from paceline.data import LoadedBatch
from paceline.layout.buffers import MicroBatchBuffers
from paceline.layout.handing_on import HandingOn
from paceline.layout.holding import Holding
from paceline.layout.pipeline.flight import Flight
from paceline.layout.pipeline.passing import Passing
from paceline.layout.pipeline.stage import Cut
from paceline.layout.pipeline.wire import Neighbours
from paceline.layout.placed import Ask
from paceline.layout.precision import Precision
from paceline.layout.sums import MetricNames, Sums, checked
from paceline.observe import Phases
from paceline.schedule import Action, MakeTable, Place, Table, arrivals, gpipe, prove, samples_of
from paceline.slot import Slot
from paceline.task import Task

AHEAD = 2
"""Parts of messages that the next stage has not taken, when an evaluation goes on."""


class Pipeline:
    """One stage of one replica.

    Args:
        task: its loss; the first stage finds out from it what the model is called with.
        holding: what this stage holds of the model.
        cut: this rank's stage.
        wire: to the stages before and after it.
        schedule: makes the order of forwards and backwards.
        overlap: see `HandingOn`.
        seeds: seed PyTorch's own generators for every micro-batch; not where other threads share them.
        reports, counts: see `Replicate`.
    """

    def __init__(
        self,
        task: Task,
        holding: Holding,
        cut: Cut,
        metric_names: MetricNames,
        *,
        wire: Neighbours,
        precision: Precision,
        phases: Phases,
        schedule: MakeTable = gpipe,
        overlap: bool = True,
        seeds: bool = True,
        reports: bool = True,
        counts: bool = True,
    ) -> None:
        self.holding, self.metric_names, self.cut = holding, metric_names, cut
        told = reports and counts
        self.passing = Passing(task, holding, cut, wire, precision, phases, seeds=seeds, reports=told)
        lets_go = holding.frees or holding.is_cut  # what is updated has another shape than the gradient
        self.gradients = HandingOn(holding.computes, overlap=overlap, frees=lets_go)
        self.peak_stored = 0
        self._wire, self._phases, self._loss, self._make_schedule = wire, phases, task.loss, schedule
        self._reports, self._counts, self._orders = reports, counts, dict[int, _Order]()
        self._of_chunk, self._parts = _by_chunk(holding, cut), cut.parts[cut.stage]

    @property
    def buffers(self) -> MicroBatchBuffers:
        """See `Placed`."""
        return self.passing.buffers

    @property
    def used(self) -> Collection[str]:
        """See `Placed`."""
        return self.gradients.used

    @property
    def norms(self) -> Mapping[Slot, Sequence[Tensor]]:
        """See `Placed`."""
        return self.gradients.norms

    def run(self, micro_batches: Iterable[LoadedBatch], count: int, sink: GradientSink, scale: float) -> Sums:
        """See `Placed`, in the order of the schedule."""
        self.begin_step()
        sums, flying = Sums(self.metric_names, counts=self._counts), dict[Place, Flight]()
        order = self._order(count)
        self._wire.await_messages(order.awaited)
        loaded = _Loaded(micro_batches, self._phases)
        self.peak_stored = 0
        self.holding.use.begin()
        for action in order.actions:
            if action.kind == "F":
                self._start(action, loaded, flying, sums, scale)
            elif action.place not in flying:  # it has no samples
                continue
            elif not action.ends(order.split):
                self.passing.backward(flying[action.place], split=True)
            else:
                self._end(action, flying.pop(action.place), sink, order)
            self.peak_stored = max(self.peak_stored, len(flying))
        self.flush()
        self.holding.use.end()
        if not (count or sink.by_micro_batch):
            self.gradients.open(sink)
            self.gradients.close()
        return sums if self._reports else Sums(self.metric_names)

    def _order(self, count: int) -> _Order:
        """This stage's row of the table for so many micro-batches; each table is proven once."""
        if count not in self._orders:
            table = self._make_schedule(self.cut.num_stages, count)
            prove(table, count)
            self._orders[count] = _Order.of(table, self.cut.stage)
        return self._orders[count]

    def _start(
        self, action: Action, loaded: _Loaded, flying: dict[Place, Flight], sums: Sums, scale: float
    ) -> None:
        """A forward, if there is something to run: a small micro-batch may have fewer samples than parts."""
        micro_batch = loaded[action.micro_batch]
        if samples_of(len(micro_batch.micro_batch.indices), self._parts, action.part):
            flying[action.place] = self.passing.forward(action, micro_batch, sums, scale, None)
        if (action.chunk, action.part) == (self.cut.num_chunks - 1, self._parts - 1):
            loaded.drop(action.micro_batch)

    def _end(self, action: Action, flight: Flight, sink: GradientSink, order: _Order) -> None:
        """A backward, or its second half, after which gradients may leave: the chunk's, if it is its last."""
        is_complete = action.part == self._parts - 1
        is_last = is_complete and order.last[action.chunk] == action.micro_batch
        leaves = is_last or (is_complete and sink.by_micro_batch)
        if leaves and sink.by_micro_batch:
            sink.micro_batch(range(flight.shard, flight.shard + 1), is_last)
        self.gradients.open(sink if leaves else None, self._of_chunk[action.chunk])
        if action.kind == "W":
            self.passing.end_backward(flight)
        else:
            self.passing.backward(flight)
        self.gradients.close()

    def begin_step(self) -> None:
        """Forget the gradients of the step before, and remember the buffers."""
        if not self.holding.model.training:
            self.holding.model.train()
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
        """See `Placed`."""
        self.gradients.stop()
        self.holding.use.drop()
        self._wire.abort()
        self.passing.abort()
        self.buffers.abort_step()

    def answer(self, micro_batches: Iterable[LoadedBatch], ask: Ask) -> None:
        """See `Placed`; batches pass through the stages one after another."""
        self.holding.model.eval()
        self.passing.train(False)
        with torch.no_grad():
            self.holding.use.begin()
            for loaded in micro_batches:
                self.passing.answer(loaded, ask)
                self._wire.flush(most=AHEAD)  # the first stage must not run far ahead of the last
            self.flush()
            self.holding.use.end()

    def evaluate(self, micro_batches: Iterable[LoadedBatch]) -> Sums:
        """See `Placed`."""
        sums = Sums(self.metric_names)
        self.answer(micro_batches, lambda model, batch: sums.add(checked(self._loss(model, batch))))
        return sums if self._reports else Sums(self.metric_names)


def _by_chunk(holding: Holding, cut: Cut) -> list[list[Slot]]:
    """What each chunk of a stage computes with, in the model's order."""
    homes = [(slot, cut.chunk_of(slot.name)) for slot in holding.computes]
    return [[slot for slot, home in homes if home == chunk] for chunk in range(cut.num_chunks)]


class _Order(NamedTuple):
    """What one stage does.

    Args:
        split: backwards in two halves.
        last: by chunk, the micro-batch whose backward ends last.
        awaited: by neighbour, how many messages it sends.
    """

    actions: Sequence[Action]
    split: frozenset[Place]
    last: Mapping[int, int]
    awaited: Mapping[int, int]

    @classmethod
    def of(cls, table: Table, stage: int) -> _Order:
        actions = table.orders[stage]
        split = frozenset(a.place for a in actions if a.kind == "W")
        last = {a.chunk: a.micro_batch for a in actions if a.ends(split)}
        return cls(actions, split, last, arrivals(table, stage))


class _Loaded:
    """The micro-batches of a step, pulled as they are asked for."""

    def __init__(self, micro_batches: Iterable[LoadedBatch], phases: Phases) -> None:
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
