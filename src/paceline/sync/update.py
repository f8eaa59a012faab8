"""The update step: from summed gradients to an update, as a list of named parts.

    rate, empty, divide, norm, finite, clip, step, gather

Others insert `settle` (`session.checkpointing`), `watch` (`sync.health`), `weigh` and `unweigh`
(`sync.work_assignment`).

Each part reads and writes one `PendingUpdate`; a part that sets its `update` ends the step. Tests and faults
exchange parts by name. This is the only place where gradients are divided: all factors are collected in one
number, and `scaled_step` multiplies by it once. A fused optimizer takes the number into its kernel, which
reads the gradients anyway; for any other optimizer the gradients are multiplied first. Either way `p.grad`
holds the multiplied gradient afterwards.

Invariant: parts see sums that are equal on all ranks that step together, so these ranks take the same
decisions and make the same update.
"""

from __future__ import annotations

import inspect
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
_KERNEL_STEPS: Mapping[type, Callable[[Any], Any]] = {
    kind: inspect.unwrap(kind.step) for kind in _FOLDING_OPTIMIZERS
}
_HALF_DTYPES = (torch.bfloat16, torch.float16)
_LARGEST_FLOAT32 = torch.finfo(torch.float32).max


def scaled_step(optimizer: torch.optim.Optimizer, flats: Sequence[Tensor], multiplier: float) -> None:
    """Multiply the gradients by a number and step the optimizer.

    Args:
        optimizer: holds the parameters.
        flats: the storage of all gradients of these parameters.
        multiplier: the number.
    Exactness: within two roundings of float32, whether or not the kernel multiplies.
    Source: `grad_scale` of torch's fused optimizers, made for `torch.amp.GradScaler`.
    """
    if multiplier == 1.0 or not flats or not any(group["params"] for group in optimizer.param_groups):
        optimizer.step()
    # The kernel divides by a float32, so the reciprocal has to be one as well.
    elif 1.0 / _LARGEST_FLOAT32 <= multiplier <= _LARGEST_FLOAT32 and can_fold_scale(optimizer):
        _folded_step(optimizer, 1.0 / multiplier)
    else:
        multiply_in_place(flats, multiplier)
        optimizer.step()


def multiply_in_place(flats: Sequence[Tensor], multiplier: float) -> None:
    """Multiply tensors in place, rounding each value once.

    On the CPU `_foreach_mul_` first rounds the number to the dtype of the tensors, which is off by up to 0.4
    % in bfloat16 (PyTorch 2.13; tests/unit/sync/test_update.py).
    """
    exact = [flat for flat in flats if flat.dtype not in _HALF_DTYPES]
    if exact:
        torch._foreach_mul_(exact, multiplier)
    for flat in (flat for flat in flats if flat.dtype in _HALF_DTYPES):
        flat.mul_(multiplier)


def can_fold_scale(optimizer: torch.optim.Optimizer) -> bool:
    """Return whether the optimizer's kernel can multiply the gradients.

    It is false for subclasses, which can read gradients before the kernel, for groups that are not fused and
    float32 on one device, and if a hook runs before the step.
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


def _has_own_step(optimizer: Any) -> bool:
    """Return whether a step must go through the optimizer's wrapper: it was replaced, or hooks follow it."""
    return "step" in vars(optimizer) or bool(torch_optimizer._global_optimizer_post_hooks)


def _folded_step(optimizer: Any, divisor: float) -> None:
    device = next(p.device for group in optimizer.param_groups for p in group["params"])
    scale = torch.from_numpy(np.array(divisor, dtype=np.float32))  # a third of the time of torch.tensor
    optimizer.grad_scale = scale if device.type == "cpu" else scale.to(device)
    try:
        if (
            torch.autograd.profiler._is_profiler_enabled
            or optimizer._optimizer_step_post_hooks
            or _has_own_step(optimizer)
        ):
            optimizer.step()
        else:
            # The wrappers around a step record it for a profiler and call hooks: half of a small step.
            with torch.no_grad():
                _KERNEL_STEPS[type(optimizer)](optimizer)
    finally:
        # Left behind, it would also divide the gradients of a step that is not taken through `scaled_step`.
        del optimizer.grad_scale


@dataclass(frozen=True)
class UpdateResult:
    """The result of an update step.

    Args:
        grad_norm: norm of the divided gradient before the clip; not finite if it overflowed or was skipped.
        lr: of the first parameter group.
        applied: False if the update was skipped: fp16 overflow, no items in the step, or a guard.
    """

    grad_norm: float
    lr: float
    applied: bool


@dataclass
class PendingUpdate:
    """An update in progress.

    Args:
        state: optimizer, loss scale and update counter; changed in place.
        updates: the parameters that this rank updates.
        grads: summed over all micro-batches of the step, times `grads.scale`; changed in place.
        tally: sums that are equal on all ranks.
        lr: of the first parameter group; set by the part `rate`.
        divisor: of the sums; set by `divide`.
        norm: of the divided gradient; set by `norm`.
        multiplier: the factor of the sums; set by `divide`, changed by `clip`.
        update: the result; the part that sets it ends the step.
        refused: a guard skipped the step.
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
"""One part of an update step."""


@dataclass
class UpdateStep:
    """The update step that a rule calls once per step, with sums that are equal on all ranks.

    Args:
        state: optimizer, loss scale and update counter.
        updates: the parameters that this rank's optimizer updates, by slot.
        parts: by name, in their order.
        observers: called with the `PendingUpdate` at the end of each step, whichever part ended it.
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
        # Observers also see steps that were skipped.
        for observer in self.observers:
            observer(record)
        return record.update


class RateSchedule(Protocol):
    """A schedule of the optimizer's rates; `paceline.optim.LearningRateSchedule` is one."""

    def apply(self, optimizer: torch.optim.Optimizer, update: int) -> float:
        """Set the rate of every group for update number `update`, counted from 0."""


class GradientNorm(Protocol):
    """A function from this rank's gradients to the norm of the whole gradient."""

    def __call__(self, grads: Gradients) -> float: ...


def update_parts(
    rate: RateSchedule,
    *,
    reduction: str = "mean",
    clip_norm: float | None = None,
    clip_value: float | None = None,
    norm: GradientNorm = lambda grads: joint_norm(grads.norms),
    gather: Callable[[], None] | None = None,
) -> dict[str, UpdatePart]:
    """Return the parts of an update step without a guard.

    Args:
        rate: factor of each group's base rate, by update.
        reduction: "mean" divides by the number of items, "sum" does not.
        clip_norm: largest norm of the divided gradient; None: no clip.
        clip_value: largest magnitude of a value of it; None: no clip. The recipe sets at most one of both.
        norm: of the whole gradient; collective over the ranks of a replica.
        gather: updates what this rank computes with after an update; collective.
    """
    return {
        "rate": set_rate(rate),
        "empty": skip_empty_step,
        "divide": divide_by(reduction),
        "norm": measure_norm(norm),
        "finite": lower_scale_or(raise_error),
        "clip": clip_to(clip_norm) if clip_value is None else clip_values_to(clip_value),
        "step": step_optimizer,
        "gather": gather_and_end(gather),
    }


def set_rate(rate: RateSchedule) -> UpdatePart:
    """Return the part that sets every group's rate for the next update."""

    def part(record: PendingUpdate) -> None:
        rate.apply(record.state.optimizer, record.state.num_updates)
        record.lr = float(record.state.optimizer.param_groups[0]["lr"])

    return part


def skip_empty_step(record: PendingUpdate) -> None:
    """End a step without items, because there is nothing to update."""
    if not record.tally.count:
        record.update = UpdateResult(0.0, record.lr, applied=False)


def divide_by(reduction: str) -> UpdatePart:
    """Return the part that computes the divisor: the loss scale, times the number of items for a mean."""

    def part(record: PendingUpdate) -> None:
        record.divisor = record.grads.scale * (record.tally.count if reduction == "mean" else 1.0)
        record.multiplier = 1.0 / record.divisor

    return part


def measure_norm(norm: GradientNorm) -> UpdatePart:
    """Return the part that computes the norm of the divided gradient."""

    def part(record: PendingUpdate) -> None:
        record.norm = norm(record.grads) / record.divisor

    return part


NonFiniteAction = Callable[[PendingUpdate, NumericError], None]
"""Handles a gradient that is not finite if there is no loss scale that can be lowered."""


def raise_error(record: PendingUpdate, error: NumericError) -> None:
    """End the run."""
    raise error


def lower_scale_or(action: NonFiniteAction) -> UpdatePart:
    """Return the part that handles an overflow: lower the loss scale and skip, or else call `action`."""

    def part(record: PendingUpdate) -> None:
        if math.isfinite(record.norm):
            return
        if not record.state.scale.can_decrease:
            action(record, _non_finite_error(record))
            return
        # An fp16 overflow is expected from time to time, and no error.
        record.state.scale.update(overflow=True)
        record.update = UpdateResult(record.norm, record.lr, applied=False)

    return part


def clip_to(clip_norm: float | None) -> UpdatePart:
    """Return the part that shortens a gradient with a norm above `clip_norm`."""

    def part(record: PendingUpdate) -> None:
        if clip_norm is not None and record.norm > clip_norm:
            # The norm is that of the divided gradient, so clip and division become one factor.
            record.multiplier = clip_norm / record.norm / record.divisor

    return part


def clip_values_to(clip_value: float) -> UpdatePart:
    """Return the part that limits every value of the divided gradient to [-clip_value, clip_value].

    Exactness: elementwise, so it does not depend on where tensors are cut; a limited value is `clip_value` in
    the dtype of the gradient, as `torch.nn.utils.clip_grad_value_` has it.
    """

    def part(record: PendingUpdate) -> None:
        # Divided here and not in the kernel: the quotient of a limited sum can be off by a rounding.
        flats = record.grads.flats
        if record.multiplier != 1.0:
            multiply_in_place(flats, record.multiplier)
        record.multiplier = 1.0
        for flat in flats:
            values = torch.view_as_real(flat) if flat.is_complex() else flat
            values.clamp_(-clip_value, clip_value)

    return part


def step_optimizer(record: PendingUpdate) -> None:
    """Multiply the gradients and step the optimizer.

    Raises:
        TaskError: the optimizer changes the rates of its groups.
    """
    for slot, p in record.updates.items():
        # None where no rank had a gradient: the optimizer skips it, while zeros would still decay the
        # parameter.
        p.grad = record.grads.tensors.get(slot)
    groups = record.state.optimizer.param_groups
    # A rate that the optimizer changes itself would be overwritten by the schedule without notice.
    rates = [group.get("lr") for group in groups]
    scaled_step(record.state.optimizer, record.grads.flats, record.multiplier)
    if rates != [group.get("lr") for group in groups]:
        raise _changed_rate_error(record.state.optimizer)
    record.state.num_updates += 1
    record.state.scale.update(overflow=False)


def _changed_rate_error(optimizer: torch.optim.Optimizer) -> TaskError:
    return TaskError(
        f"{type(optimizer).__name__} changes the rate of its groups in its step, but the schedule sets it"
        " before every update",
        next_step="multiply group['lr'] by a number that the optimizer keeps under another key of the group",
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
    """Return the parts with one more before the part `name`; a part with the new name is replaced."""
    result: dict[str, UpdatePart] = {}
    for key, value in parts.items():
        if key == name:
            result[new_name] = part
        if key != new_name:
            result[key] = value
    return result


def _non_finite_error(record: PendingUpdate) -> NumericError:
    non_finite_names = (
        slot.name
        for slot, grad in record.grads.tensors.items()
        if grad is not None and not bool(torch.isfinite(grad).all())
    )
    return NumericError(
        f"the gradient of step {record.state.step} is not finite: {next(non_finite_names, 'its norm')}",
        next_step="lower optimizer.lr, set optimizer.clip_norm, or check the samples of this step",
    )
