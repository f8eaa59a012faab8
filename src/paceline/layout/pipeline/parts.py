"""A micro-batch in parts: which samples of a batch are one, and what neighbours send as the own parts.

A stage that runs smaller parts than its neighbour divides what comes by samples, one that runs larger parts
joins it. Invariant: joined, the parts are the micro-batch, in the order of its samples; a part without
samples is neither sent nor waited for.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_map

from paceline.errors import TaskError
from paceline.layout.pipeline.wire import Message, Neighbours
from paceline.schedule import Action, parts_within, samples_of


class Inbox:
    """What neighbours have sent, in the parts of this stage.

    Args:
        stage: this rank's.
        parts: by stage, in how many it runs each micro-batch.
        num_chunks: of the model, on each rank.
    """

    def __init__(self, wire: Neighbours, stage: int, parts: Sequence[int], num_chunks: int) -> None:
        self._wire, self._stage, self._parts, self._num_chunks = wire, stage, parts, num_chunks
        self._divided: dict[Action, tuple[Message, int]] = {}

    def key(self, action: Action) -> int:
        """What a message is for: the operation that takes it, and the part that sends it."""
        number = action.micro_batch * self._num_chunks + action.chunk
        return 2 * (number * max(self._parts) + action.part) + (action.kind == "B")

    def take(self, source: int, action: Action, num_samples: int) -> Message:
        """What an operation needs of a neighbour: tensors, and a number.

        Args:
            num_samples: of the whole micro-batch; 0: it is not run in parts.
        Raises:
            TaskError: samples are not the first dimension of what was sent.
        """
        own, theirs = self._parts[self._stage], self._parts[source]
        if own == theirs or not num_samples:
            return self._wire.receive(source, key=self.key(action))
        of = [action._replace(part=part) for part in parts_within(action.part, own, theirs)]
        spans = [samples_of(num_samples, theirs, one.part) for one in of]
        if own > theirs:
            return self._divide(source, of[0], spans[0], samples_of(num_samples, own, action.part))
        there = [(one, len(span)) for one, span in zip(of, spans, strict=True) if span]
        found = [self._wire.receive(source, key=self.key(one)) for one, _ in there]
        columns = zip(*(_tensors(message, action) for message in found), strict=True)
        joined = [_joined(column, [n for _, n in there]) for column in columns]
        return joined + found[0][0][len(joined) :], found[0][1]

    def _divide(self, source: int, of: Action, span: range, wanted: range) -> Message:
        """Some samples of a message, which is kept until all were taken."""
        if of not in self._divided:
            self._divided[of] = self._wire.receive(source, key=self.key(of)), len(span)
        message, left = self._divided.pop(of)
        if left > len(wanted):
            self._divided[of] = message, left - len(wanted)
        tensors = _tensors(message, of)
        _require_samples(tensors, len(span))
        own = [x[wanted.start - span.start : wanted.stop - span.start] for x in tensors]
        return own + message[0][len(own) :], message[1]

    def abort(self) -> None:
        """Forget what is left."""
        self._divided = {}


def batch_part(batch: Any, samples: range, num_samples: int) -> Any:
    """Some samples of a batch.

    Args:
        batch: a tensor whose first dimension are the samples, or containers of such; numbers stay.
        num_samples: of the batch.
    Raises:
        TaskError: it has something else in it.
    """
    return tree_map(partial(_samples, wanted=samples, num_samples=num_samples), batch)


def _samples(part: Any, wanted: range, num_samples: int) -> Any:
    if isinstance(part, Tensor):
        _require_samples([part], num_samples)
        return part[wanted.start : wanted.stop]
    if part is None or isinstance(part, bool | int | float):
        return part
    raise TaskError(
        f"a batch has {type(part).__name__} in it, and a stage that runs parts of it has to know its samples",
        next_step="make tensors whose first dimension is samples in Task(collate=...), or leave out rechunk",
    )


def _tensors(message: Message, action: Action) -> list[Tensor]:
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
