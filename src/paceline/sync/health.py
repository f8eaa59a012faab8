"""Numeric health: a loss or a gradient that is not finite, and a loss that jumps, seen before the update.

A guarded tail looks at the agreed loss, lets the tail inside look at the agreed gradient, and hands trouble
to an answer: stop, leave the step out, or go back to a checkpoint. While all is well it looks at numbers that
are on the host anyway, and sends nothing.
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

from paceline.comm import Gradients, Tally
from paceline.errors import NumericError
from paceline.slot import Piece, Slot
from paceline.state import TrainState
from paceline.sync.tail import Tail, Update
from paceline.sync.witness import Witness

Note = Callable[[str, Mapping[str, Any]], None]
"""Takes an event by name, and what there is to know about it."""


class RollBack(NumericError):
    """Asks whoever runs the loop to go back to a checkpoint, and to go on behind the step that went wrong."""


@dataclass
class Watch:
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
        if self.factor is not None:
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


class Guarded:
    """A tail that looks before it updates.

    Args:
        inner: makes the update; raises NumericError at a gradient that is not finite.
        watch: the last losses.
        witness: names rank and tensor.
        note: is told of every step that is left out.
    """

    def __init__(self, inner: Tail, watch: Watch, witness: Witness, answers: Answers, note: Note) -> None:
        self.inner, self.watch, self.note = inner, watch, note
        self._witness, self._answers = witness, answers
        self._skipped = 0

    @property
    def state(self) -> TrainState:
        """The state that the inner tail updates."""
        return self.inner.state

    def apply(self, grads: Gradients, tally: Tally) -> Update:
        """Update, unless something is wrong; collective only then."""
        heard, step = self._witness.ear.take(), self.state.step
        loss = tally.total / tally.count if tally.count else 0.0
        if not math.isfinite(loss):
            error = self._witness.non_finite(f"the loss is {loss}", step, heard, grads)
            return self._answers.non_finite(self, error)
        if self.watch.is_spike(loss):
            what = f"the loss of step {step} is {loss:.6g}, and {self.watch}"
            return self._answers.spike(self, self._witness.spike(what, step, heard, grads))
        try:
            update = self.inner.apply(grads, tally)
        except NumericError:
            error = self._witness.non_finite("the gradient is not finite", step, heard, grads)
            return self._answers.non_finite(self, error)
        if tally.count:
            self._skipped = 0
            self.watch.accept(loss)
        return update

    def leave_out(self, why: NumericError) -> Update:
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
        self.note("skip", {"step": self.state.step, "reason": why.what})
        return Update(math.nan, float(self.state.optimizer.param_groups[0]["lr"]), applied=False)


Answer = Callable[[Guarded, NumericError], Update]
"""What is done about a trouble."""


def stop(guard: Guarded, error: NumericError) -> Update:
    """End the run."""
    raise error


def skip(guard: Guarded, error: NumericError) -> Update:
    """Leave the step out, and go on."""
    return guard.leave_out(error)


def roll_back(guard: Guarded, error: NumericError) -> Update:
    """Go back to a checkpoint, and leave out the steps from there to this one.

    Done anew they would lead to the same place.
    Source: Chowdhery et al. 2022, PaLM, arXiv:2204.02311, section 5.1.
    """
    raise RollBack(error.what, where=error.where, next_step=error.next_step) from error


ANSWERS: Mapping[str, Answer] = {"stop": stop, "skip": skip, "roll-back": roll_back}
