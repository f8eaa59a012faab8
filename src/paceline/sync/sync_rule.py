"""Sync rules: a rule runs the training loop between two points at which the state is consistent.

A rule is a class with `rounds` and `abort`; its constructor takes a `SessionContext`, a `ModelLayout` and a
`TrainState`, and stands in the `SyncSpec` of the rule (`paceline.recipe.registry.sync_specs`), where its
refusals stand as well.

`SyncSpec.memory` names a function that returns the `RuleMemory` of a rule on one rank, in closed form and
without starting a run. It does not count what every step needs under any rule: the model, the state of the
optimizer, gradients and activations.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterator, Mapping
from contextlib import closing
from dataclasses import dataclass
from typing import Protocol, cast

from paceline.comm.net import Net
from paceline.comm.tally import StepTally
from paceline.data.work import MicroBatchWork, TrainingFeed
from paceline.errors import CommunicationError
from paceline.observe.step_stats import PhaseTimer, StepStats
from paceline.parallel.model_runner import ModelRunner
from paceline.parallel.placement import ParameterBytes, TensorPlacement
from paceline.recipe.recipe import Recipe
from paceline.state.train_state import TrainState
from paceline.sync.update import UpdateResult, UpdateStep


class SurvivingRule(Protocol):
    """A rule that continues after it has lost some ranks.

    Attributes:
        left: the ranks that were alive at the end of the last round; empty before the first round ends.
    """

    left: tuple[int, ...]


class SyncRule(Protocol):
    """The protocol of a sync rule."""

    def rounds(self, feed: TrainingFeed, runner: ModelRunner, update_step: UpdateStep) -> Iterator[StepStats]:
        """Train from the state's present step to the end of the run, and yield a record of each round;
        collective.

        A round has one step or more. Between two rounds the state is consistent: all ranks that hold the same
        part of the model hold the same values. The caller can save or evaluate it there.

        Args:
            feed: work and loader of this rank.
            runner: this rank's part of the model.
            update_step: applies updates to the state.
        """

    def abort(self) -> None:
        """Drop the step that an error interrupted in `rounds`; the next `rounds` starts with that step."""


def observe_rounds(
    inner: SyncRule,
    observe: Callable[[StepStats], None],
    feed: TrainingFeed,
    runner: ModelRunner,
    update_step: UpdateStep,
) -> Iterator[StepStats]:
    """Yield the rounds of another rule, after passing each record to `observe`."""
    rounds = cast("Generator[StepStats, None, None]", inner.rounds(feed, runner, update_step))
    # Close the inner generator with this one: it holds the stream, which can read ahead.
    with closing(rounds):
        for stats in rounds:
            observe(stats)
            yield stats


def internal_rule_error(what: str) -> CommunicationError:
    """Return the error for a broken invariant of a rule, which no recipe can cause."""
    return CommunicationError(f"internal error: {what}", next_step="please report it")


def step_stats(
    steps: range,
    work: MicroBatchWork,
    state: TrainState,
    tally: StepTally,
    update: UpdateResult,
    phases: PhaseTimer,
    net: Net,
) -> StepStats:
    """Return the record of some steps, made of sums that are equal on all ranks.

    It takes the times of this rank from `phases`, so call it once per round.
    """
    seconds, phase_seconds = phases.take()
    count = tally.count or 1.0  # a round in which every step was skipped has no items
    return StepStats(
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
        phases=phase_seconds,
        sent_bytes=net.ledger.sent_bytes,
    )


@dataclass(frozen=True)
class MemoryQuery:
    """The rank whose memory a sync rule is asked for.

    Args:
        recipe: its strategy has its replicas filled in.
        held: placement of each trained tensor that the rank holds, by name.
        item_bytes: bytes of one value, by name.
        sizes: bytes of all tensors in `held`.
    """

    recipe: Recipe
    held: Mapping[str, TensorPlacement]
    item_bytes: Mapping[str, int]
    sizes: ParameterBytes


@dataclass(frozen=True)
class RuleMemory:
    """Bytes that a sync rule allocates on a rank in addition to plain training.

    Args:
        state: tensors that stay from step to step.
        wire: communication buffers that stay from step to step.
        agreement: temporary tensors while replicas average at the end of a round; 0: there are none.
    """

    state: int = 0
    wire: int = 0
    agreement: int = 0
