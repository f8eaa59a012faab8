"""Memory of an optimizer, measured in two updates of small tensors.

The first update creates the state, the second shows the temporary tensors of an update. Both scale with the
size of the parameters.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode

from paceline.optim.build_optimizer import build_optimizer
from paceline.optim.compatibility import copy_for_parameters
from paceline.optim.user_optimizer import member_optimizers
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
    fused_allowed = not recipe.reproducible
    with fake:
        if task.optimizer is not None:
            optimizer = task.optimizer(model)
        else:
            optimizer = build_optimizer(model, recipe.optimizer, fused_allowed)
    members = member_optimizers(optimizer)
    if len(members) > 1:
        return _join(
            [(_num_bytes(member), _measure(partial(copy_for_parameters, member))) for member in members]
        )
    if task.optimizer is not None:
        return _measure(partial(copy_for_parameters, optimizer))
    # Built anew, because kernels of fake tensors are not those of the device.
    plain = recipe.optimizer.replace(adamw_on=())  # patterns of names that the small tensors lack
    return _measure(lambda parameters: build_optimizer(nn.ParameterList(parameters), plain, fused_allowed))


def _join(members: Sequence[tuple[int, UpdateMemory]]) -> UpdateMemory:
    """Return the memory of several optimizers, each of so many bytes of parameters, that update in turn."""
    total = sum(num_bytes for num_bytes, _ in members) or 1
    kept = sum(num_bytes * memory.kept for num_bytes, memory in members) / total
    taken, left = max(m.taken for _, m in members), max(m.left for _, m in members)
    return UpdateMemory(kept, taken, left, any(memory.at_once for _, memory in members))


def _num_bytes(optimizer: torch.optim.Optimizer) -> int:
    return sum(p.nbytes for group in optimizer.param_groups for p in group["params"])


def _measure(make: Callable[[Sequence[nn.Parameter]], torch.optim.Optimizer]) -> UpdateMemory:
    state_bytes, single_bytes = _measure_few(make, 1)
    _, several_bytes = _measure_few(make, _NUM_TENSORS)
    # Far more temporary memory for several tensors than for one: they are updated together.
    at_once = several_bytes > _NUM_TENSORS * single_bytes * 0.9
    return UpdateMemory(state_bytes, single_bytes, 0.0 if at_once else several_bytes - single_bytes, at_once)


def _measure_few(
    make: Callable[[Sequence[nn.Parameter]], torch.optim.Optimizer], count: int
) -> tuple[float, float]:
    """Return kept bytes per byte and temporary bytes per byte of one tensor, for `count` tensors."""
    parameters = [nn.Parameter(torch.zeros(_SIDE, _SIDE)) for _ in range(count)]
    optimizer = make(parameters)
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
