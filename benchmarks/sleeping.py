"""Layers that take a known time, and next to no processor: what a schedule loses shows on any machine.

A layer sleeps in its forward, as long in the gradient of its input, and as long again in that of its weight,
as schedules count them: 1 and 2, or 1 and 1 and 1 where a backward is split.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from benchmarks.subjects import Subject, made_up
from paceline.task import Loss, Task

_WIDTH = 32


@dataclass
class Clock:
    """How long layers have slept; one for all layers of a side, and for its copies of them.

    Args:
        sleep: takes seconds.
    """

    sleep: Callable[[float], object] = time.sleep
    slept_seconds: float = 0.0

    def take(self, seconds: float) -> None:
        """Sleep; what the system takes too long is counted."""
        begin = time.perf_counter()
        self.sleep(seconds)
        self.slept_seconds += time.perf_counter() - begin

    def __deepcopy__(self, memo: Any) -> Clock:
        return self


class Sleeping(nn.Module):
    """A linear layer that takes its time.

    Args:
        seconds: of a forward; a backward takes two of it.
    """

    def __init__(self, seconds: float, clock: Clock) -> None:
        super().__init__()
        self.seconds, self.clock = seconds, clock
        self.offset = nn.Parameter(torch.zeros(_WIDTH))  # the first layer has an input to differentiate too
        self.weight = nn.Parameter(torch.eye(_WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        """Map [B, W] to [B, W]."""
        self.clock.take(self.seconds)
        weight = _SleepsBackward.apply(self.weight, self.seconds, self.clock)
        return F.linear(_SleepsBackward.apply(x + self.offset, self.seconds, self.clock), weight)


class _SleepsBackward(torch.autograd.Function):
    """The identity, whose gradient takes a time."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, seconds: float, clock: Clock) -> Tensor:
        ctx.seconds, ctx.clock = seconds, clock
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        ctx.clock.take(ctx.seconds)
        return grads[0], None, None


def sleeping_chain(seconds: Sequence[float], micro_batches: int, clock: Clock) -> Subject:
    """A chain of layers that sleep, in micro-batches of two samples.

    Args:
        seconds: of a forward of each layer.
    """
    model = nn.Sequential(*(Sleeping(one, clock) for one in seconds))
    x = torch.randn(1024, _WIDTH, generator=torch.Generator().manual_seed(3))
    recipe = made_up(batch_size=2 * micro_batches, shards=micro_batches, precision="fp32")
    return Subject(recipe, Task(model, x, _loss), lambda model, x: mean_square(model(x), x))


def mean_square(found: Tensor, x: Tensor) -> Tensor:
    """The loss of a sample, in the mean."""
    return found.square().sum() / len(x)


def _loss(model: nn.Module, x: Tensor) -> Loss:
    return Loss(model(x).square().sum(), len(x))
