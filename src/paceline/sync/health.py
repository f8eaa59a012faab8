"""Numeric health: a loss or a gradient that is not finite, and a loss that jumps, seen before the update.

A guard is a part of the update step: it looks at the agreed loss, hears of an agreed gradient that is not
finite, and hands trouble to an answer: stop, leave the step out, or go back to a checkpoint. While all is
well it looks at numbers that are on the host anyway, and sends nothing.
Invariant: ranks that take a step together see the same sums, so they all find the same trouble and give the
same answer. Neither parameters nor moments nor buffers ever hold anything of a step that was answered.

Rates that fall when the loss diverges: an answer to trouble, and what it leaves in the state.

Invariant: every rate is what the schedule says times `factor` to the power of `times`, from the update at
which trouble was seen on; `times` is in checkpoints, so a resumed run goes on with the lowered rates.

Put a guard into a session's update step, as the recipe's health section says.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from paceline.errors import NumericError, StrategyError
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
    """Asks whoever runs the loop to go back to a checkpoint, and to go on behind the step that went wrong."""


@dataclass
class LossSpikeDetector(ExtraState):
    """The last losses. Where all ranks take the same steps it is state: a resumed run judges as the first.

    Args:
        factor: a loss this many times the median is a spike; None: none is.
        window: how many losses the median is of.
    """

    factor: float | None
    window: int
    losses: list[float] = field(default_factory=list)

    def median(self) -> float | None:
        """Of the last losses; None as long as there are too few, or nobody asks."""
        known = self.factor is not None and len(self.losses) == self.window
        return statistics.median(self.losses) if known else None

    def __str__(self) -> str:
        return f"the median of the last {self.window} is {self.median() or 0.0:.6g}"

    def is_spike(self, loss: float) -> bool:
        """Whether a loss stands out from the last ones."""
        median = self.median()
        if self.factor is None or median is None:
            return False
        return loss - median > (self.factor - 1) * abs(median)

    def accept(self, loss: float) -> None:
        """A step was applied."""
        if self.factor is not None and not self.is_spike(loss):
            self.losses = [*self.losses, loss][-self.window :]

    def pieces(self) -> Sequence[TensorPiece]:
        """See `ExtraState`."""
        losses = torch.tensor(self.losses, dtype=torch.float64)
        return [TensorPiece(TensorSlot.whole("losses", losses), losses)]

    def load(self, tensors: Mapping[str, Tensor]) -> None:
        """See `ExtraState`."""
        self.losses = tensors["losses"].tolist() if "losses" in tensors else []


@dataclass(frozen=True)
class HealthActions:
    """What is done about trouble.

    Args:
        non_finite, spike: then.
        max_skips: steps that may be left out one after another.
    """

    non_finite: HealthAction
    spike: HealthAction
    max_skips: int


class NumericGuard:
    """Looks before an update is made.

    Args:
        watch: the last losses.
        witness: names rank and tensor.
        note: is told of every step that is left out.
    """

    def __init__(
        self, watch: LossSpikeDetector, witness: BadValueLocator, answers: HealthActions, note: EventCallback
    ) -> None:
        self.watch, self.note = watch, note
        self._witness, self._answers = witness, answers
        self._heard: list[RecordedLoss] = []
        self._skipped = 0

    def loss(self, record: PendingUpdate) -> None:
        """The part `watch`: the agreed loss; collective only if something is wrong."""
        self._heard, step = self._witness.loss_recorder.take(), record.state.step
        loss = _mean_loss(record)
        if not math.isfinite(loss):
            error = self._witness.non_finite(f"the loss is {loss}", step, self._heard, record.grads)
            self._answers.non_finite(self, record, error)
        elif self.watch.is_spike(loss):
            what = f"the loss of step {step} is {loss:.6g}, and {self.watch}"
            error = self._witness.spike(what, step, self._heard, record.grads)
            self._answers.spike(self, record, error)

    def gradient(self, record: PendingUpdate, error: NumericError) -> None:
        """The answer to a gradient that is not finite; collective."""
        what = "the gradient is not finite"
        error = self._witness.non_finite(what, record.state.step, self._heard, record.grads)
        self._answers.non_finite(self, record, error)

    def accept(self, record: PendingUpdate) -> None:
        """An observer: the step was not left out; a spike that was taken is nothing to compare with."""
        if record.tally.count and not record.refused:
            self._skipped = 0
            self.watch.accept(_mean_loss(record))

    def leave_out(self, record: PendingUpdate, why: NumericError) -> None:
        """As if the step had not been taken: not even buffers move.

        Raises:
            NumericError: too many steps one after another.
        """
        if self._skipped >= self._answers.max_skips:
            raise NumericError(
                f"{why.what}; the {self._skipped} steps before it were left out already",
                where=why.where,
                next_step=f"{why.next_step}; health.max_skips says how many may be",
            )
        self._skipped += 1
        self._witness.runner.buffers.abort_step()
        self.note("skip", {"step": record.state.step, "reason": why.what})
        record.refused = True
        record.update = UpdateResult(math.nan, record.lr, applied=False)


def add_guard(parts: Mapping[str, UpdatePart], guard: NumericGuard) -> dict[str, UpdatePart]:
    """The parts of an update step with a guard among them."""
    watched = insert_part_before(parts, "norm", "watch", guard.loss)
    return {**watched, "finite": lower_scale_or(guard.gradient)}


def _mean_loss(record: PendingUpdate) -> float:
    tally = record.tally
    return tally.total / tally.count if tally.count else 0.0


HealthAction = Callable[[NumericGuard, PendingUpdate, NumericError], None]
"""What is done about a trouble."""


def stop_run(guard: NumericGuard, record: PendingUpdate, error: NumericError) -> None:
    """End the run."""
    raise error


def skip_step(guard: NumericGuard, record: PendingUpdate, error: NumericError) -> None:
    """Leave the step out, and go on."""
    guard.leave_out(record, error)


def roll_back(guard: NumericGuard, record: PendingUpdate, error: NumericError) -> None:
    """Go back to a checkpoint, and leave out the steps from there to this one.

    Done anew they would lead to the same place.
    Source: Chowdhery et al. 2022, PaLM, arXiv:2204.02311, section 5.1.
    """
    raise RollBackRequest(error.what, where=error.where, next_step=error.next_step) from error


HEALTH_ACTIONS: Mapping[str, HealthAction] = {"stop": stop_run, "skip": skip_step, "roll-back": roll_back}


@dataclass
class RateLowering(ExtraState):
    """How often the rates were lowered.

    Args:
        factor: of every rate, each time; below 1.
        most: times that they may be lowered before the run ends.
        rate: the part of the update step that sets the rates of the schedule.
        judge_from_step: the step from which on a spike lowers the rates again; before, they get time to act.
    """

    factor: float
    most: int
    rate: UpdatePart
    times: int = 0
    judge_from_step: int = 0

    @property
    def multiplier(self) -> float:
        """Of the schedule's rates, now."""
        return self.factor**self.times

    def set_rate(self, record: PendingUpdate) -> None:
        """The part `rate`: that of the schedule, lowered."""
        self.rate(record)
        if self.times:
            for group in record.state.optimizer.param_groups:
                group["lr"] *= self.multiplier
            record.lr *= self.multiplier

    def lower_rate_and_step(self, guard: NumericGuard, record: PendingUpdate, error: NumericError) -> None:
        """The answer to a spike, whose gradient is finite: take the step, with lower rates from now on.

        As long as the loss stays a spike, compared with the losses before, rates fall once in a window.
        """
        if record.state.step >= self.judge_from_step:
            self._lower(guard, record, error)
            self.set_rate(record)

    def leave_out(self, guard: NumericGuard, record: PendingUpdate, error: NumericError) -> None:
        """The answer to a loss or gradient that is not finite: there is no step to take."""
        self._lower(guard, record, error)
        guard.leave_out(record, error)

    def _lower(self, guard: NumericGuard, record: PendingUpdate, error: NumericError) -> None:
        if self.times >= self.most:
            raise NumericError(
                f"{error.what}; the rates were lowered {self.times} times already",
                where=error.where,
                next_step=f"{error.next_step}; health.max_lowerings says how often they may be",
            )
        self.times += 1
        self.judge_from_step = record.state.step + guard.watch.window
        told = {"step": record.state.step, "multiplier": self.multiplier, "reason": error.what}
        guard.note("lower-rate", told)

    def pieces(self) -> Sequence[TensorPiece]:
        """See `ExtraState`."""
        counts = torch.tensor([self.times, self.judge_from_step])
        return [TensorPiece(TensorSlot.whole("lowered", counts), counts)]

    def load(self, tensors: Mapping[str, Tensor]) -> None:
        """See `ExtraState`; a run that is told to lower rates from now on begins at none."""
        self.times, self.judge_from_step = tensors["lowered"].tolist() if "lowered" in tensors else (0, 0)


def install_guard(
    step: UpdateStep, context: SessionContext, runner: ModelRunner, loss_recorder: LossRecorder
) -> None:
    """Let an update step look before it updates, unless no rank sees the sums of a step.

    Args:
        step: changed in place.
        context: its `note` is told of every step that is left out.
    """
    health, strategy = context.recipe.health, context.recipe.strategy
    group = _group_with_equal_sums(context.mesh, strategy)
    if group is None:
        return
    watch = LossSpikeDetector(health.spike_factor, health.spike_window)
    if health.spike_factor is not None and group.size == context.mesh.world.size:
        step.state.extra_states["health"] = watch
    lowering = RateLowering(health.rate_factor, health.max_lowerings, step.parts["rate"])
    if health.lowers_rates:
        step.state.extra_states["rates"] = lowering
        step.parts["rate"] = lowering.set_rate
    non_finite = {**HEALTH_ACTIONS, "lower-rate": lowering.leave_out}[health.non_finite]
    spike = {**HEALTH_ACTIONS, "lower-rate": lowering.lower_rate_and_step}[health.spike]
    answers = HealthActions(non_finite, spike, health.max_skips)
    guard = NumericGuard(
        watch, BadValueLocator(runner, loss_recorder, group, context.net), answers, context.note
    )
    step.parts = add_guard(step.parts, guard)
    step.observers.append(guard.accept)


def _group_with_equal_sums(mesh: Mesh, strategy: Strategy) -> RankGroup | None:
    """The ranks that see the same sums in a step: all, those of a replica, or nobody."""
    groups = {"world": mesh.world, "replica": mesh.inside}
    return groups.get(strategy.sync_spec.agrees)


def check_health_supported(health: HealthRecipe, strategy: Strategy) -> None:
    """Under some rules a part of the ranks would go on with a step that others leave out.

    Raises:
        StrategyError: the strategy cannot do what the health section asks for.
    """
    together = [word for word in health.answers if word in ("roll-back", "lower-rate")]
    if together and strategy.sync_spec.agrees != "world":
        raise StrategyError(
            f'health: "{together[0]}" needs sync=every-step, and the strategy is {strategy}',
            next_step='choose "stop" or "skip"',
        )
