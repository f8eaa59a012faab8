"""Rates that fall when the loss diverges: an answer to trouble, and what it leaves in the state.

Invariant: every rate is what the schedule says times `factor` to the power of `times`, from the update at
which trouble was seen on; `times` is in checkpoints, so a resumed run goes on with the lowered rates.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from paceline.errors import NumericError
from paceline.slot import Keeper, Piece, Slot
from paceline.sync.health import Guard
from paceline.sync.update import Part, Updating


@dataclass
class Lowering(Keeper):
    """How often the rates were lowered.

    Args:
        factor: of every rate, each time; below 1.
        most: times that they may be lowered before the run ends.
        rate: the part of the update step that sets the rates of the schedule.
        judges_from: the step from which on a spike lowers the rates again; before, they get time to act.
    """

    factor: float
    most: int
    rate: Part
    times: int = 0
    judges_from: int = 0

    @property
    def multiplier(self) -> float:
        """Of the schedule's rates, now."""
        return self.factor**self.times

    def set_rate(self, record: Updating) -> None:
        """The part `rate`: that of the schedule, lowered."""
        self.rate(record)
        if self.times:
            for group in record.state.optimizer.param_groups:
                group["lr"] *= self.multiplier
            record.lr *= self.multiplier

    def take_smaller_steps(self, guard: Guard, record: Updating, error: NumericError) -> None:
        """The answer to a spike, whose gradient is finite: take the step, with lower rates from now on.

        As long as the loss stays a spike, compared with the losses before, rates fall once in a window.
        """
        if record.state.step >= self.judges_from:
            self._lower(guard, record, error)
            self.set_rate(record)

    def leave_out(self, guard: Guard, record: Updating, error: NumericError) -> None:
        """The answer to a loss or gradient that is not finite: there is no step to take."""
        self._lower(guard, record, error)
        guard.leave_out(record, error)

    def _lower(self, guard: Guard, record: Updating, error: NumericError) -> None:
        if self.times >= self.most:
            raise NumericError(
                f"{error.what}; the rates were lowered {self.times} times already",
                where=error.where,
                next_step=f"{error.next_step}; health.max_lowerings says how often they may be",
            )
        self.times += 1
        self.judges_from = record.state.step + guard.watch.window
        told = {"step": record.state.step, "multiplier": self.multiplier, "reason": error.what}
        guard.note("lower-rate", told)

    def pieces(self) -> Sequence[Piece]:
        """See `Keeper`."""
        counts = torch.tensor([self.times, self.judges_from])
        return [Piece(Slot.whole("lowered", counts), counts)]

    def load(self, tensors: Mapping[str, Tensor]) -> None:
        """See `Keeper`; a run that is told to lower rates from now on begins at none."""
        self.times, self.judges_from = tensors["lowered"].tolist() if "lowered" in tensors else (0, 0)
