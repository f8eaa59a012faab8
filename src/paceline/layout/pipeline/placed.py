"""One stage of a pipeline as a layout.

Every stage reads the same micro-batches. A stage receives activations, runs its links, sends what comes out;
the last one runs the task's own loss on it. Gradients come back the same way. Random numbers follow from the
micro-batch's key and the module's name, so they do not depend on the cut; what is drawn from PyTorch's own
stream goes on from stage to stage, since a stage that draws tells the next where its generator stands.

Invariant: gradients are added over the micro-batches as autograd does it, and handed on while the last
backward runs. In which order a stage runs its forwards and backwards is a table (`schedule`), proven before
it runs.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from paceline.comm import GradientSink
from paceline.data import LoadedBatch
from paceline.layout.buffers import MicroBatchBuffers
from paceline.layout.handing_on import HandingOn
from paceline.layout.holding import Holding
from paceline.layout.pipeline.chain import Enter, Stage, as_tuple
from paceline.layout.pipeline.flight import Flight, Weights
from paceline.layout.pipeline.schedule import Action, MakeSchedule, gpipe, validate
from paceline.layout.pipeline.stage import Cut
from paceline.layout.pipeline.view import Answers, Call, asked
from paceline.layout.pipeline.wire import Neighbours
from paceline.layout.precision import Precision
from paceline.layout.seed import seed_micro_batch
from paceline.layout.sums import MetricNames, Sums, checked, explained
from paceline.models.dropout import name_dropouts
from paceline.observe import Phases
from paceline.slot import Slot
from paceline.task import Task

_FEW = 8  # messages, each of a description and its tensors


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
        reports: see `Replicate`.
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
        schedule: MakeSchedule = gpipe,
        overlap: bool = True,
        seeds: bool = True,
        reports: bool = True,
    ) -> None:
        self.holding, self.metric_names, self.cut = holding, metric_names, cut
        self.buffers = MicroBatchBuffers(holding.model, reports=reports)
        self.stage = Stage(cut.links)
        self.gradients = HandingOn(holding.computes, overlap=overlap, frees=holding.frees)
        self.peak_stored = 0
        self._task, self._precision, self._phases = task, precision, phases
        self._dropouts, self._wire = name_dropouts(holding.model), wire
        self._seeded = holding.device if seeds else None
        self._make_schedule, self._orders = schedule, dict[int, Sequence[Action]]()
        self._reports = reports

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
        sums, stored = Sums(self.metric_names), dict[int, Flight]()
        order = self._order(count)
        left = count
        pulled = iter(micro_batches)
        self.peak_stored = 0
        self.holding.use.begin()
        for action in order:
            if action.kind == "F":
                stored[action.micro_batch] = self._next_forward(pulled, sums, scale)
            else:
                left -= 1
                self._next_backward(stored.pop(action.micro_batch), sink, is_last=not left)
            self.peak_stored = max(self.peak_stored, len(stored))
        self.flush()
        self.holding.use.end()
        if not (count or sink.by_micro_batch):
            self.gradients.open(sink)
            self.gradients.close()
        return sums if self._reports else Sums(self.metric_names)

    def _order(self, count: int) -> Sequence[Action]:
        """This stage's row of the table for so many micro-batches; each table is validated once."""
        if count not in self._orders:
            table = self._make_schedule(self.cut.num_stages, count)
            validate(table, count)
            self._orders[count] = table[self.cut.stage]
        return self._orders[count]

    def _next_forward(self, micro_batches: Iterator[LoadedBatch], sums: Sums, scale: float) -> Flight:
        with self._phases.during("data"):
            loaded = next(micro_batches)
        return self.forward(loaded, sums, scale)

    def _next_backward(self, flight: Flight, sink: GradientSink, is_last: bool) -> None:
        if sink.by_micro_batch:
            sink.micro_batch(range(flight.shard, flight.shard + 1), is_last)
        self.gradients.open(sink if is_last or sink.by_micro_batch else None)
        self.backward(flight)
        self.gradients.close()

    def begin_step(self) -> None:
        """Forget the gradients of the step before, and remember the buffers."""
        if not self.stage.training or not self.holding.model.training:
            self.holding.model.train()
            self.stage.train()
        self.gradients.begin()
        self.buffers.begin_step()

    def forward(
        self, loaded: LoadedBatch, sums: Sums, scale: float, weights: Weights | None = None
    ) -> Flight:
        """Run one micro-batch through this stage, and send on what comes out.

        Args:
            sums: takes the loss, on the last stage.
            weights: in place of the stage's parameters, by their names in `stage`.
        """
        arrived, stream = self._arrived()
        with self._phases.during("forward"):
            self._seed(loaded.micro_batch.key)
            self.buffers.lend()
            with self._precision.autocast(), explained(len(loaded.micro_batch.indices)):
                outputs = self._run_links(loaded, arrived, sums, scale, weights, stream)
            self.buffers.take_back()
        return Flight(
            loaded.micro_batch.shard, loaded.micro_batch.key, [x for x in arrived if x.requires_grad], outputs
        )

    def _seed(self, key: int) -> None:
        everything = self._seeded is not None and self._precision.seeds_everything
        seed_micro_batch(key, self._seeded, self._dropouts, everything=everything)

    def _arrived(self) -> tuple[list[Tensor], Tensor | None]:
        """What the stage before has sent, leaves if they can have a gradient, and its generator's state."""
        if self.cut.is_first:
            return [], None
        with self._phases.during("communication"):
            received, drawn = self._wire.receive(self.cut.stage - 1)
        stream = received.pop() if drawn else None
        wanted = torch.is_grad_enabled()
        return [x.requires_grad_(wanted and _differentiable(x)) for x in received], stream

    def _run_links(
        self,
        loaded: LoadedBatch,
        arrived: Sequence[Tensor],
        sums: Sums,
        scale: float,
        weights: Weights | None,
        stream: Tensor | None,
    ) -> list[Tensor]:
        fresh = torch.default_generator.get_state() if self._seeded is not None else None

        def links() -> Any:
            given = self._given(loaded, arrived)
            if stream is not None:  # what is drawn goes on where the stage before has stopped
                torch.default_generator.set_state(stream.cpu())
            if weights is None:
                return self.stage(*given.inputs, **given.named)
            return torch.func.functional_call(self.stage, dict(weights), given.inputs, given.named)

        if self.cut.is_last:
            view = Answers(links).train(self.stage.training)
            loss = checked(self._task.loss(view, loaded.batch))
            sums.add(loss)
            return [loss.total if scale == 1.0 else loss.total * scale]
        return self._send_on(as_tuple(links()), fresh)

    def _send_on(self, found: Sequence[Tensor], fresh: Tensor | None) -> list[Tensor]:
        """Send what came out, and, once somebody has drawn, where the generator stands."""
        now = torch.default_generator.get_state() if fresh is not None else None
        if now is None or fresh is None or torch.equal(now, fresh):
            self._wire.send(self.cut.stage + 1, found)
        else:
            self._wire.send(self.cut.stage + 1, [*found, now.to(self.holding.device)], note=1.0)
        return [x for x in found if _differentiable(x)]

    def _given(self, loaded: LoadedBatch, arrived: Sequence[Tensor]) -> Call:
        """The arguments of this stage's first link."""
        if self.cut.is_first:
            return asked(self._task.loss, loaded.batch, training=self.stage.training)
        return Call(tuple(Enter.apply(x) if x.requires_grad else x for x in arrived), {})

    def backward(
        self, flight: Flight, weights: Weights | None = None, note: float = 0.0
    ) -> tuple[list[Tensor | None], float]:
        """Run one micro-batch backward, and send the gradients of what came in.

        Args:
            weights: those of the forward, if they were not the stage's parameters.
            note: a number that the last stage tells all others.
        Returns:
            Gradients of those `weights` that are trained, in their order; without them they are added to
            `.grad` of the parameters. And the note of the last stage.
        """
        arrived, note = self._arrived_gradients(flight, note)
        with self._phases.during("backward"):
            # recomputed activations draw what the forward drew
            self._seed(flight.key)
            found, back = flight.gradients(arrived, weights)
        if not self.cut.is_first:
            self._wire.send(self.cut.stage - 1, back, note)
        return found, note

    def _arrived_gradients(self, flight: Flight, note: float) -> tuple[list[Tensor], float]:
        if self.cut.is_last:
            return [torch.ones_like(flight.outputs[0])], note
        with self._phases.during("communication"):
            return self._wire.receive(self.cut.stage + 1)

    def flush(self) -> None:
        """Wait until the neighbours have taken everything."""
        with self._phases.during("communication"):
            self._wire.flush()

    def abort(self) -> None:
        """See `Placed`."""
        self.gradients.stop()
        self.holding.use.drop()
        self._wire.abort()
        self.buffers.abort_step()

    def evaluate(self, micro_batches: Iterable[LoadedBatch]) -> Sums:
        """See `Placed`; micro-batches pass through the stages one after another."""
        sums = Sums(self.metric_names)
        self.holding.model.eval()
        self.stage.eval()
        self.holding.use.begin()
        with torch.no_grad():
            for loaded in micro_batches:
                arrived, stream = self._arrived()
                with self._precision.autocast():
                    self._run_links(loaded, arrived, sums, 1.0, None, stream)
                self._wire.flush(most=_FEW)  # the first stage must not run far ahead of the last
        self.flush()
        self.holding.use.end()
        return sums if self._reports else Sums(self.metric_names)


def _differentiable(x: Tensor) -> bool:
    return x.is_floating_point() or x.is_complex()
