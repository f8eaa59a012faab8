"""An update that a stage makes alone, from gradients that are some updates old."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from paceline.comm import Gradients, Tally
from paceline.layout.pipeline import Pipeline
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


class GradientSum:
    """Gradients of a step, added up over its micro-batches.

    Args:
        weights: those of its forwards.
    """

    def __init__(self, weights: Weights) -> None:
        self._names = [name for name, w in weights.items() if w.requires_grad]
        self._total: dict[str, Tensor] = {}

    def add(self, grads: Sequence[Tensor | None]) -> None:
        """A micro-batch's, of the trained weights in their order."""
        for name, g in zip(self._names, grads, strict=True):
            if g is not None:
                self._total[name] = self._total[name] + g if name in self._total else g

    def of_stage(self, stage: Pipeline, scale: float) -> Gradients:
        """By what the stage updates.

        Args:
            scale: what losses were multiplied with.
        """
        named = stage.passing.chunks[0].named_parameters()
        own = {p: self._total[name] for name, p in named if name in self._total}
        grads = {slot: own.get(p) for slot, p in stage.holding.updates.items()}
        flats = [g for g in grads.values() if g is not None]
        return Gradients(grads, flats, torch._foreach_norm(flats) if flats else [], scale)


def update_stage(
    stage: Pipeline, update_step: UpdateStep, grads: GradientSum, scale: float, count: float
) -> Update:
    """Divide by the items of the step, and update.

    Args:
        count: of these items, over all micro-batches.
    """
    none = torch.zeros(0, dtype=torch.float64)
    counted = Tally(0.0, 0.0, count, {}, 0.0, [0.0] * len(stage.holding.slots), none)
    return update_step.apply(grads.of_stage(stage, scale), counted)


def is_untouched(weights: Weights) -> bool:
    """Whether nobody has written to them since they were made."""
    return all(w._version == 0 for w in weights.values())
