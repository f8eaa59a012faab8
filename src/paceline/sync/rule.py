"""What a rule is: it owns the loop between two points at which the state is consistent."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Protocol

from paceline.comm import Net, Tally
from paceline.data import Feed, Work
from paceline.layout import Placed
from paceline.observe import Phases, Stats
from paceline.state import TrainState
from paceline.sync.update import Update, UpdateStep


class Outliving(Protocol):
    """A rule that goes on without some ranks.

    Attributes:
        left: the ranks that are not lost, as of the last round; empty: that is not known yet.
    """

    left: tuple[int, ...]


class Rule(Protocol):
    """When replicas agree."""

    def rounds(self, feed: Feed, placed: Placed, update_step: UpdateStep) -> Iterator[Stats]:
        """Rounds from the state's own position to the end of the run; collective.

        A round is one step or more. Between two rounds the state is consistent: every rank holds the same
        values as every other rank that holds the part. It may be saved or evaluated.

        Args:
            feed: micro-batches and their loader.
            placed: this rank's part of the model.
            update_step: applies updates to the state.
        """

    def abort(self) -> None:
        """Drop the step in which an error left `rounds`; the next `rounds` begins with that step."""


def step_stats(
    steps: range, work: Work, state: TrainState, tally: Tally, update: Update, phases: Phases, net: Net
) -> Stats:
    """The record of some steps, from sums that all ranks agree on."""
    seconds, spent = phases.take()
    count = tally.count or 1.0
    return Stats(
        step=steps[-1],
        epoch=steps[-1] // work.steps_per_epoch if work.steps_per_epoch else 0,
        loss=tally.total / count,
        metrics={name: value / count for name, value in tally.metrics.items()},
        num_samples=sum(work.num_samples(step) for step in steps),
        num_items=tally.count,
        grad_norm=update.grad_norm,
        lr=update.lr,
        applied=update.applied,
        loss_scale=state.scale.value,
        stops=int(tally.stops),
        seconds=seconds,
        phases=spent,
        sent_bytes=net.ledger.sent_bytes,
    )
