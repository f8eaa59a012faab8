"""Numeric health: a loss or a gradient that is not finite, and a loss that jumps, seen before the update.

A guard is a part of the update step: it looks at the agreed loss, hears of an agreed gradient that is not
finite, and hands trouble to an answer: stop, leave the step out, or go back to a checkpoint. While all is
well it looks at numbers that are on the host anyway, and sends nothing.
Invariant: ranks that take a step together see the same sums, so they all find the same trouble and give the
same answer. Neither parameters nor moments nor buffers ever hold anything of a step that was answered.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from paceline.errors import NumericError
from paceline.slot import Keeper, Piece, Slot
from paceline.sync.update import Part, Update, Updating, lower_scale_or, placed_before
from paceline.sync.witness import Heard, Witness

Note = Callable[[str, Mapping[str, Any]], None]
"""Takes an event by name, and what there is to know about it."""


class RollBack(NumericError):
    """Asks whoever runs the loop to go back to a checkpoint, and to go on behind the step that went wrong."""


@dataclass
class Watch(Keeper):
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

    def pieces(self) -> Sequence[Piece]:
        """See `Keeper`."""
        losses = torch.tensor(self.losses, dtype=torch.float64)
        return [Piece(Slot.whole("losses", losses), losses)]

    def load(self, tensors: Mapping[str, Tensor]) -> None:
        """See `Keeper`."""
        self.losses = tensors["losses"].tolist() if "losses" in tensors else []


@dataclass(frozen=True)
class Answers:
    """What is done about trouble.

    Args:
        non_finite, spike: then.
        max_skips: steps that may be left out one after another.
    """

    non_finite: Answer
    spike: Answer
    max_skips: int


class Guard:
    """Looks before an update is made.

    Args:
        watch: the last losses.
        witness: names rank and tensor.
        note: is told of every step that is left out.
    """

    def __init__(self, watch: Watch, witness: Witness, answers: Answers, note: Note) -> None:
        self.watch, self.note = watch, note
        self._witness, self._answers = witness, answers
        self._heard: list[Heard] = []
        self._skipped = 0

    def loss(self, record: Updating) -> None:
        """The part `watch`: the agreed loss; collective only if something is wrong."""
        self._heard, step = self._witness.ear.take(), record.state.step
        loss = _mean_loss(record)
        if not math.isfinite(loss):
            error = self._witness.non_finite(f"the loss is {loss}", step, self._heard, record.grads)
            self._answers.non_finite(self, record, error)
        elif self.watch.is_spike(loss):
            what = f"the loss of step {step} is {loss:.6g}, and {self.watch}"
            error = self._witness.spike(what, step, self._heard, record.grads)
            self._answers.spike(self, record, error)

    def gradient(self, record: Updating, error: NumericError) -> None:
        """The answer to a gradient that is not finite; collective."""
        what = "the gradient is not finite"
        error = self._witness.non_finite(what, record.state.step, self._heard, record.grads)
        self._answers.non_finite(self, record, error)

    def accept(self, record: Updating) -> None:
        """An observer: the step was not left out; a spike that was taken is nothing to compare with."""
        if record.tally.count and not record.refused:
            self._skipped = 0
            self.watch.accept(_mean_loss(record))

    def leave_out(self, record: Updating, why: NumericError) -> None:
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
        self._witness.placed.buffers.abort_step()
        self.note("skip", {"step": record.state.step, "reason": why.what})
        record.refused = True
        record.update = Update(math.nan, record.lr, applied=False)


def guarded(parts: Mapping[str, Part], guard: Guard) -> dict[str, Part]:
    """The parts of an update step with a guard among them."""
    watched = placed_before(parts, "norm", "watch", guard.loss)
    return {**watched, "finite": lower_scale_or(guard.gradient)}


def _mean_loss(record: Updating) -> float:
    tally = record.tally
    return tally.total / tally.count if tally.count else 0.0


Answer = Callable[[Guard, Updating, NumericError], None]
"""What is done about a trouble."""


def stop(guard: Guard, record: Updating, error: NumericError) -> None:
    """End the run."""
    raise error


def skip(guard: Guard, record: Updating, error: NumericError) -> None:
    """Leave the step out, and go on."""
    guard.leave_out(record, error)


def roll_back(guard: Guard, record: Updating, error: NumericError) -> None:
    """Go back to a checkpoint, and leave out the steps from there to this one.

    Done anew they would lead to the same place.
    Source: Chowdhery et al. 2022, PaLM, arXiv:2204.02311, section 5.1.
    """
    raise RollBack(error.what, where=error.where, next_step=error.next_step) from error


ANSWERS: Mapping[str, Answer] = {"stop": stop, "skip": skip, "roll-back": roll_back}
