"""A micro-batch in parts: which samples of a batch are one, and what neighbours send as the own parts.

A stage that runs smaller parts than its neighbour divides what comes by samples, one that runs larger parts
joins it. Invariant: joined, the parts are the micro-batch, in the order of its samples; a part without
samples is neither sent nor waited for.

Tries before the first step whether a stage may run parts of a micro-batch: no sample may see another.

Two samples go through the chain, whole and one by one. Invariant: what passed gives for parts what it gives
for the whole, but for rounding, on the samples that were tried. A model that is built without memory has no
values to try: what can be seen while it runs is (`passing`), and `paceline verify` tells the rest.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map

from paceline.data.loader import collate_samples
from paceline.errors import TaskError
from paceline.models.dropout import KeyedDropout, name_dropouts
from paceline.parallel.model_buffers import MicroBatchBuffers
from paceline.parallel.model_runner import check_loss
from paceline.parallel.pipeline.model_chain import (
    ModelCall,
    OutputStandIn,
    StageModule,
    as_tuple,
    record_call,
)
from paceline.parallel.pipeline.p2p import StageMessage, StageTransport
from paceline.pipeline_schedule.schedule_table import PipelineAction, overlapping_parts, part_samples
from paceline.task import Task


class PartReceiver:
    """What neighbours have sent, in the parts of this stage.

    Args:
        stage: this rank's.
        parts: by stage, in how many it runs each micro-batch.
        num_chunks: of the model, on each rank.
    """

    def __init__(self, wire: StageTransport, stage: int, parts: Sequence[int], num_chunks: int) -> None:
        self._wire, self._stage, self._parts, self._num_chunks = wire, stage, parts, num_chunks
        self._divided: dict[PipelineAction, tuple[StageMessage, int]] = {}

    def key(self, action: PipelineAction) -> int:
        """What a message is for: the operation that takes it, and the part that sends it."""
        number = action.micro_batch * self._num_chunks + action.chunk
        return 2 * (number * max(self._parts) + action.part) + (action.kind == "B")

    def take(self, source: int, action: PipelineAction, num_samples: int) -> StageMessage:
        """What an operation needs of a neighbour: tensors, and a number.

        Args:
            num_samples: of the whole micro-batch; 0: it is not run in parts.
        Raises:
            TaskError: samples are not the first dimension of what was sent.
        """
        own, theirs = self._parts[self._stage], self._parts[source]
        if own == theirs or not num_samples:
            return self._wire.receive(source, key=self.key(action))
        of = [action._replace(part=part) for part in overlapping_parts(action.part, own, theirs)]
        spans = [part_samples(num_samples, theirs, one.part) for one in of]
        if own > theirs:
            return self._divide(source, of[0], spans[0], part_samples(num_samples, own, action.part))
        there = [(one, len(span)) for one, span in zip(of, spans, strict=True) if span]
        found = [self._wire.receive(source, key=self.key(one)) for one, _ in there]
        columns = zip(*(_sample_tensors(message, action) for message in found), strict=True)
        joined = [_joined(column, [n for _, n in there]) for column in columns]
        return joined + found[0][0][len(joined) :], found[0][1]

    def _divide(self, source: int, of: PipelineAction, span: range, wanted: range) -> StageMessage:
        """Some samples of a message, which is kept until all were taken."""
        if of not in self._divided:
            self._divided[of] = self._wire.receive(source, key=self.key(of)), len(span)
        message, left = self._divided.pop(of)
        if left > len(wanted):
            self._divided[of] = message, left - len(wanted)
        tensors = _sample_tensors(message, of)
        _require_samples(tensors, len(span))
        own = [x[wanted.start - span.start : wanted.stop - span.start] for x in tensors]
        return own + message[0][len(own) :], message[1]

    def abort(self) -> None:
        """Forget what is left."""
        self._divided = {}


def slice_batch(batch: Any, samples: range, num_samples: int) -> Any:
    """Some samples of a batch.

    Args:
        batch: a tensor whose first dimension are the samples, or containers of such; numbers stay.
        num_samples: of the batch.
    Raises:
        TaskError: it has something else in it.
    """
    return tree_map(partial(_slice_samples, wanted=samples, num_samples=num_samples), batch)


def _slice_samples(part: Any, wanted: range, num_samples: int) -> Any:
    if isinstance(part, Tensor):
        _require_samples([part], num_samples)
        return part[wanted.start : wanted.stop]
    if part is None or isinstance(part, bool | int | float):
        return part
    raise TaskError(
        f"a batch has {type(part).__name__} in it, and a stage that runs parts of it has to know its samples",
        next_step="make tensors whose first dimension is samples in Task(collate=...), or leave out rechunk",
    )


def _sample_tensors(message: StageMessage, action: PipelineAction) -> list[Tensor]:
    """What has samples: behind the activations there may be the state of a generator (`drawn`)."""
    tensors, note = message
    return tensors[:-1] if action.kind == "F" and note else tensors


def _joined(column: Sequence[Tensor], sizes: Sequence[int]) -> Tensor:
    for x, size in zip(column, sizes, strict=True):
        _require_samples([x], size)
    return torch.cat(list(column))


def _require_samples(tensors: Sequence[Tensor], num_samples: int) -> None:
    for x in tensors:
        if not x.dim() or len(x) != num_samples:
            raise TaskError(
                f"a tensor of the shape {list(x.shape)} is no {num_samples} samples, and a part of a"
                " micro-batch is some of its samples",
                next_step="let samples be the first dimension of what a batch has and what stages send, or"
                " leave out rechunk",
            )


_TOLERANCE = 1e-3
"""Of the largest value; samples that see each other differ by more."""
_NUM_SAMPLES = 2


def check_sample_independence(
    task: Task, model: nn.Module, chunks: Sequence[Sequence[nn.Module]], parts: Sequence[int]
) -> None:
    """Run two samples through every chunk, and one by one through those whose stage has several parts.

    Args:
        chunks: the links of the model, by chunk.
        parts: by stage; chunks are dealt to stages in turn.
    Raises:
        TaskError: a hook waits for the gradient of a micro-batch, a forward changes buffers, or the results
            differ.
    """
    divided = [k for k in range(len(chunks)) if parts[k % len(parts)] > 1]
    for k in divided:
        _require_no_hooks(chunks[k])
    if divided and not any(p.is_meta for p in model.parameters()):
        _IndependenceCheck(task, model, chunks).run(divided)


class _IndependenceCheck:
    """A model, and two samples."""

    def __init__(self, task: Task, model: nn.Module, chunks: Sequence[Sequence[nn.Module]]) -> None:
        self._task, self._model, self._chunks = task, model, chunks
        device = next(model.parameters()).device
        samples = [task.data[0], task.data[len(task.data) - 1]]
        self._batch = collate_samples(task, samples, device)

    def run(self, divided: Sequence[int]) -> None:
        """All chunks, one after another."""
        training, dropouts = self._model.training, name_dropouts(self._model)
        buffers = MicroBatchBuffers(self._model)
        buffers.begin_step()
        self._model.train()
        try:
            with torch.no_grad(), torch.random.fork_rng():
                self._through(divided, dropouts, buffers)
        finally:
            buffers.abort_step()
            self._model.train(training)
            for dropout in dropouts:
                dropout.micro_batch_key = None
                dropout.take_all()

    def _through(
        self, divided: Sequence[int], dropouts: Sequence[KeyedDropout], buffers: MicroBatchBuffers
    ) -> None:
        x: tuple[Any, ...] = ()
        for number in range(len(self._chunks)):
            before = set(buffers.changed)
            buffers.lend()
            whole = self._of(number, x, range(_NUM_SAMPLES), dropouts)
            buffers.take_back(0, number)
            if number in divided:
                for name in buffers.changed:
                    if name not in before:  # by this chunk; those of whole micro-batches may
                        raise changed_buffer_error(name)
                found = [self._of(number, x, range(k, k + 1), dropouts) for k in range(_NUM_SAMPLES)]
                self._compare(number, whole, found)
            x = whole

    def _of(
        self, number: int, x: tuple[Any, ...], samples: range, dropouts: Sequence[KeyedDropout]
    ) -> tuple[Any, ...]:
        """What a chunk makes of some samples; the last one the numbers of the loss."""
        for dropout in dropouts:
            dropout.take_key(0)
            dropout.take_samples(samples, _NUM_SAMPLES)
        torch.manual_seed(0)
        batch, x = (tree_map(_clone_tensor, one) for one in (self._batch, x))
        if len(samples) < _NUM_SAMPLES:
            batch, x = (slice_batch(one, samples, _NUM_SAMPLES) for one in (batch, x))
        given = ModelCall(x, {})
        if number == 0:
            given = record_call(self._task.loss, batch, training=True)
        found = as_tuple(StageModule(self._chunks[number])(*given.inputs, **given.named))
        if number < len(self._chunks) - 1:
            return found
        answer = found if len(found) > 1 else found[0]
        loss = check_loss(self._task.loss(OutputStandIn(lambda: answer).train(), batch))
        numbers = [loss.total, loss.count, *(loss.metrics or {}).values()]
        return tuple(torch.as_tensor(n).detach().double().reshape(1) for n in numbers)

    def _compare(self, number: int, whole: Sequence[Tensor], found: Sequence[Sequence[Tensor]]) -> None:
        is_last = number == len(self._chunks) - 1
        for right, *parts in zip(whole, *found, strict=True):
            ours = sum(parts[1:], start=parts[0]) if is_last else torch.cat(parts)
            if ours.shape != right.shape or not _is_close(right, ours, parts):
                what = "the loss" if is_last else f"what {type(self._chunks[number][-1]).__name__} returns"
                raise TaskError(
                    f"{what} is another for two samples one by one than for both together, and rechunk runs"
                    " parts of a micro-batch",
                    next_step="use layers and a loss that see one sample at a time, or leave out rechunk",
                )


def _clone_tensor(value: Any) -> Any:
    """A stage may write to what it is given, and others are given it again."""
    return value.clone() if isinstance(value, Tensor) else value


def _is_close(right: Tensor, ours: Tensor, parts: Sequence[Tensor]) -> bool:
    """But for rounding in what the parts are; their sum may be small."""
    a, b, *others = (t.double().nan_to_num() for t in (right, ours, *parts))
    largest = max(float(t.abs().max()) for t in (a, *others)) if a.numel() else 0.0
    return not a.numel() or float((a - b).abs().max()) <= _TOLERANCE * largest


def changed_buffer_error(name: str) -> TaskError:
    """A forward notes something of the whole micro-batch."""
    return TaskError(
        f"the forward changes the buffer '{name}', from what all samples of a micro-batch have, and rechunk"
        " runs parts of it",
        next_step="leave that stage's micro-batches whole (1), or use a norm without running statistics",
    )


def _require_no_hooks(links: Sequence[nn.Module]) -> None:
    for p in {p for link in links for p in link.parameters()}:
        if p._backward_hooks or getattr(p, "_post_accumulate_grad_hooks", None):
            raise TaskError(
                "a parameter has gradient hooks, which see the gradient of a micro-batch, and rechunk makes"
                " it part by part",
                next_step="leave that stage's micro-batches whole (1), or remove the hooks",
            )
