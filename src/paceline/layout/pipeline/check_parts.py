"""Tries before the first step whether a stage may run parts of a micro-batch: no sample may see another.

Two samples go through the chain, whole and one by one. Invariant: what passed gives for parts what it gives
for the whole, but for rounding, on the samples that were tried. A model that is built without memory has no
values to try: what can be seen while it runs is (`passing`), and `paceline verify` tells the rest.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map

from paceline.data import collate_samples
from paceline.errors import TaskError
from paceline.layout.buffers import MicroBatchBuffers
from paceline.layout.pipeline.chain import Stage, as_tuple
from paceline.layout.pipeline.parts import batch_part
from paceline.layout.pipeline.view import Answers, Call, asked
from paceline.layout.sums import checked
from paceline.models.dropout import KeyedDropout, name_dropouts
from paceline.task import Task

_ROUNDING = 1e-3
"""Of the largest value; samples that see each other differ by more."""
_TRIED = 2


def check_parts(
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
        _Trial(task, model, chunks).run(divided)


class _Trial:
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
            whole = self._of(number, x, range(_TRIED), dropouts)
            buffers.take_back(0, number)
            if number in divided:
                for name in buffers.changed:
                    if name not in before:  # by this chunk; those of whole micro-batches may
                        raise changes_buffers(name)
                found = [self._of(number, x, range(k, k + 1), dropouts) for k in range(_TRIED)]
                self._compare(number, whole, found)
            x = whole

    def _of(
        self, number: int, x: tuple[Any, ...], samples: range, dropouts: Sequence[KeyedDropout]
    ) -> tuple[Any, ...]:
        """What a chunk makes of some samples; the last one the numbers of the loss."""
        for dropout in dropouts:
            dropout.take_key(0)
            dropout.take_samples(samples, _TRIED)
        torch.manual_seed(0)
        batch, x = (tree_map(_copied, one) for one in (self._batch, x))
        if len(samples) < _TRIED:
            batch, x = (batch_part(one, samples, _TRIED) for one in (batch, x))
        given = Call(x, {})
        if number == 0:
            given = asked(self._task.loss, batch, training=True)
        found = as_tuple(Stage(self._chunks[number])(*given.inputs, **given.named))
        if number < len(self._chunks) - 1:
            return found
        answer = found if len(found) > 1 else found[0]
        loss = checked(self._task.loss(Answers(lambda: answer).train(), batch))
        numbers = [loss.total, loss.count, *(loss.metrics or {}).values()]
        return tuple(torch.as_tensor(n).detach().double().reshape(1) for n in numbers)

    def _compare(self, number: int, whole: Sequence[Tensor], found: Sequence[Sequence[Tensor]]) -> None:
        is_last = number == len(self._chunks) - 1
        for right, *parts in zip(whole, *found, strict=True):
            ours = sum(parts[1:], start=parts[0]) if is_last else torch.cat(parts)
            if ours.shape != right.shape or not _close(right, ours, parts):
                what = "the loss" if is_last else f"what {type(self._chunks[number][-1]).__name__} returns"
                raise TaskError(
                    f"{what} is another for two samples one by one than for both together, and rechunk runs"
                    " parts of a micro-batch",
                    next_step="use layers and a loss that see one sample at a time, or leave out rechunk",
                )


def _copied(value: Any) -> Any:
    """A stage may write to what it is given, and others are given it again."""
    return value.clone() if isinstance(value, Tensor) else value


def _close(right: Tensor, ours: Tensor, parts: Sequence[Tensor]) -> bool:
    """But for rounding in what the parts are; their sum may be small."""
    a, b, *others = (t.double().nan_to_num() for t in (right, ours, *parts))
    largest = max(float(t.abs().max()) for t in (a, *others)) if a.numel() else 0.0
    return not a.numel() or float((a - b).abs().max()) <= _ROUNDING * largest


def changes_buffers(name: str) -> TaskError:
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
