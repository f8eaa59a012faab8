"""Remembers what went into an update step and what came out, so that it can be held against the oracle."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from torch import Tensor

from paceline.layout.whole import Snapshot
from paceline.slot import Slot
from paceline.sync import Update, UpdateStep, Updating

Parts = Mapping[Slot, Tensor]


@dataclass(frozen=True)
class Record:
    """One update on one rank.

    Args:
        total, count: agreed sums of the loss.
        sums: gradients as they reached the update step, their scale taken out: this rank's parts.
        final: gradients as the optimizer saw them.
        update: what the update step said it did.
        after: copies of the whole state behind it, if others of the same step may follow.
    """

    total: float = 0.0
    count: float = 0.0
    sums: Parts = field(default_factory=dict)
    final: Parts = field(default_factory=dict)
    update: Update | None = None
    after: Snapshot | None = None


@dataclass(frozen=True)
class WholeRecord:
    """One update, put together from the records of the ranks of a replica; tensors are whole, by name."""

    total: float = 0.0
    count: float = 0.0
    sums: Mapping[str, Tensor] = field(default_factory=dict)
    final: Mapping[str, Tensor] = field(default_factory=dict)
    update: Update | None = None


class Recorder:
    """Listens to an update step.

    Args:
        snapshot: takes the whole state, for steps of several updates; collective.
    """

    def __init__(self, step: UpdateStep, snapshot: Callable[[], Snapshot] | None = None) -> None:
        self._snapshot, self._records = snapshot, list[Record]()
        self._sums: Parts = {}
        step.parts = {"record": self._enter, **step.parts}
        step.observers.append(self._leave)

    def take(self) -> list[Record]:
        """The updates since the last call, in their order."""
        found, self._records = self._records, []
        return found

    def _enter(self, record: Updating) -> None:
        grads = record.grads
        self._sums = {slot: g / grads.scale for slot, g in grads.tensors.items() if g is not None}

    def _leave(self, record: Updating) -> None:
        final = {slot: p.grad.clone() for slot, p in record.updates.items() if p.grad is not None}
        after = self._snapshot().copied() if self._snapshot is not None else None
        of = record.tally
        self._records.append(Record(of.total, of.count, self._sums, final, record.update, after))
