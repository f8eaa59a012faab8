"""Remembers what went into an update step and what came out, so that it can be held against the oracle."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from torch import Tensor

from paceline.slot import Slot
from paceline.sync import Update, UpdateStep, Updating

Parts = Mapping[Slot, Tensor]


@dataclass(frozen=True)
class Record:
    """One step on one rank.

    Args:
        total, count: agreed sums of the loss.
        sums: gradients as they reached the update step, their scale taken out: this rank's parts.
        final: gradients as the optimizer saw them.
        update: what the update step said it did.
    """

    total: float = 0.0
    count: float = 0.0
    sums: Parts = field(default_factory=dict)
    final: Parts = field(default_factory=dict)
    update: Update | None = None


@dataclass(frozen=True)
class WholeRecord:
    """One step, put together from the records of the ranks of a replica; tensors are whole, by name."""

    total: float = 0.0
    count: float = 0.0
    sums: Mapping[str, Tensor] = field(default_factory=dict)
    final: Mapping[str, Tensor] = field(default_factory=dict)
    update: Update | None = None


class Recorder:
    """Listens to an update step; `last` is the record of the latest one."""

    def __init__(self, step: UpdateStep) -> None:
        self.last = Record()
        self._sums: Parts = {}
        step.parts = {"record": self._enter, **step.parts}
        step.observers.append(self._leave)

    def _enter(self, record: Updating) -> None:
        grads = record.grads
        self._sums = {slot: g / grads.scale for slot, g in grads.tensors.items() if g is not None}

    def _leave(self, record: Updating) -> None:
        final = {slot: p.grad.clone() for slot, p in record.updates.items() if p.grad is not None}
        self.last = Record(record.tally.total, record.tally.count, self._sums, final, record.update)
