"""Micro-batches in parts (rechunk=): messages are divided and joined by samples, which must be independent.

A stage that runs smaller parts than its neighbour divides what it receives by samples; one that runs larger
parts joins it. Invariant: joined, the parts are the micro-batch, in the order of its samples; a part without
samples is neither sent nor awaited.

Parts are only right if no sample depends on another. Before the first step, two samples run through the
chain, together and one by one, and the results must be equal except for rounding. A model built on `meta`
has no values for such a test: `forward_backward` checks some conditions while it runs, and `paceline verify`
finds the rest.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map

from paceline.data.loader import collate_samples
from paceline.errors import TaskError, format_count
from paceline.models.dropout import KeyedDropout, name_dropouts
from paceline.models.training_mode import enter_training, restored_modes
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
from paceline.parallel.rng_state import preserved_generators, seed_micro_batch
from paceline.pipeline_schedule.schedule_table import PipelineAction, overlapping_parts, part_samples
from paceline.task import Task


class PartReceiver:
    """Receiver of messages from neighbours, in the parts of this stage.

    Args:
        stage: of this rank.
        parts_by_stage: number of parts in which each stage runs a micro-batch.
        num_chunks: of the model, on each rank.
    """

    def __init__(
        self, transport: StageTransport, stage: int, parts_by_stage: Sequence[int], num_chunks: int
    ) -> None:
        self._transport, self._stage, self._parts_by_stage, self._num_chunks = (
            transport,
            stage,
            parts_by_stage,
            num_chunks,
        )
        self._divided: dict[PipelineAction, tuple[StageMessage, int]] = {}

    def key(self, action: PipelineAction) -> int:
        """Return the key of a message: the action that receives it, and the part that sends it."""
        number = action.micro_batch * self._num_chunks + action.chunk
        # The largest number of parts of any stage, so that sender and receiver compute the same key.
        return 2 * (number * max(self._parts_by_stage) + action.part) + (action.kind == "B")

    def take(self, source: int, action: PipelineAction, num_samples: int) -> StageMessage:
        """Receive what an action needs from a neighbour: tensors and a number.

        Args:
            num_samples: of the whole micro-batch; 0 if it is not run in parts.
        Raises:
            TaskError: samples are not the first dimension of what was sent.
        """
        num_parts, num_source_parts = self._parts_by_stage[self._stage], self._parts_by_stage[source]
        if num_parts == num_source_parts or not num_samples:
            return self._transport.receive(source, key=self.key(action))
        source_actions = [
            action._replace(part=source_part)
            for source_part in overlapping_parts(action.part, num_parts, num_source_parts)
        ]
        spans = [
            part_samples(num_samples, num_source_parts, source_action.part)
            for source_action in source_actions
        ]
        if num_parts > num_source_parts:
            return self._divide(
                source, source_actions[0], spans[0], part_samples(num_samples, num_parts, action.part)
            )
        # A part without samples was not sent.
        nonempty = [
            (source_action, len(span))
            for source_action, span in zip(source_actions, spans, strict=True)
            if span
        ]
        messages = [
            self._transport.receive(source, key=self.key(source_action)) for source_action, _ in nonempty
        ]
        columns = zip(*(_sample_tensors(message, action) for message in messages), strict=True)
        joined = [_joined(column, [n for _, n in nonempty]) for column in columns]
        return joined + messages[0][0][len(joined) :], messages[0][1]

    def _divide(self, source: int, source_action: PipelineAction, span: range, wanted: range) -> StageMessage:
        """Return some samples of a message, which is kept until all of its samples were used."""
        if source_action not in self._divided:
            self._divided[source_action] = (
                self._transport.receive(source, key=self.key(source_action)),
                len(span),
            )
        message, remaining = self._divided.pop(source_action)
        if remaining > len(wanted):
            self._divided[source_action] = message, remaining - len(wanted)
        tensors = _sample_tensors(message, source_action)
        _require_samples(tensors, len(span))
        samples = [x[wanted.start - span.start : wanted.stop - span.start] for x in tensors]
        return samples + message[0][len(samples) :], message[1]

    def abort(self) -> None:
        """Drop the rest of divided messages."""
        self._divided = {}


def slice_batch(batch: Any, samples: range, num_samples: int) -> Any:
    """Return some samples of a batch.

    Args:
        batch: a tensor whose first dimension is samples, or containers of such tensors; numbers stay as they
            are.
        num_samples: of the batch.
    Raises:
        TaskError: the batch contains something else.
    """
    return tree_map(partial(_slice_samples, wanted=samples, num_samples=num_samples), batch)


def _slice_samples(value: Any, wanted: range, num_samples: int) -> Any:
    if isinstance(value, Tensor):
        _require_samples([value], num_samples)
        return value[wanted.start : wanted.stop]
    if value is None or isinstance(value, bool | int | float):
        return value
    raise TaskError(
        f"a batch contains {type(value).__name__}, which a stage with rechunk cannot split by samples",
        next_step="let Task(collate=...) return tensors with samples first, or leave out rechunk",
    )


def _sample_tensors(message: StageMessage, action: PipelineAction) -> list[Tensor]:
    """Return the tensors of a message that have samples; the state of a generator may follow them."""
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
                f"a tensor of shape {list(x.shape)} does not have {format_count(num_samples, 'sample')} as"
                " its first dimension, by which rechunk splits a micro-batch",
                next_step="make samples the first dimension of all tensors in a batch and between stages, or"
                " leave out rechunk",
            )


_TOLERANCE = 1e-3
"""Tolerance relative to the largest value; results of samples that depend on each other differ by more."""
_NUM_SAMPLES = 2


def check_sample_independence(
    task: Task, model: nn.Module, chunks: Sequence[Sequence[nn.Module]], parts_by_stage: Sequence[int]
) -> None:
    """Compare the results of two samples together and one by one, in chunks whose stage has several parts.

    Args:
        chunks: links of the model, by chunk.
        parts_by_stage: number of parts; chunks are assigned to stages in turn.
    Raises:
        TaskError: a hook waits for the gradient of a micro-batch, a forward changes buffers, or the results
            differ.
    """
    divided = [k for k in range(len(chunks)) if parts_by_stage[k % len(parts_by_stage)] > 1]
    for k in divided:
        _require_no_hooks(chunks[k])
    if divided and not any(p.is_meta for p in model.parameters()):
        _IndependenceCheck(task, model, chunks).run(divided)


class _IndependenceCheck:
    """Check that samples do not depend on each other, with two samples of the task."""

    def __init__(self, task: Task, model: nn.Module, chunks: Sequence[Sequence[nn.Module]]) -> None:
        self._task, self._model, self._chunks = task, model, chunks
        device = next(model.parameters()).device
        samples = [task.data[0], task.data[len(task.data) - 1]]
        self._batch = collate_samples(task, samples, device)

    def run(self, divided: Sequence[int]) -> None:
        """Check all chunks one after another, and restore the model."""
        dropouts, buffers = name_dropouts(self._model), MicroBatchBuffers(self._model)
        buffers.begin_step()
        try:
            # The check must not change the random numbers of the first step.
            with torch.no_grad(), preserved_generators(), restored_modes(self._model):
                enter_training(self._model)
                self._run_chunks(divided, dropouts, buffers)
        finally:
            buffers.abort_step()
            for dropout in dropouts:
                dropout.micro_batch_key = None
                dropout.take_all()

    def _run_chunks(
        self, divided: Sequence[int], dropouts: Sequence[KeyedDropout], buffers: MicroBatchBuffers
    ) -> None:
        x: tuple[Any, ...] = ()
        for number in range(len(self._chunks)):
            before = set(buffers.changed)
            buffers.swap_in()
            whole = self._run_chunk(number, x, range(_NUM_SAMPLES), dropouts)
            buffers.swap_out(0, number)
            if number in divided:
                for name in buffers.changed:
                    # Chunks that run whole micro-batches may change buffers.
                    if name not in before:
                        raise changed_buffer_error(name)
                results = [self._run_chunk(number, x, range(k, k + 1), dropouts) for k in range(_NUM_SAMPLES)]
                self._compare(number, whole, results)
            x = whole

    def _run_chunk(
        self, number: int, x: tuple[Any, ...], samples: range, dropouts: Sequence[KeyedDropout]
    ) -> tuple[Any, ...]:
        """Return the outputs of a chunk for some samples; the values of the loss for the last chunk."""
        # Every call draws the same numbers, so they cannot cause a difference.
        seed_micro_batch(0, next(self._model.parameters()).device, dropouts)
        for dropout in dropouts:
            dropout.take_samples(samples, _NUM_SAMPLES)
        batch, x = (tree_map(_clone_tensor, value) for value in (self._batch, x))
        if len(samples) < _NUM_SAMPLES:
            batch, x = (slice_batch(value, samples, _NUM_SAMPLES) for value in (batch, x))
        call = ModelCall(x, {})
        if number == 0:
            call = record_call(self._task.loss, batch, training=True)
        outputs = as_tuple(StageModule(self._chunks[number])(*call.inputs, **call.named))
        if number < len(self._chunks) - 1:
            return outputs
        output = outputs if len(outputs) > 1 else outputs[0]
        loss = check_loss(self._task.loss(OutputStandIn(lambda: output).train(), batch))
        numbers = [loss.total, loss.count, *(loss.metrics or {}).values()]
        return tuple(torch.as_tensor(n).detach().double().reshape(1) for n in numbers)

    def _compare(self, number: int, whole: Sequence[Tensor], results: Sequence[Sequence[Tensor]]) -> None:
        is_last = number == len(self._chunks) - 1
        for expected, *part_results in zip(whole, *results, strict=True):
            # Losses and counts are sums over samples, so those of the parts add up to the whole.
            actual = sum(part_results[1:], start=part_results[0]) if is_last else torch.cat(part_results)
            if actual.shape != expected.shape or not _is_close(expected, actual, part_results):
                what = "the loss" if is_last else f"what {type(self._chunks[number][-1]).__name__} returns"
                raise TaskError(
                    f"{what} differs between two samples together and one by one, but rechunk runs parts of a"
                    " micro-batch",
                    next_step="use layers and a loss that treat each sample alone, or leave out rechunk",
                )


def _clone_tensor(value: Any) -> Any:
    """Clone a tensor, because a stage may change its input in place and it is used again."""
    return value.clone() if isinstance(value, Tensor) else value


def _is_close(expected: Tensor, actual: Tensor, part_results: Sequence[Tensor]) -> bool:
    """Return whether values are equal except for rounding relative to the parts, whose sum may be small."""
    # A NaN in both is no difference between the whole and its parts.
    a, b, *others = (t.double().nan_to_num() for t in (expected, actual, *part_results))
    largest = max(float(t.abs().max()) for t in (a, *others)) if a.numel() else 0.0
    return not a.numel() or float((a - b).abs().max()) <= _TOLERANCE * largest


def changed_buffer_error(name: str) -> TaskError:
    """Return the error for a forward that records something about the whole micro-batch in a buffer."""
    return TaskError(
        f"the forward changes the buffer '{name}' from a whole micro-batch, but rechunk runs parts of it",
        next_step="set 1 in rechunk for that stage, or use a norm without running statistics",
    )


def _require_no_hooks(links: Sequence[nn.Module]) -> None:
    for p in {p for link in links for p in link.parameters()}:
        if p._backward_hooks or getattr(p, "_post_accumulate_grad_hooks", None):
            raise TaskError(
                "a parameter has gradient hooks, which expect the gradient of a micro-batch, but rechunk"
                " computes it part by part",
                next_step="set 1 in rechunk for that stage, or remove the hooks",
            )
