"""The tail of a step: from summed gradients to an update. The one place where gradients are divided.

In this order: global norm, non-finite check, one multiplier for scale, count and clip, learning rate,
optimizer step. Invariant: it sees sums that are equal on all ranks, so every rank takes the same decision
and makes the same update.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor, nn

from paceline.comm import Gradients, Tally
from paceline.errors import NumericError
from paceline.state import TrainState
from paceline.sync.scaled_step import scaled_step


@dataclass(frozen=True)
class Update:
    """What one tail did.

    Args:
        grad_norm: of the divided gradient, before the clip; not finite if the update was skipped.
        lr: of the first parameter group.
        applied: False if an fp16 overflow, a step without any item, or a guard skipped the update.
    """

    grad_norm: float
    lr: float
    applied: bool


class Tail(Protocol):
    """What a rule calls once a step, with gradients and a tally that are equal on all ranks."""

    @property
    def state(self) -> TrainState:
        """The state that `apply` updates."""

    def apply(self, grads: Gradients, tally: Tally) -> Update:
        """Make one update."""


class Rate(Protocol):
    """Sets the optimizer's rates before an update; `paceline.optim.Schedule` is one."""

    def apply(self, optimizer: torch.optim.Optimizer, update: int) -> float:
        """Set the rate of every group for update number `update`, from 0."""


class UpdateTail:
    """Divide, clip, update.

    Args:
        state: holds the optimizer, the loss scale and the update counter; changed in place.
        parameters: in the order of the gradients; None where this rank updates nothing of it.
        schedule: factor of each group's base rate, by update.
        clip_norm: largest global norm of the divided gradient; None: no clip.
        reduction: "mean" divides by the global count, "sum" does not.
    """

    def __init__(
        self,
        state: TrainState,
        parameters: Sequence[nn.Parameter | None],
        schedule: Rate,
        *,
        clip_norm: float | None = None,
        reduction: str = "mean",
    ) -> None:
        self.state = state
        self._parameters = parameters
        self._schedule, self._clip_norm, self._reduction = schedule, clip_norm, reduction

    def apply(self, grads: Gradients, tally: Tally) -> Update:
        """Make one update from sums over all ranks.

        Args:
            grads: summed over every unit of the step, times `grads.scale`; changed in place.
            tally: agreed sums; its count is the divisor.
        Raises:
            NumericError: a gradient is not finite and there is no loss scale to lower, or not any more.
        """
        scale, lr = self.state.scale, self._set_rates()
        if not tally.count:
            return Update(0.0, lr, applied=False)
        divisor = grads.scale * (tally.count if self._reduction == "mean" else 1.0)
        norm = global_norm(grads.norms) / divisor
        if not math.isfinite(norm):
            if not scale.can_fall:
                raise self._not_finite(grads)
            scale.update(overflow=True)
            return Update(norm, lr, applied=False)
        for p, grad in zip(self._parameters, grads.tensors, strict=True):
            if p is not None:
                p.grad = grad
        scaled_step(self.state.optimizer, grads.flats, self._clip(norm) / divisor)
        self.state.updates += 1
        scale.update(overflow=False)
        return Update(norm, lr, applied=True)

    def _set_rates(self) -> float:
        self._schedule.apply(self.state.optimizer, self.state.updates)
        return float(self.state.optimizer.param_groups[0]["lr"])

    def _clip(self, norm: float) -> float:
        if self._clip_norm is None or norm <= self._clip_norm:
            return 1.0
        return self._clip_norm / norm

    def _not_finite(self, grads: Gradients) -> NumericError:
        names = [name for name, p in self.state.model.named_parameters() if p.requires_grad]
        first = next(
            (
                name
                for name, g in zip(names, grads.tensors, strict=False)
                if g is not None and not bool(torch.isfinite(g).all())
            ),
            "their norm",
        )
        return NumericError(
            f"the gradient of step {self.state.step} is not finite: {first}",
            next_step="lower optimizer.lr, set optimizer.clip_norm, or look at the samples of this step",
        )


class Gathered:
    """A tail whose update is shared out afterwards: each rank updated its own part.

    Args:
        inner: updates the parts.
        share: gives every rank the parts of the others; collective.
    """

    def __init__(self, inner: Tail, share: Callable[[], None]) -> None:
        self.inner, self._share = inner, share

    @property
    def state(self) -> TrainState:
        """The state that the inner tail updates."""
        return self.inner.state

    def apply(self, grads: Gradients, tally: Tally) -> Update:
        """Update, and share if there was something to update."""
        update = self.inner.apply(grads, tally)
        if update.applied:
            self._share()
        return update


def global_norm(norms: Sequence[Tensor]) -> float:
    """Euclidean norm over all tensors together, from the norms of each; 0 for none. Waits for the device.

    Where ranks hold different parts, the reducer has made one norm of all (`comm.AgreedNorm`).
    """
    if not norms:
        return 0.0
    return float(torch.linalg.vector_norm(torch.stack([n.to(norms[0].device) for n in norms])))
