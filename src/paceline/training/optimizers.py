"""The optimizer of a session: the task's own, or the recipe's by name, in fused kernels where they suit."""

from __future__ import annotations

import torch

from paceline.layout import Holding
from paceline.optim import build_optimizer, require_one_gradient, why_not_fused
from paceline.optim.adopt import adopt, require_fit
from paceline.task import Task
from paceline.training.arrange import Setting
from paceline.training.contract import refuse_two_optimizers
from paceline.training.probe import slow_updates


def build_task_optimizer(setting: Setting, task: Task, holding: Holding) -> torch.optim.Optimizer:
    """The task's own optimizer, or the recipe's by name, over what this rank updates.

    Raises:
        StrategyError: it looks at more than one value, or tensor, at a time, and this rank would update a
            part of them.
        TaskError: the task brings its own, and the recipe sets options of one.
    """
    recipe = setting.recipe
    if task.optimizer is None:
        optimizer = build_optimizer(holding.model, recipe.optimizer, fused_allowed=not recipe.reproducible)
        _tell_kernels(setting, holding)
    else:
        refuse_two_optimizers(recipe)
        optimizer = require_one_gradient(task.optimizer(holding.model))
    if task.optimizer is not None or not recipe.optimizer.spec.elementwise:
        require_fit(optimizer, holding)
    adopt(optimizer, holding)
    return optimizer


def _tell_kernels(setting: Setting, holding: Holding) -> None:
    """Whether updates take a fused kernel, and why; what is slow here is told."""
    recipe, allowed = setting.recipe.optimizer, not setting.recipe.reproducible
    why_not = why_not_fused(holding.model, recipe, allowed)
    reason = why_not or "PyTorch has one for all that is trained"
    setting.note("optimizer", {"name": recipe.name, "fused": not why_not, "reason": reason})
    setting.warn(f"optimizer: {recipe.name} {'without a' if why_not else 'in a'} fused kernel, as {reason}")
    if not recipe.fused and not why_not_fused(holding.model, recipe.replace(fused=True), allowed):
        slow = slow_updates(recipe, sum(p.numel() for p in holding.updates.values()), setting.device)
        if slow:
            setting.warn(slow)
