"""One optimizer step on gradients that still have to be multiplied by one number.

A fused optimizer takes the number into its kernel, which reads the gradients anyway; for any other the
gradients are multiplied first. Either way `p.grad` holds the multiplied gradient afterwards.

The update step: from summed gradients to an update, as a flat list of named parts.

    settle, rate, empty, divide, watch, norm, finite, clip, step, gather

Each part reads and writes one record; a part that sets its `update` ends the step. Invariant: parts see sums
that are equal on all ranks that step together, so all of them take the same decision and make the same
update. The one place where gradients are divided.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor, nn
from torch.optim import optimizer as torch_optimizer

from paceline.comm.reduction.gradient_norm import joint_norm
from paceline.comm.reduction.gradients import Gradients
from paceline.comm.tally import StepTally
from paceline.errors import NumericError, TaskError
from paceline.state.slot import TensorSlot
from paceline.state.train_state import TrainState

_FOLDING_OPTIMIZERS = (torch.optim.SGD, torch.optim.Adam, torch.optim.AdamW)
_HALF_DTYPES = (torch.bfloat16, torch.float16)
_LARGEST_FLOAT32 = torch.finfo(torch.float32).max


def scaled_step(optimizer: torch.optim.Optimizer, flats: Sequence[Tensor], multiplier: float) -> None:
    """Multiply the gradients, and step.

    Args:
        flats: the storage of all gradients of the optimizer's parameters.
        multiplier: of every value.
    Exactness: within two roundings of float32, whether the kernel multiplies or not.
    Source: `grad_scale` of torch's fused optimizers, made for `torch.amp.GradScaler`.
    """
    if multiplier == 1.0 or not flats or not any(group["params"] for group in optimizer.param_groups):
        optimizer.step()
    elif 1.0 / _LARGEST_FLOAT32 <= multiplier <= _LARGEST_FLOAT32 and can_fold_scale(optimizer):
        _folded_step(optimizer, 1.0 / multiplier)
    else:
        multiply_in_place(flats, multiplier)
        optimizer.step()


def multiply_in_place(flats: Sequence[Tensor], multiplier: float) -> None:
    """Multiply in place, each value rounded once.

    On the processor `_foreach_mul_` rounds the number to the type of the tensors before, which in bfloat16 is
    off by up to 0.4 % (PyTorch 2.13; tests/unit/training/test_scaled_step.py).
    """
    exact = [flat for flat in flats if flat.dtype not in _HALF_DTYPES]
    if exact:
        torch._foreach_mul_(exact, multiplier)
    for flat in (flat for flat in flats if flat.dtype in _HALF_DTYPES):
        flat.mul_(multiplier)


def can_fold_scale(optimizer: torch.optim.Optimizer) -> bool:
    """Whether its kernel may multiply.

    Only torch's own classes, since another may look at the gradients before its kernel does; only if every
    group is fused and float32 on one device; and only if no hook looks at them before a step.
    """
    if (
        type(optimizer) not in _FOLDING_OPTIMIZERS
        or optimizer._optimizer_step_pre_hooks
        or torch_optimizer._global_optimizer_pre_hooks
    ):
        return False
    kinds = set()
    for group in optimizer.param_groups:
        if not group["fused"]:
            return False
        kinds.update([(p.dtype, p.device) for p in group["params"]])
    return len(kinds) == 1 and kinds.pop()[0] == torch.float32


def _folded_step(optimizer: Any, divisor: float) -> None:
    device = next(p.device for group in optimizer.param_groups for p in group["params"])
    scale = torch.from_numpy(np.array(divisor, dtype=np.float32))  # for a third of what torch.tensor takes
    optimizer.grad_scale = scale if device.type == "cpu" else scale.to(device)
    try:
        optimizer.step()
    finally:
        del optimizer.grad_scale


@dataclass(frozen=True)
class UpdateResult:
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
class PendingUpdate:
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
    updates: Mapping[TensorSlot, nn.Parameter]
    grads: Gradients
    tally: StepTally
    lr: float = 0.0
    divisor: float = 1.0
    norm: float = 0.0
    multiplier: float = 1.0
    update: UpdateResult | None = None
    refused: bool = False


UpdatePart = Callable[[PendingUpdate], None]
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
    updates: Mapping[TensorSlot, nn.Parameter]
    parts: dict[str, UpdatePart]
    observers: list[UpdatePart] = field(default_factory=list)

    def apply(self, grads: Gradients, tally: StepTally) -> UpdateResult:
        """Make one update from sums over all ranks.

        Raises:
            NumericError: a gradient is not finite and no loss scale can be lowered.
        """
        record = PendingUpdate(self.state, self.updates, grads, tally)
        for part in self.parts.values():
            part(record)
            if record.update is not None:
                break
        assert record.update is not None, "no part ended the step"
        for observer in self.observers:
            observer(record)
        return record.update


class RateSchedule(Protocol):
    """Sets the optimizer's rates before an update; `paceline.optim.LearningRateSchedule` is one."""

    def apply(self, optimizer: torch.optim.Optimizer, update: int) -> float:
        """Set the rate of every group for update number `update`, from 0."""


class GradientNorm(Protocol):
    """The norm of the whole sum, from what this rank has of it."""

    def __call__(self, grads: Gradients) -> float: ...


def update_parts(
    rate: RateSchedule,
    *,
    reduction: str = "mean",
    clip_norm: float | None = None,
    norm: GradientNorm = lambda grads: joint_norm(grads.norms),
    gather: Callable[[], None] | None = None,
) -> dict[str, UpdatePart]:
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
        "empty": skip_empty_step,
        "divide": divide_by(reduction),
        "norm": measure_norm(norm),
        "finite": lower_scale_or(raise_error),
        "clip": clip_to(clip_norm),
        "step": step_optimizer,
        "gather": gather_and_end(gather),
    }


def set_rate(rate: RateSchedule) -> UpdatePart:
    """Set every group's rate for the next update."""

    def part(record: PendingUpdate) -> None:
        rate.apply(record.state.optimizer, record.state.updates)
        record.lr = float(record.state.optimizer.param_groups[0]["lr"])

    return part


def skip_empty_step(record: PendingUpdate) -> None:
    """A step without any item updates nothing."""
    if not record.tally.count:
        record.update = UpdateResult(0.0, record.lr, applied=False)


def divide_by(reduction: str) -> UpdatePart:
    """The sums are those of `count` items, times the scale of the loss."""

    def part(record: PendingUpdate) -> None:
        record.divisor = record.grads.scale * (record.tally.count if reduction == "mean" else 1.0)
        record.multiplier = 1.0 / record.divisor

    return part


def measure_norm(norm: GradientNorm) -> UpdatePart:
    """The norm of the divided gradient."""

    def part(record: PendingUpdate) -> None:
        record.norm = norm(record.grads) / record.divisor

    return part


NonFiniteAction = Callable[[PendingUpdate, NumericError], None]
"""What is done about a gradient that is not finite, where no loss scale can be lowered."""


def raise_error(record: PendingUpdate, error: NumericError) -> None:
    """End the run."""
    raise error


def lower_scale_or(answer: NonFiniteAction) -> UpdatePart:
    """An overflow lowers the loss scale and leaves the update out; what cannot be cured so is answered."""

    def part(record: PendingUpdate) -> None:
        if math.isfinite(record.norm):
            return
        if not record.state.scale.can_decrease:
            answer(record, _non_finite_error(record))
            return
        record.state.scale.update(overflow=True)
        record.update = UpdateResult(record.norm, record.lr, applied=False)

    return part


def clip_to(clip_norm: float | None) -> UpdatePart:
    """Shorten a gradient that is longer than `clip_norm`."""

    def part(record: PendingUpdate) -> None:
        if clip_norm is not None and record.norm > clip_norm:
            record.multiplier = clip_norm / record.norm / record.divisor

    return part


def step_optimizer(record: PendingUpdate) -> None:
    """Multiply, and let the optimizer update."""
    for slot, p in record.updates.items():
        p.grad = record.grads.tensors.get(slot)
    groups = record.state.optimizer.param_groups
    rates = [group.get("lr") for group in groups]
    scaled_step(record.state.optimizer, record.grads.flats, record.multiplier)
    if rates != [group.get("lr") for group in groups]:
        raise _changed_rate_error(record.state.optimizer)
    record.state.updates += 1
    record.state.scale.update(overflow=False)


def _changed_rate_error(optimizer: torch.optim.Optimizer) -> TaskError:
    return TaskError(
        f"{type(optimizer).__name__} changes the rate of its groups in its step, and the schedule sets it"
        " anew before every update",
        next_step="multiply group['lr'] with a number that it keeps under another key of the group",
    )


def gather_and_end(gather: Callable[[], None] | None) -> UpdatePart:
    """Bring up to date what this rank computes with."""

    def part(record: PendingUpdate) -> None:
        if gather is not None:
            gather()
        record.update = UpdateResult(record.norm, record.lr, applied=True)

    return part


def insert_part_before(
    parts: Mapping[str, UpdatePart], name: str, new_name: str, part: UpdatePart
) -> dict[str, UpdatePart]:
    """The parts with one more, before the part `name`; one of its name is replaced."""
    found: dict[str, UpdatePart] = {}
    for key, value in parts.items():
        if key == name:
            found[new_name] = part
        if key != new_name:
            found[key] = value
    return found


def _non_finite_error(record: PendingUpdate) -> NumericError:
    bad = (
        s.name for s, g in record.grads.tensors.items() if g is not None and not bool(torch.isfinite(g).all())
    )
    return NumericError(
        f"the gradient of step {record.state.step} is not finite: {next(bad, 'its norm')}",
        next_step="lower optimizer.lr, set optimizer.clip_norm, or look at the samples of this step",
    )
