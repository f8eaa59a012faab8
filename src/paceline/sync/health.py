"""Numeric health: a loss or gradient that is not finite, and a loss that jumps, handled before the update.

A guard is a part of the update step. It checks the agreed loss, receives an agreed gradient that is not
finite, and passes trouble to an action: stop the run, skip the step, roll back to a checkpoint, or lower the
rates. While all is well it reads numbers that are on the host anyway, and sends nothing.

With lowered rates every rate is that of the schedule times `factor` to the power of `times`, from the update
at which trouble was found; `times` is in checkpoints, so a resumed run continues with the lowered rates.

Invariant: ranks that take a step together see the same sums, so they all find the same trouble and take the
same action. Neither parameters nor moments nor buffers hold anything of a step that was skipped.
Not done here: finding the rank and tensor (`bad_value_locator`), and loading a checkpoint (the session).
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from paceline.errors import NumericError, StrategyError, format_count
from paceline.job.mesh import Mesh, RankGroup
from paceline.observe.sinks import EventCallback
from paceline.parallel.model_runner import ModelRunner
from paceline.parallel.session_context import SessionContext
from paceline.recipe.strategy import Strategy
from paceline.recipe.tables import HealthRecipe
from paceline.state.slot import ExtraState, TensorPiece, TensorSlot
from paceline.sync.bad_value_locator import BadValueLocator, LossRecorder, RecordedLoss
from paceline.sync.update import (
    PendingUpdate,
    UpdatePart,
    UpdateResult,
    UpdateStep,
    insert_part_before,
    lower_scale_or,
)


class RollBackRequest(NumericError):
    """A request to go back to a checkpoint and to continue after the step that went wrong."""


@dataclass
class LossSpikeDetector(ExtraState):
    """The last losses. If all ranks take the same steps they are state, so a resumed run judges in the same
    way.

    Args:
        factor: a loss of this many times the median is a spike; None: no loss is one.
        window: the number of losses of the median.
        losses: the last losses.
    """

    factor: float | None
    window: int
    losses: list[float] = field(default_factory=list)

    def median(self) -> float | None:
        """Return the median of the last losses; None: there are too few, or no spike is looked for."""
        known = self.factor is not None and len(self.losses) == self.window
        return statistics.median(self.losses) if known else None

    def __str__(self) -> str:
        return f"the median of the last {self.window} is {self.median() or 0.0:.6g}"

    def is_spike(self, loss: float) -> bool:
        """Return whether a loss is far above the last ones."""
        median = self.median()
        if self.factor is None or median is None:
            return False
        # Not loss > factor * median: with a negative median every usual loss would be a spike.
        return loss - median > (self.factor - 1) * abs(median)

    def accept(self, loss: float) -> None:
        """Record the loss of a step that was applied."""
        # A spike that was trained on does not count as usual.
        if self.factor is not None and not self.is_spike(loss):
            self.losses = [*self.losses, loss][-self.window :]

    def pieces(self) -> Sequence[TensorPiece]:
        losses = torch.tensor(self.losses, dtype=torch.float64)
        return [TensorPiece(TensorSlot.whole("losses", losses), losses)]

    def load(self, tensors: Mapping[str, Tensor]) -> None:
        self.losses = tensors["losses"].tolist() if "losses" in tensors else []


@dataclass(frozen=True)
class HealthActions:
    """The actions against trouble.

    Args:
        non_finite, spike: the action against each.
        max_skips: steps that can be skipped in a row.
    """

    non_finite: HealthAction
    spike: HealthAction
    max_skips: int


class NumericGuard:
    """The check before an update.

    Args:
        detector: the last losses.
        locator: finds the rank and tensor of a bad value.
        actions: the actions against trouble.
        note: receives an event for every step that is skipped.
    """

    def __init__(
        self,
        detector: LossSpikeDetector,
        locator: BadValueLocator,
        actions: HealthActions,
        note: EventCallback,
    ) -> None:
        self.detector, self.note = detector, note
        self._locator, self._actions = locator, actions
        self._losses: list[RecordedLoss] = []
        self._skipped = 0

    def loss(self, record: PendingUpdate) -> None:
        """Check the agreed loss: the part `watch`. It is collective only if something is wrong."""
        self._losses, step = self._locator.loss_recorder.take(), record.state.step
        loss = _mean_loss(record)
        if not math.isfinite(loss):
            error = self._locator.non_finite(f"the loss is {loss}", step, self._losses, record.grads)
            self._actions.non_finite(self, record, error)
        elif self.detector.is_spike(loss):
            what = f"the loss of step {step} is {loss:.6g}, and {self.detector}"
            error = self._locator.spike(what, step, self._losses, record.grads)
            self._actions.spike(self, record, error)

    def gradient(self, record: PendingUpdate, error: NumericError) -> None:
        """Handle a gradient that is not finite; collective."""
        what = "the gradient is not finite"
        error = self._locator.non_finite(what, record.state.step, self._losses, record.grads)
        self._actions.non_finite(self, record, error)

    def accept(self, record: PendingUpdate) -> None:
        """Record the loss of a step that was not skipped: an observer of the update step."""
        # Not `applied`: an fp16 overflow skips the update as well, but the loss of that step is sound.
        if record.tally.count and not record.refused:
            self._skipped = 0
            self.detector.accept(_mean_loss(record))

    def skip_step(self, record: PendingUpdate, why: NumericError) -> None:
        """Skip the step as if it had not been taken, buffers included.

        Raises:
            NumericError: too many steps in a row were skipped.
        """
        if self._skipped >= self._actions.max_skips:
            raise NumericError(
                f"{why.what}; {format_count(self._skipped, 'step')} before it had been skipped already",
                where=why.where,
                next_step=f"{why.next_step}; health.max_skips limits how many steps are skipped",
            )
        self._skipped += 1
        # The buffers have moved already: the rule ends their step before it updates.
        self._locator.runner.buffers.abort_step()
        self.note("skip", {"step": record.state.step, "reason": why.what})
        record.refused = True
        record.update = UpdateResult(math.nan, record.lr, applied=False)


def add_guard(parts: Mapping[str, UpdatePart], guard: NumericGuard) -> dict[str, UpdatePart]:
    """Return the parts of an update step with a guard inserted."""
    watched = insert_part_before(parts, "norm", "watch", guard.loss)
    return {**watched, "finite": lower_scale_or(guard.gradient)}


def _mean_loss(record: PendingUpdate) -> float:
    tally = record.tally
    return tally.total / tally.count if tally.count else 0.0


HealthAction = Callable[[NumericGuard, PendingUpdate, NumericError], None]
"""Handles trouble that a guard has found."""


def stop_run(guard: NumericGuard, record: PendingUpdate, error: NumericError) -> None:
    """End the run."""
    raise error


def skip(guard: NumericGuard, record: PendingUpdate, error: NumericError) -> None:
    """Skip the step and continue."""
    guard.skip_step(record, error)


def roll_back(guard: NumericGuard, record: PendingUpdate, error: NumericError) -> None:
    """Go back to a checkpoint, and skip the steps from there to this one: repeated, they would fail in the
    same way.

    Source: Chowdhery et al. 2022, PaLM, arXiv:2204.02311, section 5.1.
    """
    raise RollBackRequest(error.what, where=error.where, next_step=error.next_step) from error


HEALTH_ACTIONS: Mapping[str, HealthAction] = {"stop": stop_run, "skip": skip, "roll-back": roll_back}


@dataclass
class RateLowering(ExtraState):
    """The number of times that the rates were lowered.

    Args:
        factor: of every rate, each time; below 1.
        most: how often they can be lowered before the run ends.
        rate: the part of the update step that sets the rates of the schedule.
        times: how often they were lowered.
        judge_from_step: the step from which a spike lowers the rates again, so that they have time to work.
    """

    factor: float
    most: int
    rate: UpdatePart
    times: int = 0
    judge_from_step: int = 0

    @property
    def multiplier(self) -> float:
        """Return the present factor of the schedule's rates."""
        return self.factor**self.times

    def set_rate(self, record: PendingUpdate) -> None:
        """Set the lowered rate of the schedule: the part `rate`."""
        self.rate(record)
        if self.times:
            for group in record.state.optimizer.param_groups:
                group["lr"] *= self.multiplier
            record.lr *= self.multiplier

    def lower_rate_and_step(self, guard: NumericGuard, record: PendingUpdate, error: NumericError) -> None:
        """Take the step with lower rates: the action against a spike, whose gradient is finite.

        While the loss stays a spike, compared with the losses before, rates are lowered once per window.
        """
        # Within a window after lowering the loss is still high, which shows nothing about the new rates.
        if record.state.step >= self.judge_from_step:
            self._lower(guard, record, error)
            # The part `rate` has run before this check, so this step still has the higher rate.
            self.set_rate(record)

    def skip_step(self, guard: NumericGuard, record: PendingUpdate, error: NumericError) -> None:
        """Skip the step and lower the rates: the action against a loss or gradient that is not finite."""
        self._lower(guard, record, error)
        guard.skip_step(record, error)

    def _lower(self, guard: NumericGuard, record: PendingUpdate, error: NumericError) -> None:
        if self.times >= self.most:
            raise NumericError(
                f"{error.what}; the rates were lowered {format_count(self.times, 'time')} already",
                where=error.where,
                next_step=f"{error.next_step}; health.max_lowerings limits how often rates are lowered",
            )
        self.times += 1
        self.judge_from_step = record.state.step + guard.detector.window
        fields = {"step": record.state.step, "multiplier": self.multiplier, "reason": error.what}
        guard.note("lower-rate", fields)

    def pieces(self) -> Sequence[TensorPiece]:
        counts = torch.tensor([self.times, self.judge_from_step])
        return [TensorPiece(TensorSlot.whole("lowered", counts), counts)]

    def load(self, tensors: Mapping[str, Tensor]) -> None:
        """Load the counts; a state without them has not lowered its rates."""
        self.times, self.judge_from_step = tensors["lowered"].tolist() if "lowered" in tensors else (0, 0)


def install_guard(
    step: UpdateStep, context: SessionContext, runner: ModelRunner, loss_recorder: LossRecorder
) -> None:
    """Add a guard to an update step, unless no ranks see the same sums of a step.

    Args:
        step: changed in place.
        context: its `note` receives an event for every step that is skipped.
        runner: this rank's part of the model.
        loss_recorder: records the losses of this rank.
    """
    health, strategy = context.recipe.health, context.recipe.strategy
    group = _group_with_equal_sums(context.mesh, strategy)
    if group is None:
        return
    detector = LossSpikeDetector(health.spike_factor, health.spike_window)
    # Losses of single replicas differ by rank, so they are no state of the run.
    if health.spike_factor is not None and group.size == context.mesh.world.size:
        step.state.extra_states["health"] = detector
    lowering = RateLowering(health.rate_factor, health.max_lowerings, step.parts["rate"])
    if health.lowers_rates:
        step.state.extra_states["rates"] = lowering
        step.parts["rate"] = lowering.set_rate
    non_finite = {**HEALTH_ACTIONS, "lower-rate": lowering.skip_step}[health.non_finite]
    spike = {**HEALTH_ACTIONS, "lower-rate": lowering.lower_rate_and_step}[health.spike]
    actions = HealthActions(non_finite, spike, health.max_skips)
    guard = NumericGuard(
        detector, BadValueLocator(runner, loss_recorder, group, context.net), actions, context.note
    )
    step.parts = add_guard(step.parts, guard)
    step.observers.append(guard.accept)


def _group_with_equal_sums(mesh: Mesh, strategy: Strategy) -> RankGroup | None:
    """Return the ranks that see the same sums in a step: all, those of a replica, or None."""
    groups = {"world": mesh.world, "replica": mesh.inside}
    return groups.get(strategy.sync_spec.agrees)


def check_health_supported(health: HealthRecipe, strategy: Strategy) -> None:
    """Raise if the strategy does not support the actions of the health section.

    Rolling back and lowering rates need all ranks to decide together.

    Raises:
        StrategyError: an action needs sync=every-step.
    """
    unsupported = [word for word in health.answers if word in ("roll-back", "lower-rate")]
    if unsupported and strategy.sync_spec.agrees != "world":
        raise StrategyError(
            f'health: "{unsupported[0]}" needs sync=every-step, but the strategy is {strategy}',
            next_step='choose "stop" or "skip"',
        )
