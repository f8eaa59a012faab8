"""Pieces with mistakes that happen to summed gradients, or after it; see `faults`."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from paceline.comm import Gradients, Reducer
from paceline.optim import Schedule, build_schedule
from paceline.sync import Part, Updating
from paceline.sync.update import Norm

Parts = dict[str, Part]


def no_clip(parts: Parts) -> Parts:
    """Leave gradients as long as they are."""
    return {**parts, "clip": lambda record: None}


def not_divided(parts: Parts) -> Parts:
    """Take the sum for the mean."""
    right = parts["divide"]

    def divide(record: Updating) -> None:
        right(record)
        record.divisor /= record.tally.count
        record.multiplier *= record.tally.count

    return {**parts, "divide": divide}


def divided_twice(num_replicas: int) -> Any:
    """Divide by the number of replicas once more."""

    def edit(parts: Parts) -> Parts:
        right = parts["divide"]

        def divide(record: Updating) -> None:
            right(record)
            record.divisor *= num_replicas
            record.multiplier /= num_replicas

        return {**parts, "divide": divide}

    return edit


def step_twice(parts: Parts) -> Parts:
    """Call the optimizer's step a second time."""
    right = parts["step"]

    def step(record: Updating) -> None:
        right(record)
        record.state.optimizer.step()

    return {**parts, "step": step}


def no_step(parts: Parts) -> Parts:
    """Undo what the optimizer does to the parameters."""
    right = parts["step"]

    def step(record: Updating) -> None:
        kept = [p.detach().clone() for p in record.updates.values()]
        right(record)
        with torch.no_grad():
            for p, value in zip(record.updates.values(), kept, strict=True):
                p.copy_(value)

    return {**parts, "step": step}


def forget_state(parts: Parts) -> Parts:
    """Begin every step with an optimizer that knows nothing."""
    right = parts["step"]

    def step(record: Updating) -> None:
        record.state.optimizer.state.clear()
        right(record)

    return {**parts, "step": step}


def other_options(parts: Parts) -> Parts:
    """Let everything decay."""
    right = parts["step"]

    def step(record: Updating) -> None:
        for group in record.state.optimizer.param_groups:
            group["weight_decay"] = 0.3
        right(record)

    return {**parts, "step": step}


def drifting(parts: Parts) -> Parts:
    """Add noise after the step, of which every process draws its own."""
    right = parts["step"]

    def step(record: Updating) -> None:
        right(record)
        own = torch.distributed.get_rank() if torch.distributed.is_initialized() else 1
        with torch.no_grad():
            for p in record.updates.values():
                p.add_(own * 1e-3)

    return {**parts, "step": step}


def norm_of_some(right: Norm) -> Norm:
    """Leave the first tensor out."""

    def norm(grads: Gradients) -> float:
        right(grads)
        found = [g for g in grads.tensors.values() if g is not None]
        return float(torch.linalg.vector_norm(torch.cat([g.reshape(-1) for g in found[1:]])))

    return norm


class _Constant:
    """Never changes the rate."""

    def __init__(self, inner: Schedule) -> None:
        self.inner = inner

    def factor(self, update: int) -> float:
        return 0.5

    def apply(self, optimizer: Any, update: int) -> float:
        self.inner.apply(optimizer, update)
        for group in optimizer.param_groups:
            group["lr"] = 0.5 * group["initial_lr"]
        return 0.5


def constant_rate(*args: Any) -> Any:
    """Another schedule than the recipe's."""
    return _Constant(build_schedule(*args))


class NotCleared(Reducer):
    """Adds the sums of the step before."""

    _kept: list[Tensor] | None = None

    def finish(self) -> Gradients:
        """What is there, on top of what was there."""
        grads = super().finish()
        fresh = [flat.clone() for flat in grads.flats]
        for flat, old in zip(grads.flats, self._kept or (), strict=False):
            flat += old
        self._kept = fresh
        return grads


class Emptied(Reducer):
    """Loses a bucket."""

    def finish(self) -> Gradients:
        """Zeros in place of the last one."""
        grads = super().finish()
        grads.flats[-1].zero_()
        return grads


class Narrow(Reducer):
    """Adds up in float16."""

    def finish(self) -> Gradients:
        """What is left of the sums in 16 bits."""
        grads = super().finish()
        for flat in grads.flats:
            flat.copy_(flat.to(torch.float16))
        return grads
