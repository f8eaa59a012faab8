"""The update step: from summed gradients to an update, as a flat list of named parts.

    settle, rate, empty, divide, watch, norm, finite, clip, step, gather

Each part reads and writes one record; a part that sets its `update` ends the step. Invariant: parts see sums
that are equal on all ranks that step together, so all of them take the same decision and make the same
update. The one place where gradients are divided.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Protocol

import torch
from torch import nn

from paceline.comm import Gradients, Tally
from paceline.comm.reduction import joint_norm
from paceline.errors import NumericError, TaskError
from paceline.slot import Slot
from paceline.state import TrainState
from paceline.sync.scaled_step import scaled_step


@dataclass(frozen=True)
class Update:
    """What one update step did.

    Args:
        grad_norm: of the divided gradient, before the clip; not finite if the update was skipped.
        lr: of the first parameter group.
        applied: False if an fp16 overflow, a step without any item, or a guard skipped the update.
    """

    grad_norm: float
    lr: float
    applied: bool


@dataclass
class Updating:
    """An update under way.

    Args:
        state: holds the optimizer, the loss scale and the update counter; changed in place.
        updates: what this rank updates.
        grads: summed over every micro-batch of the step, times `grads.scale`; changed in place.
        tally: agreed sums.
        lr: of the first parameter group; set by `rate`.
        divisor: of the sums; set by `divide`.
        norm: of the divided gradient; set by `norm`.
        multiplier: of the sums, all at once; set by `divide`, changed by `clip`.
        update: the result; whoever sets it ends the step.
        refused: a guard left the step out.
    """

    state: TrainState
    updates: Mapping[Slot, nn.Parameter]
    grads: Gradients
    tally: Tally
    lr: float = 0.0
    divisor: float = 1.0
    norm: float = 0.0
    multiplier: float = 1.0
    update: Update | None = None
    refused: bool = False


Part = Callable[[Updating], None]
"""One thing that an update step does."""


@dataclass
class UpdateStep:
    """What a rule calls once a step, with gradients and a tally that are equal on all ranks.

    Args:
        state: what is updated.
        updates: what this rank's optimizer updates, by slot.
        parts: in their order, by name; a test or a fault exchanges one.
        observers: see the record when the step is over, whoever ended it.
    """

    state: TrainState
    updates: Mapping[Slot, nn.Parameter]
    parts: dict[str, Part]
    observers: list[Part] = field(default_factory=list)

    def apply(self, grads: Gradients, tally: Tally) -> Update:
        """Make one update from sums over all ranks.

        Raises:
            NumericError: a gradient is not finite and no loss scale can be lowered.
        """
        record = Updating(self.state, self.updates, grads, tally)
        for part in self.parts.values():
            part(record)
            if record.update is not None:
                break
        assert record.update is not None, "no part ended the step"
        for observer in self.observers:
            observer(record)
        return record.update


class Rate(Protocol):
    """Sets the optimizer's rates before an update; `paceline.optim.Schedule` is one."""

    def apply(self, optimizer: torch.optim.Optimizer, update: int) -> float:
        """Set the rate of every group for update number `update`, from 0."""


class Norm(Protocol):
    """The norm of the whole sum, from what this rank has of it."""

    def __call__(self, grads: Gradients) -> float: ...


def update_parts(
    rate: Rate,
    *,
    reduction: str = "mean",
    clip_norm: float | None = None,
    norm: Norm = lambda grads: joint_norm(grads.norms),
    gather: Callable[[], None] = lambda: None,
) -> dict[str, Part]:
    """The parts of an update step that nobody guards.

    Args:
        rate: factor of each group's base rate, by update.
        reduction: "mean" divides by the global count, "sum" does not.
        clip_norm: largest global norm of the divided gradient; None: no clip.
        norm: of the whole gradient; collective over the ranks of a replica.
        gather: brings what this rank computes with up to date; collective, after an update.
    """
    return {
        "rate": set_rate(rate),
        "empty": leave_empty_step,
        "divide": divide_by(reduction),
        "norm": take_norm(norm),
        "finite": lower_scale_or(raise_error),
        "clip": clip_to(clip_norm),
        "step": step_optimizer,
        "gather": gather_and_end(gather),
    }


def set_rate(rate: Rate) -> Part:
    """Set every group's rate for the next update."""

    def part(record: Updating) -> None:
        rate.apply(record.state.optimizer, record.state.updates)
        record.lr = float(record.state.optimizer.param_groups[0]["lr"])

    return part


def leave_empty_step(record: Updating) -> None:
    """A step without any item updates nothing."""
    if not record.tally.count:
        record.update = Update(0.0, record.lr, applied=False)


def divide_by(reduction: str) -> Part:
    """The sums are those of `count` items, times the scale of the loss."""

    def part(record: Updating) -> None:
        record.divisor = record.grads.scale * (record.tally.count if reduction == "mean" else 1.0)
        record.multiplier = 1.0 / record.divisor

    return part


def take_norm(norm: Norm) -> Part:
    """The norm of the divided gradient."""

    def part(record: Updating) -> None:
        record.norm = norm(record.grads) / record.divisor

    return part


Answer = Callable[[Updating, NumericError], None]
"""What is done about a gradient that is not finite, where no loss scale can be lowered."""


def raise_error(record: Updating, error: NumericError) -> None:
    """End the run."""
    raise error


def lower_scale_or(answer: Answer) -> Part:
    """An overflow lowers the loss scale and leaves the update out; what cannot be cured so is answered."""

    def part(record: Updating) -> None:
        if math.isfinite(record.norm):
            return
        if not record.state.scale.can_fall:
            answer(record, _not_finite(record))
            return
        record.state.scale.update(overflow=True)
        record.update = Update(record.norm, record.lr, applied=False)

    return part


def clip_to(clip_norm: float | None) -> Part:
    """Shorten a gradient that is longer than `clip_norm`."""

    def part(record: Updating) -> None:
        if clip_norm is not None and record.norm > clip_norm:
            record.multiplier = clip_norm / record.norm / record.divisor

    return part


def step_optimizer(record: Updating) -> None:
    """Multiply, and let the optimizer update."""
    for slot, p in record.updates.items():
        p.grad = record.grads.tensors.get(slot)
    groups = record.state.optimizer.param_groups
    rates = [group.get("lr") for group in groups]
    scaled_step(record.state.optimizer, record.grads.flats, record.multiplier)
    if rates != [group.get("lr") for group in groups]:
        raise _sets_its_rate(record.state.optimizer)
    record.state.updates += 1
    record.state.scale.update(overflow=False)


def _sets_its_rate(optimizer: torch.optim.Optimizer) -> TaskError:
    return TaskError(
        f"{type(optimizer).__name__} changes the rate of its groups in its step, and the schedule sets it"
        " anew before every update",
        next_step="multiply group['lr'] with a number that it keeps under another key of the group",
    )


def gather_and_end(gather: Callable[[], None]) -> Part:
    """Bring up to date what this rank computes with."""

    def part(record: Updating) -> None:
        gather()
        record.update = Update(record.norm, record.lr, applied=True)

    return part


def placed_before(parts: Mapping[str, Part], name: str, new_name: str, part: Part) -> dict[str, Part]:
    """The parts with one more, before the part `name`; one of its name is replaced."""
    found: dict[str, Part] = {}
    for key, value in parts.items():
        if key == name:
            found[new_name] = part
        if key != new_name:
            found[key] = value
    return found


def _not_finite(record: Updating) -> NumericError:
    bad = (
        s.name for s, g in record.grads.tensors.items() if g is not None and not bool(torch.isfinite(g).all())
    )
    return NumericError(
        f"the gradient of step {record.state.step} is not finite: {next(bad, 'its norm')}",
        next_step="lower optimizer.lr, set optimizer.clip_norm, or look at the samples of this step",
    )
