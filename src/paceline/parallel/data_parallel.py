"""Data parallelism: run forward and backward of whole micro-batches and hand the gradients to a sink.

Invariant: what a micro-batch computes depends only on the parameters, its samples and its key. Autograd adds
the gradients of the micro-batches of one rank, and they are handed on while the backward of the last one
runs; a sink that reduces every micro-batch gets them micro-batch by micro-batch.

This file also scales the loss without an extra node in the graph, and detects forwards that write to
parameters. It does not communicate: the sink sums over ranks.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from operator import attrgetter
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import CheckpointError

from paceline.comm.reduction.gradients import GradientSink
from paceline.data.work import LoadedBatch, MicroBatch
from paceline.errors import TaskError
from paceline.models.dropout import name_dropouts
from paceline.models.training_mode import enter_training, evaluating
from paceline.observe.step_stats import PhaseTimer
from paceline.parallel.batch_gather import whole_batch_scope
from paceline.parallel.forward_errors import FORWARD_ERRORS, explain_forward_error
from paceline.parallel.gradient_hooks import GradientHooks
from paceline.parallel.mixed_precision import MixedPrecision
from paceline.parallel.model_buffers import MicroBatchBuffers
from paceline.parallel.model_runner import (
    EvaluationCall,
    LossSums,
    MetricNames,
    ModelFunction,
    check_loss,
    raise_for_too_few_values,
)
from paceline.parallel.recompute import explain_checkpoint_error
from paceline.parallel.rng_state import seed_micro_batch
from paceline.parallel.sharded_model import ShardedModel
from paceline.pipeline_schedule.schedule_table import MeasuredSchedule
from paceline.state.slot import TensorSlot
from paceline.task import Loss, LossFunction

_HALF_DTYPES = (torch.float16, torch.bfloat16)


def backward_scaled(total: Tensor, scale: float) -> None:
    """Add the gradients of `total * scale` to the leaves.

    The product is not computed: it would be one more node of the graph and two more kernels in every
    micro-batch. `scale` is passed as the gradient of `total` instead.

    Args:
        total: a loss, with one value.
        scale: a finite number.
    Exactness: bitwise those of the product: both begin with `scale`, rounded once to the dtype of `total`.
    """
    if scale == 1.0:
        total.backward()
    elif total.dtype in _HALF_DTYPES:
        # Half precision may not represent the scale; a product shows the overflow as an infinite loss.
        (total * scale).backward()
    else:
        total.backward(torch.full_like(total, scale))


_version_of = attrgetter("_version")


class InPlaceWriteGuard:
    """Context manager that rejects a forward with in-place writes to parameters.

    `nn.Embedding` with `max_norm` makes such writes.

    After such a write, the result of a micro-batch would depend on those that ran before it on the same rank,
    and parameters would silently differ between ranks. Writes to `parameter.data` are not detected, because
    PyTorch does not count them.

    Args:
        parameters: by slot. Their version counters are read before and after a forward, which costs almost
            nothing.
    """

    def __init__(self, parameters: Mapping[TensorSlot, nn.Parameter]) -> None:
        self._parameters, self._tensors = parameters, [*parameters.values()]
        self._before: list[int] = []

    def __enter__(self) -> None:
        self._before = [*map(_version_of, self._tensors)]

    def __exit__(self, kind: object, error: object, trace: object) -> None:
        """Compare the version counters with those from before the forward.

        Raises:
            TaskError: the forward wrote to a parameter.
        """
        if error is not None or self._before == (after := [*map(_version_of, self._tensors)]):
            return
        before = self._before
        changed = [s.name for s, a, b in zip(self._parameters, before, after, strict=True) if a != b]
        others = f" and {len(changed) - 1} more" if len(changed) > 1 else ""
        raise TaskError(
            f"the forward changes the parameter '{changed[0]}'{others}, as max_norm of nn.Embedding does:"
            " the result of other micro-batches would depend on the rank that runs them",
            next_step="limit the norm after the update, in a custom optimizer, and remove max_norm;"
            " or train in one process with batch.shards = 1",
        )


class ReplicatedRunner:
    """Runner of a whole model: one forward and one backward for each micro-batch.

    Args:
        sharded_model: a model whose forward this rank can run.
        loss: the task's loss.
        metric_names: of the loss.
        precision: of forward and backward.
        phases: timer of the phases of a step.
        overlap: hand gradients on during backward; see `GradientHooks`.
        seeds: seed the global generators for every micro-batch; off if other threads share them.
        reports: whether this rank reports sums and buffers; of ranks that compute the same, one does.
        counts: whether its micro-batches are counted; of ranks that each run a part of the same
            micro-batches, one counts them.
    """

    def __init__(
        self,
        sharded_model: ShardedModel,
        loss: LossFunction,
        metric_names: MetricNames,
        *,
        precision: MixedPrecision,
        phases: PhaseTimer,
        overlap: bool = True,
        seeds: bool = True,
        reports: bool = True,
        counts: bool = True,
    ) -> None:
        self.sharded_model, self.metric_names = sharded_model, metric_names
        self.buffers = MicroBatchBuffers(sharded_model.model, reports=reports and counts)
        # A rank that updates a part of a tensor cannot keep the gradient in `.grad` of the whole: the
        # shapes differ.
        release_gradients = sharded_model.frees_gradients or sharded_model.updates_partially
        self.gradients = GradientHooks(
            sharded_model.computes, overlap=overlap, frees_gradients=release_gradients
        )
        self._model, self._device = sharded_model.model, sharded_model.device
        self._loss, self.precision, self._phases = loss, precision, phases
        self._dropouts, self._seeds, self._reports = name_dropouts(sharded_model.model), seeds, reports
        self.counts, self._evaluation_call = counts, EvaluationCall()
        self._in_place_guard = InPlaceWriteGuard(sharded_model.computes)
        self._may_write_parameters = seeds and not overlap
        self._write_guard: AbstractContextManager[None] = self._in_place_guard

    @property
    def used(self) -> Collection[str]:
        return self.gradients.used

    @property
    def norms(self) -> Mapping[TensorSlot, Sequence[Tensor]]:
        return self.gradients.norms

    @property
    def schedule(self) -> MeasuredSchedule | None:
        return None

    def run(
        self, micro_batches: Iterable[LoadedBatch], num_micro_batches: int, sink: GradientSink, scale: float
    ) -> LossSums:
        """Run the micro-batches; a gradient is handed on during backward as soon as it is complete."""
        self._phases.begin("forward")
        sums, iterator = self._begin(num_micro_batches), iter(micro_batches)
        self._gather(self.sharded_model.use.begin)
        for i in range(num_micro_batches):
            self._phases.begin("data")
            # Not a loop over the iterator: the time of loading counts as a phase of its own.
            loaded = next(iterator)
            with self._open(loaded, sink, is_last=i == num_micro_batches - 1) as batch:
                self._forward_backward(loaded.micro_batch, batch, sums, scale)
        if not (num_micro_batches or sink.by_micro_batch):
            # Without a micro-batch no backward runs, and the sink still expects every slot once.
            self.gradients.open(sink)
            self.gradients.close()
        self._gather(self.sharded_model.use.end)
        return sums if self._reports else LossSums(self.metric_names)

    def _gather(self, hook: Callable[[], None]) -> None:
        """Run an all-gather or free hook if parameters are not always in memory."""
        if self.sharded_model.use.gathers:
            self._phases.begin("communication")
            hook()

    def _begin(self, num_micro_batches: int) -> LossSums:
        """Reset the gradients and buffers of the last step; return empty sums."""
        # Switching visits every module, which takes time in every step.
        if not self._model.training:
            enter_training(self._model)
        self.gradients.begin()
        self.buffers.begin_step()
        # With a single micro-batch on a single rank, nothing else can depend on the write.
        may_write = self._may_write_parameters and num_micro_batches <= 1
        self._write_guard = nullcontext() if may_write else self._in_place_guard
        return LossSums(self.metric_names, counts=self.counts)

    def _open(self, loaded: LoadedBatch, sink: GradientSink, *, is_last: bool) -> AbstractContextManager[Any]:
        """Prepare for a micro-batch; return the context manager in which it runs."""
        self._gather(self.sharded_model.use.next)
        if sink.by_micro_batch:
            sink.micro_batch(range(loaded.micro_batch.shard, loaded.micro_batch.shard + 1), is_last)
        # With None as sink, autograd only adds up gradients until the last micro-batch.
        self.gradients.open(sink if is_last or sink.by_micro_batch else None)
        return self.sharded_model.seen(loaded.batch)

    def _forward_backward(self, micro_batch: MicroBatch, batch: Any, sums: LossSums, scale: float) -> None:
        self._phases.begin("forward")
        loss = self._run_forward(micro_batch, batch)
        sums.add(loss)
        self._phases.begin("backward")
        try:
            backward_scaled(loss.total, scale)
        except CheckpointError as error:
            raise explain_checkpoint_error(error) from error
        # Recomputation in backward may change buffers again, so they are read after backward.
        self.buffers.end_micro_batch()
        self.gradients.close()

    def _run_forward(self, micro_batch: MicroBatch, batch: Any) -> Loss:
        seed_micro_batch(micro_batch.key, self._device if self._seeds else None, self._dropouts)
        try:
            with self._write_guard, self.precision.autocast():
                return check_loss(self._loss(self._model, batch))
        except FORWARD_ERRORS as error:
            raise_for_too_few_values(error, len(micro_batch.indices))
            explain_forward_error(error, micro_batch, batch, self._runs_alone)
            raise

    def _run_alone(self, batch: Any) -> None:
        """Run the loss on a part of a micro-batch that has failed, to find out which samples are wrong."""
        self._model.eval()
        with torch.no_grad(), self.precision.autocast(), whole_batch_scope():
            self._loss(self._model, batch)

    def _runs_alone(self) -> Callable[[Any], object] | None:
        """Return what runs a part of a failed batch; None where a forward waits for other ranks."""
        sharded = self.sharded_model
        is_alone = not sharded.use.gathers and sharded.seen is nullcontext and sharded.device.type == "cpu"
        return self._run_alone if is_alone and all(slot.is_whole for slot in sharded.computes) else None

    def repeat(self, micro_batches: Iterable[LoadedBatch]) -> Iterator[Loss]:
        """Yield the loss of micro-batches of training with its graph, at the present weights.

        It is for an optimizer that evaluates the loss in its update. Random numbers are those of the step,
        and buffers keep their values.
        """
        before = [b.clone() for b in self._model.buffers()]
        for loaded in micro_batches:
            with self.sharded_model.seen(loaded.batch) as batch:
                yield self._run_forward(loaded.micro_batch, batch)
        with torch.no_grad():
            for b, value in zip(self._model.buffers(), before, strict=True):
                b.copy_(value)

    def abort(self) -> None:
        self.gradients.stop()
        self.sharded_model.use.drop()
        self.buffers.abort_step()

    def forward_only(self, micro_batches: Iterable[LoadedBatch], function: ModelFunction) -> None:
        with torch.no_grad(), evaluating(self._model), whole_batch_scope():
            self.sharded_model.use.begin()
            for loaded in micro_batches:
                self.sharded_model.use.next()
                with self.precision.autocast(), self.sharded_model.seen(loaded.batch) as batch:
                    try:
                        self._evaluation_call(function, self._model, batch)
                    except FORWARD_ERRORS as error:
                        explain_forward_error(error, loaded.micro_batch, batch, self._runs_alone)
                        raise
            self.sharded_model.use.end()

    def evaluate(self, micro_batches: Iterable[LoadedBatch]) -> LossSums:
        """Return loss, count and metrics of held-out micro-batches, computed without gradients or dropout."""
        sums = LossSums(self.metric_names)
        self.forward_only(micro_batches, lambda model, batch: sums.add(check_loss(self._loss(model, batch))))
        return sums if self._reports else LossSums(self.metric_names)
