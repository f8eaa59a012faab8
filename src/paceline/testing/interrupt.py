"""Interrupt a session in the middle of a backward pass, on every rank at the same place."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from torch import Tensor

from paceline.comm import GradientSink
from paceline.data import LoadedBatch
from paceline.layout import Placed, Sums
from paceline.layout.pipeline import Pipeline
from paceline.slot import Slot
from paceline.training import Session


class Interrupt(Exception):
    """Raised in the middle of a step."""


class InterruptedLayout:
    """A layout that raises `Interrupt` once.

    In a stage the rest of the gradients is withheld instead, and it raises at the end: its neighbours wait
    for what its backward sends.

    Args:
        inner: the layout.
        at_run: in which call of `run`, from 0.
        after: how many gradients are handed on before it.
    """

    def __init__(self, inner: Placed, at_run: int, after: int) -> None:
        self._inner, self._at_run, self._after = inner, at_run, after
        self.runs = 0

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)

    def run(self, micro_batches: Iterable[LoadedBatch], count: int, sink: GradientSink, scale: float) -> Sums:
        """As the inner layout, but for the one call."""
        interrupts = self.runs == self._at_run
        self.runs += 1
        waits = isinstance(self._inner, Pipeline)
        fused = _Fuse(sink, self._after, withholds=waits) if interrupts else sink
        sums = self._inner.run(micro_batches, count, fused, scale)
        if interrupts and waits:
            raise Interrupt
        return sums


class _Fuse:
    def __init__(self, sink: GradientSink, after: int, *, withholds: bool) -> None:
        self._sink, self._left, self._withholds = sink, after, withholds

    def __getattr__(self, name: str) -> Any:
        return getattr(self._sink, name)

    def micro_batch(self, shards: range, is_last: bool) -> None:
        if self._left or not self._withholds:
            self._sink.micro_batch(shards, is_last)

    def ready(self, slot: Slot, grad: Tensor | None) -> None:
        if self._left == 0:
            if self._withholds:
                return
            raise Interrupt
        self._left -= 1
        self._sink.ready(slot, grad)


def train_interrupted(session: Session, at_run: int, after: int) -> list[float]:
    """Train to the end; abort where it is interrupted, and go on. Returns the loss of every round.

    Raises:
        AssertionError: nothing was interrupted, though this rank does run micro-batches.
    """
    session.placed = layout = InterruptedLayout(session.placed, at_run, after)
    losses: list[float] = []
    aborts = 0
    while session.state.step < session.num_steps:
        try:
            for stats in session.rounds():
                losses.append(stats.loss)
        except Interrupt:
            session.abort()
            aborts += 1
    assert aborts == (layout.runs > 0), "the run ended before it was interrupted"
    return losses
