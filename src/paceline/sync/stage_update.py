"""An update that a stage makes alone, from gradients that are some updates old."""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from paceline.comm import Gradients, Tally
from paceline.layout.pipeline import Pipeline
from paceline.sync.memory import Asked
from paceline.sync.update import Update, UpdateStep

Weights = Mapping[str, Tensor]
"""What a forward uses in place of a stage's parameters, by their names in the stage."""


@dataclass(frozen=True)
class Versions:
    """What one update was made of, on one stage.

    Args:
        forward, backward: updates in the weights that its forward and its backward used.
        applied: updates that had been made when it was applied; less `forward` is its staleness.
    """

    step: int
    forward: int
    backward: int
    applied: int


class SentLongAgo:
    """Lets go of messages that neighbours have taken, while a pipeline is full.

    What a stage sent before as many updates as there are stages, its neighbours have taken: they could not
    have sent what this update was made of. So nobody waits here, and what is kept does not grow with a run.
    """

    def __init__(self, stage: Pipeline) -> None:
        self._stage = stage
        self._marks = deque[int]()

    def end_update(self) -> None:
        """One more."""
        self._marks.append(self._stage.num_sent)
        if len(self._marks) > self._stage.cut.num_stages:
            self._stage.let_go(self._marks.popleft())


def sent_messages(asked: Asked, num_stages: int) -> int:
    """The most messages that a stage keeps each way: those of as many updates, and of the step after them."""
    return min(asked.stretch, num_stages + 1) * asked.micro_batches


class GradientSum:
    """Gradients of a step, added up over its micro-batches.

    Args:
        weights: those of its forwards.
    """

    def __init__(self, weights: Weights) -> None:
        self._names = [name for name, w in weights.items() if w.requires_grad]
        self._total: dict[str, Tensor] = {}

    def add(self, grads: list[Tensor | None]) -> None:
        """A micro-batch's, of the trained weights in their order; they are taken out of the list."""
        for name in reversed(self._names):
            g = grads.pop()
            if g is not None:
                self._total[name] = self._total[name] + g if name in self._total else g

    def of_stage(self, stage: Pipeline, scale: float) -> Gradients:
        """By what the stage updates.

        Args:
            scale: what losses were multiplied with.
        """
        named = stage.passing.weights[0].parameters.items()
        own = {p: self._total[name] for name, p in named if name in self._total}
        grads = {slot: own.get(p) for slot, p in stage.holding.updates.items()}
        flats = [g for g in grads.values() if g is not None]
        return Gradients(grads, flats, torch._foreach_norm(flats) if flats else [], scale)


def update_stage(
    stage: Pipeline, update_step: UpdateStep, grads: GradientSum, scale: float, count: float
) -> Update:
    """Divide by the items of the step, and update; the gradients are let go of.

    Args:
        count: of these items, over all micro-batches.
    """
    none = torch.zeros(0, dtype=torch.float64)
    counted = Tally(0.0, 0.0, count, {}, 0.0, [0.0] * len(stage.holding.slots), none)
    update = update_step.apply(grads.of_stage(stage, scale), counted)
    for p in stage.holding.updates.values():
        p.grad = None
    return update


def is_untouched(weights: Weights) -> bool:
    """Whether nobody has written to them since they were made."""
    return all(w._version == 0 for w in weights.values())
