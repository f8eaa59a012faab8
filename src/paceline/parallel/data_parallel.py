"""Backward from a loss that is multiplied with a number: the number is where backward begins, not a product.

A product would be one more node of the graph, and two more kernels in every micro-batch.

Sees a forward that writes to the parameters, as `max_norm` of `nn.Embedding` does.

Such a forward has no place among several: what one micro-batch computes would depend on those that ran before
it on the same rank, and ranks would change their parameters differently, without a word.

Replicate: all that a rank computes with is whole. Forward and backward of its micro-batches, gradients to
the sink.

Invariant: what a micro-batch computes depends on the parameters, its samples and its key alone. Gradients of
the micro-batches of one rank are added by autograd, and handed on while the backward of the last runs; or, to
a sink that takes them apart, handed on micro-batch by micro-batch.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from operator import attrgetter
from typing import Any

import torch
from torch import Tensor, nn

from paceline.comm.reduction.gradients import GradientSink
from paceline.data.work import LoadedBatch, MicroBatch
from paceline.errors import TaskError
from paceline.models.dropout import name_dropouts
from paceline.observe.step_stats import PhaseTimer
from paceline.parallel.gradient_hooks import GradientHooks
from paceline.parallel.mixed_precision import MixedPrecision
from paceline.parallel.model_buffers import MicroBatchBuffers
from paceline.parallel.model_runner import (
    LossSums,
    MetricNames,
    ModelFunction,
    check_loss,
    raise_for_too_few_values,
)
from paceline.parallel.rng_state import seed_micro_batch
from paceline.parallel.sharded_model import ShardedModel
from paceline.state.slot import TensorSlot
from paceline.task import Loss, LossFunction

_HALF_DTYPES = (torch.float16, torch.bfloat16)


def backward_scaled(total: Tensor, scale: float) -> None:
    """Add the gradients of `total * scale` to the leaves.

    Args:
        total: a loss, with one value.
        scale: finite.
    Exactness: those of the product: both begin with `scale`, rounded once to the type of `total`.
    """
    if scale == 1.0:
        total.backward()
    elif total.dtype in _HALF_DTYPES:  # which may not hold the number, and a product says so by an infinity
        (total * scale).backward()
    else:
        total.backward(torch.full_like(total, scale))


_version_of = attrgetter("_version")


class InPlaceWriteGuard:
    """Parameters that only an update may write to.

    Not seen: a write to `parameter.data`, which PyTorch does not count.

    Args:
        parameters: by slot. Their version counters are read twice a forward, and cost nothing beside it.
    """

    def __init__(self, parameters: Mapping[TensorSlot, nn.Parameter]) -> None:
        self._parameters, self._own = parameters, [*parameters.values()]
        self._before: list[int] = []

    def __enter__(self) -> None:
        self._before = [*map(_version_of, self._own)]

    def __exit__(self, kind: object, error: object, trace: object) -> None:
        """Compare with what was before a forward.

        Raises:
            TaskError: it wrote to a parameter.
        """
        if error is not None or self._before == (after := [*map(_version_of, self._own)]):
            return
        before = self._before
        changed = [s.name for s, a, b in zip(self._parameters, before, after, strict=True) if a != b]
        others = f" and {len(changed) - 1} more" if len(changed) > 1 else ""
        raise TaskError(
            f"the forward changes the parameter '{changed[0]}'{others}, as max_norm of nn.Embedding does:"
            " what other micro-batches compute would depend on which rank runs them",
            next_step="bound it after the update, in an optimizer of your own, and leave max_norm out;"
            " or train in one process with batch.shards = 1",
        )


class ReplicatedRunner:
    """One whole forward and backward a micro-batch.

    Args:
        sharded_model: of a model whose forward this rank can run.
        loss: the task's loss.
        metric_names: of the loss.
        precision: of forward and backward.
        phases: where the seconds go.
        overlap: see `GradientHooks`.
        seeds: seed PyTorch's own generators for every micro-batch; not where other threads share them.
        reports: whether this rank reports sums and buffers; of ranks that compute the same, one does.
        counts: whether what it reports counts as micro-batches; of ranks that each run a part of the same
            micro-batches, one does.
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
        release_gradients = (
            sharded_model.frees_gradients or sharded_model.updates_partially
        )  # what is updated has another shape than the gradient
        self.gradients = GradientHooks(
            sharded_model.computes, overlap=overlap, frees_gradients=release_gradients
        )
        self._model, self._device = sharded_model.model, sharded_model.device
        self._loss, self.precision, self._phases = loss, precision, phases
        self._dropouts, self._seeds, self._reports = name_dropouts(sharded_model.model), seeds, reports
        self.counts = counts
        self._in_place_guard, self._may_write_parameters = (
            InPlaceWriteGuard(sharded_model.computes),
            seeds and not overlap,
        )
        self._write_guard: AbstractContextManager[None] = self._in_place_guard

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
        """See `ModelRunner.run`; a gradient is handed on, during backward, as soon as it is complete."""
        self._phases.begin("forward")
        sums, pulled = self._begin(count), iter(micro_batches)
        self._gather(self.sharded_model.use.begin)
        for i in range(count):
            self._phases.begin("data")
            loaded = next(pulled)
            with self._open(loaded, sink, is_last=i == count - 1) as batch:
                self._forward_backward(loaded.micro_batch, batch, sums, scale)
        if not (count or sink.by_micro_batch):
            self.gradients.open(sink)
            self.gradients.close()
        self._gather(self.sharded_model.use.end)
        return sums if self._reports else LossSums(self.metric_names)

    def _gather(self, move: Callable[[], None]) -> None:
        """One of the moves around the use of a model that is not all in memory; else there is none."""
        if self.sharded_model.use.gathers:
            self._phases.begin("communication")
            move()

    def _begin(self, count: int) -> LossSums:
        """Forget the step before; returns sums of nothing."""
        if not self._model.training:
            self._model.train()
        self.gradients.begin()
        self.buffers.begin_step()
        may_write = self._may_write_parameters and count <= 1  # alone, a forward may do what it likes
        self._write_guard = nullcontext() if may_write else self._in_place_guard
        return LossSums(self.metric_names, counts=self.counts)

    def _open(self, loaded: LoadedBatch, sink: GradientSink, *, is_last: bool) -> AbstractContextManager[Any]:
        """Get ready for a micro-batch; returns the block in which it is run."""
        self._gather(self.sharded_model.use.next)
        if sink.by_micro_batch:
            sink.micro_batch(range(loaded.micro_batch.shard, loaded.micro_batch.shard + 1), is_last)
        self.gradients.open(sink if is_last or sink.by_micro_batch else None)
        return self.sharded_model.seen(loaded.batch)

    def _forward_backward(self, micro_batch: MicroBatch, batch: Any, sums: LossSums, scale: float) -> None:
        self._phases.begin("forward")
        loss = self._run_forward(micro_batch, batch)
        sums.add(loss)
        self._phases.begin("backward")
        backward_scaled(loss.total, scale)
        self.buffers.end_micro_batch()
        self.gradients.close()

    def _run_forward(self, micro_batch: MicroBatch, batch: Any) -> Loss:
        everything = self._seeds and self.precision.seeds_everything
        seed_micro_batch(
            micro_batch.key, self._device if self._seeds else None, self._dropouts, everything=everything
        )
        try:
            with self._write_guard, self.precision.autocast():
                return check_loss(self._loss(self._model, batch))
        except ValueError as error:
            raise_for_too_few_values(error, len(micro_batch.indices))
            raise

    def abort(self) -> None:
        """See `ModelRunner`."""
        self.gradients.stop()
        self.sharded_model.use.drop()
        self.buffers.abort_step()

    def answer(self, micro_batches: Iterable[LoadedBatch], ask: ModelFunction) -> None:
        """See `ModelRunner`."""
        self._model.eval()
        with torch.no_grad():
            self.sharded_model.use.begin()
            for loaded in micro_batches:
                self.sharded_model.use.next()
                with self.precision.autocast(), self.sharded_model.seen(loaded.batch) as batch:
                    ask(self._model, batch)
            self.sharded_model.use.end()

    def evaluate(self, micro_batches: Iterable[LoadedBatch]) -> LossSums:
        """Loss, count and metrics of held-out micro-batches, without gradients or dropout."""
        sums = LossSums(self.metric_names)
        self.answer(micro_batches, lambda model, batch: sums.add(check_loss(self._loss(model, batch))))
        return sums if self._reports else LossSums(self.metric_names)
