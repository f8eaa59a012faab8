"""Replicate: the whole model on every rank. Forward and backward of its units, gradients to the sink.

Invariant: what a unit computes depends on the parameters, its samples and its key alone. Gradients of
the units of one rank are added by autograd, and handed on while the backward of the last runs; or, to a sink
that takes them apart, handed on unit by unit.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from functools import partial

import torch
from torch import Tensor, nn

from paceline.data import LoadedUnit
from paceline.layout.buffers import UnitBuffers
from paceline.layout.placed import GradSink
from paceline.layout.precision import Precision
from paceline.layout.seed import seed_unit
from paceline.layout.sums import Sums, checked
from paceline.models.dropout import name_dropouts
from paceline.observe import Phases
from paceline.slot import Slot, trained_parameters
from paceline.task import LossFunction


class Replicate:
    """One whole copy of the model.

    Args:
        model: on its device; its parameters keep their names and identity.
        loss: the task's loss.
        metric_names: sorted names of the metrics that the loss returns.
        precision: of forward and backward.
        phases: where the seconds go.
        overlap: hand gradients on during backward; pointless, and slower, if nobody communicates.
        seeds: seed PyTorch's own generators for every unit; not where other threads share them.
    """

    def __init__(
        self,
        model: nn.Module,
        loss: LossFunction,
        metric_names: tuple[str, ...],
        *,
        precision: Precision,
        phases: Phases,
        overlap: bool = True,
        seeds: bool = True,
    ) -> None:
        self.model = model
        self.metric_names = metric_names
        self.slots: dict[Slot, nn.Parameter] = trained_parameters(model)
        self.parameters = list(self.slots.values())
        self.used = [False] * len(self.parameters)
        self.buffers = UnitBuffers(model)
        self._loss, self._precision, self._phases = loss, precision, phases
        self._dropouts, self._seeds = name_dropouts(model), seeds
        self._sink: GradSink | None = None
        self._pending: set[int] = set()
        for index, p in enumerate(self.parameters if overlap else ()):
            p.register_post_accumulate_grad_hook(partial(self._on_gradient, index))

    @property
    def device(self) -> torch.device:
        """Where this rank computes."""
        return self.parameters[0].device

    def run(self, units: Iterable[LoadedUnit], num_units: int, sink: GradSink, scale: float) -> Sums:
        """See `Placed.run`; a gradient is handed on, during backward, as soon as it is complete."""
        sums = Sums(self.metric_names)
        if not self.model.training:
            self.model.train()
        for p in self.parameters:
            p.grad = None
        self.used = [False] * len(self.parameters)
        self.buffers.begin_step()
        pulled: Iterator[LoadedUnit] = iter(units)
        for i in range(num_units):
            with self._phases.during("data"):
                loaded = next(pulled)
            is_last = i == num_units - 1
            if sink.by_unit:
                sink.unit(range(loaded.unit.shard, loaded.unit.shard + 1), is_last)
            self._open(sink if is_last or sink.by_unit else None)
            self._forward_backward(loaded, sums, scale)
            self._close()
        if not (num_units or sink.by_unit):
            self._open(sink)
            self._close()
        return sums

    def _open(self, sink: GradSink | None) -> None:
        self._sink = sink
        self._pending = set(range(len(self.parameters)))

    def _close(self) -> None:
        """Hand on what backward has not reached."""
        if self._sink is not None:
            for index in sorted(self._pending, reverse=True):
                self._hand_on(index, self._sink)
        self._sink = None

    def _forward_backward(self, loaded: LoadedUnit, sums: Sums, scale: float) -> None:
        with self._phases.during("forward"):
            seed_unit(loaded.unit.key, self.device if self._seeds else None, self._dropouts)
            with self._precision.autocast():
                loss = checked(self._loss(self.model, loaded.batch))
            sums.add(loss)
        with self._phases.during("backward"):
            (loss.total if scale == 1.0 else loss.total * scale).backward()
            self.buffers.end_unit()

    def abort(self) -> None:
        """See `Placed`."""
        self._sink = None
        self.buffers.abort_step()

    def evaluate(self, units: Iterable[LoadedUnit]) -> Sums:
        """Loss, count and metrics of held-out units, without gradients or dropout."""
        sums = Sums(self.metric_names)
        self.model.eval()
        with torch.no_grad():
            for loaded in units:
                with self._precision.autocast():
                    sums.add(checked(self._loss(self.model, loaded.batch)))
        return sums

    def _on_gradient(self, index: int, p: Tensor) -> None:
        if self._sink is not None:
            self._pending.discard(index)
            self._hand_on(index, self._sink)

    def _hand_on(self, index: int, sink: GradSink) -> None:
        p = self.parameters[index]
        self.used[index] |= p.grad is not None
        sink.ready(index, p.grad)
        if sink.by_unit:
            p.grad = None  # the next unit starts anew
