"""Memory of an optimizer, measured in two updates of small tensors.

The first update creates the state, the second shows the temporary tensors of an update. Both scale with the
size of the parameters.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode

from paceline.optim.build_optimizer import build_optimizer
from paceline.optim.compatibility import copy_for_parameters
from paceline.plan.activation_memory import LiveBytes
from paceline.recipe.recipe import Recipe
from paceline.task import Task

_SIDE = 64
_NUM_TENSORS = 4


@dataclass(frozen=True)
class UpdateMemory:
    """The bytes of an optimizer per byte of a parameter.

    Args:
        kept: bytes of the state.
        taken: temporary bytes while a tensor is updated.
        left: temporary bytes that still exist while the next tensor is updated.
        at_once: the optimizer works on all tensors together, not on one after another.
    """

    kept: float
    taken: float
    left: float
    at_once: bool

    def takes(self, sizes: Sequence[int]) -> int:
        """Return the temporary bytes of an update.

        Args:
            sizes: bytes of the updated tensors; the two largest can be neighbours.
        """
        if self.at_once:
            return int(self.taken * sum(sizes))
        largest, second, *_ = [*sorted(sizes, reverse=True), 0, 0]
        return int(self.taken * largest + self.left * second)


def measure_update(recipe: Recipe, task: Task, model: nn.Module, fake: FakeTensorMode) -> UpdateMemory:
    """Measure the optimizer of a run.

    Args:
        model: model of fake tensors of the mode `fake`.
    """
    custom_optimizer = None
    if task.optimizer is not None:
        with fake:
            custom_optimizer = task.optimizer(model)
    state_bytes, single_bytes = _measure_few(recipe, custom_optimizer, 1)
    _, several_bytes = _measure_few(recipe, custom_optimizer, _NUM_TENSORS)
    # Far more temporary memory for several tensors than for one: they are updated together.
    at_once = several_bytes > _NUM_TENSORS * single_bytes * 0.9
    return UpdateMemory(state_bytes, single_bytes, 0.0 if at_once else several_bytes - single_bytes, at_once)


def _measure_few(
    recipe: Recipe, custom_optimizer: torch.optim.Optimizer | None, count: int
) -> tuple[float, float]:
    """Return kept bytes per byte and temporary bytes per byte of one tensor, for `count` tensors."""
    parameters = [nn.Parameter(torch.zeros(_SIDE, _SIDE)) for _ in range(count)]
    if custom_optimizer is None:
        small = nn.ParameterList(parameters)
        optimizer = build_optimizer(small, recipe.optimizer, fused_allowed=not recipe.reproducible)
    else:
        optimizer = copy_for_parameters(custom_optimizer, parameters)
    for p in parameters:
        p.grad = torch.ones_like(p)
    optimizer.step()
    live = LiveBytes()
    live.leave_out([*parameters, *(p.grad for p in parameters if p.grad is not None)])
    live.leave_out(_state_tensors(optimizer, parameters))
    with live:
        optimizer.step()
    each = parameters[0].nbytes
    state_bytes = sum(t.nbytes for t in _state_tensors(optimizer, parameters) if t.numel() > 1)
    return state_bytes / (count * each), live.peak / each


def _state_tensors(optimizer: torch.optim.Optimizer, parameters: Sequence[nn.Parameter]) -> list[Tensor]:
    return [t for p in parameters for t in optimizer.state[p].values() if isinstance(t, Tensor)]
