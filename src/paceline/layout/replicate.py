"""Replicate: all that a rank computes with is whole. Forward and backward of its micro-batches, gradients to
the sink.

Invariant: what a micro-batch computes depends on the parameters, its samples and its key alone. Gradients of
the micro-batches of one rank are added by autograd, and handed on while the backward of the last runs; or, to
a sink that takes them apart, handed on micro-batch by micro-batch.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor

from paceline.comm import GradientSink
from paceline.data import LoadedBatch, MicroBatch
from paceline.layout.back_propagate import back_propagate
from paceline.layout.buffers import MicroBatchBuffers
from paceline.layout.handing_on import HandingOn
from paceline.layout.holding import Holding
from paceline.layout.placed import Ask
from paceline.layout.precision import Precision
from paceline.layout.seed import seed_micro_batch
from paceline.layout.steady import Steady
from paceline.layout.sums import MetricNames, Sums, checked, explain_few_values
from paceline.models.dropout import name_dropouts
from paceline.observe import Phases
from paceline.slot import Slot
from paceline.task import Loss, LossFunction


class Replicate:
    """One whole forward and backward a micro-batch.

    Args:
        holding: of a model whose forward this rank can run.
        loss: the task's loss.
        metric_names: of the loss.
        precision: of forward and backward.
        phases: where the seconds go.
        overlap: see `HandingOn`.
        seeds: seed PyTorch's own generators for every micro-batch; not where other threads share them.
        reports: whether this rank reports sums and buffers; of ranks that compute the same, one does.
        counts: whether what it reports counts as micro-batches; of ranks that each run a part of the same
            micro-batches, one does.
    """

    def __init__(
        self,
        holding: Holding,
        loss: LossFunction,
        metric_names: MetricNames,
        *,
        precision: Precision,
        phases: Phases,
        overlap: bool = True,
        seeds: bool = True,
        reports: bool = True,
        counts: bool = True,
    ) -> None:
        self.holding, self.metric_names = holding, metric_names
        self.buffers = MicroBatchBuffers(holding.model, reports=reports and counts)
        lets_go = holding.frees or holding.is_cut  # what is updated has another shape than the gradient
        self.gradients = HandingOn(holding.computes, overlap=overlap, frees=lets_go)
        self._model, self._device = holding.model, holding.device
        self._loss, self.precision, self._phases = loss, precision, phases
        self._dropouts, self._seeds, self._reports = name_dropouts(holding.model), seeds, reports
        self.counts = counts
        self._steady, self._is_alone = Steady(holding.computes), seeds and not overlap
        self._watching: AbstractContextManager[None] = self._steady

    @property
    def used(self) -> Collection[str]:
        """See `Placed`."""
        return self.gradients.used

    @property
    def norms(self) -> Mapping[Slot, Sequence[Tensor]]:
        """See `Placed`."""
        return self.gradients.norms

    def run(self, micro_batches: Iterable[LoadedBatch], count: int, sink: GradientSink, scale: float) -> Sums:
        """See `Placed.run`; a gradient is handed on, during backward, as soon as it is complete."""
        self._phases.begin("forward")
        sums, pulled = self._begin(count), iter(micro_batches)
        self._gather(self.holding.use.begin)
        for i in range(count):
            self._phases.begin("data")
            loaded = next(pulled)
            with self._open(loaded, sink, is_last=i == count - 1) as batch:
                self._forward_backward(loaded.micro_batch, batch, sums, scale)
        if not (count or sink.by_micro_batch):
            self.gradients.open(sink)
            self.gradients.close()
        self._gather(self.holding.use.end)
        return sums if self._reports else Sums(self.metric_names)

    def _gather(self, move: Callable[[], None]) -> None:
        """One of the moves around the use of a model that is not all in memory; else there is none."""
        if self.holding.use.gathers:
            self._phases.begin("communication")
            move()

    def _begin(self, count: int) -> Sums:
        """Forget the step before; returns sums of nothing."""
        if not self._model.training:
            self._model.train()
        self.gradients.begin()
        self.buffers.begin_step()
        may_write = self._is_alone and count <= 1  # alone, a forward may do what it likes
        self._watching = nullcontext() if may_write else self._steady
        return Sums(self.metric_names, counts=self.counts)

    def _open(self, loaded: LoadedBatch, sink: GradientSink, *, is_last: bool) -> AbstractContextManager[Any]:
        """Get ready for a micro-batch; returns the block in which it is run."""
        self._gather(self.holding.use.next)
        if sink.by_micro_batch:
            sink.micro_batch(range(loaded.micro_batch.shard, loaded.micro_batch.shard + 1), is_last)
        self.gradients.open(sink if is_last or sink.by_micro_batch else None)
        return self.holding.seen(loaded.batch)

    def _forward_backward(self, micro_batch: MicroBatch, batch: Any, sums: Sums, scale: float) -> None:
        self._phases.begin("forward")
        loss = self._run_forward(micro_batch, batch)
        sums.add(loss)
        self._phases.begin("backward")
        back_propagate(loss.total, scale)
        self.buffers.end_micro_batch()
        self.gradients.close()

    def _run_forward(self, micro_batch: MicroBatch, batch: Any) -> Loss:
        everything = self._seeds and self.precision.seeds_everything
        seed_micro_batch(
            micro_batch.key, self._device if self._seeds else None, self._dropouts, everything=everything
        )
        try:
            with self._watching, self.precision.autocast():
                return checked(self._loss(self._model, batch))
        except ValueError as error:
            explain_few_values(error, len(micro_batch.indices))
            raise

    def abort(self) -> None:
        """See `Placed`."""
        self.gradients.stop()
        self.holding.use.drop()
        self.buffers.abort_step()

    def answer(self, micro_batches: Iterable[LoadedBatch], ask: Ask) -> None:
        """See `Placed`."""
        self._model.eval()
        with torch.no_grad():
            self.holding.use.begin()
            for loaded in micro_batches:
                self.holding.use.next()
                with self.precision.autocast(), self.holding.seen(loaded.batch) as batch:
                    ask(self._model, batch)
            self.holding.use.end()

    def evaluate(self, micro_batches: Iterable[LoadedBatch]) -> Sums:
        """Loss, count and metrics of held-out micro-batches, without gradients or dropout."""
        sums = Sums(self.metric_names)
        self.answer(micro_batches, lambda model, batch: sums.add(checked(self._loss(model, batch))))
        return sums if self._reports else Sums(self.metric_names)
