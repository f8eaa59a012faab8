"""The tail of a step: from summed gradients to an update. The one place where gradients are divided.

In this order: global norm, non-finite check, one multiplier for scale, count and clip, learning rate,
optimizer step. Invariant: it sees sums that are equal on all ranks, so every rank takes the same decision
and makes the same update.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor, nn

from paceline.comm import Gradients, Tally
from paceline.errors import NumericError
from paceline.optim import Schedule
from paceline.state import TrainState


@dataclass(frozen=True)
class Update:
    """What one tail did.

    Args:
        grad_norm: of the divided gradient, before the clip; not finite if the update was skipped.
        lr: of the first parameter group.
        applied: False if an fp16 overflow, or a step without any item, skipped the update.
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


class UpdateTail:
    """Divide, clip, update.

    Args:
        state: holds the optimizer, the loss scale and the update counter; changed in place.
        parameters: in the order of the gradients.
        schedule: factor of each group's base rate, by update.
        clip_norm: largest global norm of the divided gradient; None: no clip.
        reduction: "mean" divides by the global count, "sum" does not.
    """

    def __init__(
        self,
        state: TrainState,
        parameters: Sequence[nn.Parameter],
        schedule: Schedule,
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
            NumericError: a gradient is not finite and the precision has no loss scale to lower.
        """
        scale, lr = self.state.scale, self._set_rates()
        if not tally.count:
            return Update(0.0, lr, applied=False)
        divisor = grads.scale * (tally.count if self._reduction == "mean" else 1.0)
        norm = global_norm(grads.norms) / divisor
        if not math.isfinite(norm):
            if not scale.dynamic:
                raise self._not_finite(grads)
            scale.update(overflow=True)
            return Update(norm, lr, applied=False)
        multiplier = self._clip(norm) / divisor
        if multiplier != 1.0:
            torch._foreach_mul_(list(grads.flats), multiplier)
        for p, grad in zip(self._parameters, grads.tensors, strict=True):
            p.grad = grad
        self.state.optimizer.step()
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
        names = {p: name for name, p in self.state.model.named_parameters()}
        first = next(
            (
                names[p]
                for p, g in zip(self._parameters, grads.tensors, strict=True)
                if g is not None and not bool(torch.isfinite(g).all())
            ),
            "their norm",
        )
        return NumericError(
            f"the gradient of step {self.state.step} is not finite: {first}",
            next_step="lower optimizer.lr, set optimizer.clip_norm, or look at the samples of this step",
        )


def global_norm(norms: Sequence[Tensor]) -> float:
    """Euclidean norm over all tensors together, from the norms of each; 0 for none. Waits for the device.

    A norm over shards of a replica needs a sum over the group that splits it: the layout's work.
    """
    if not norms:
        return 0.0
    return float(torch.linalg.vector_norm(torch.stack([n.to(norms[0].device) for n in norms])))
