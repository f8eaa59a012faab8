"""How buffers come together, as a task says it by patterns: looked up once, refused where it cannot be."""

from __future__ import annotations

from fnmatch import fnmatchcase

from torch import nn

from paceline.errors import StrategyError, TaskError
from paceline.layout.buffers import set_hows
from paceline.recipe import Recipe
from paceline.task import Task


def say_hows(recipe: Recipe, task: Task, model: nn.Module) -> None:
    """Tell the model's modules.

    Raises:
        TaskError: a pattern fits no persistent buffer.
        StrategyError: ranks do not see the changes of single micro-batches, or the oracle sees others.
    """
    if not task.buffers:
        return
    kept = model.state_dict(keep_vars=True)
    names = [name for name, _ in model.named_buffers(remove_duplicate=False) if name in kept]
    for pattern in task.buffers:
        if not any(fnmatchcase(name, pattern) for name in names):
            raise TaskError(
                f"Task(buffers=...) has the pattern '{pattern}', which fits no persistent buffer",
                next_step=f"the model has: {', '.join(names[:5]) or 'none'}",
            )
    if set(task.buffers.values()) != {"mean"}:
        _refuse(recipe)
    found = {name: [how for p, how in task.buffers.items() if fnmatchcase(name, p)] for name in names}
    set_hows(model, {name: hows[0] for name, hows in found.items() if hows})


def _refuse(recipe: Recipe) -> None:
    what = ""
    if recipe.strategy.servers or recipe.strategy.sync != "every-step":
        what = f"sync={recipe.strategy.sync}: replicas meet after several steps, and know the changes as one"
    elif recipe.batch.sync_batchnorm:
        what = "batch.sync_batchnorm: its forward is one of all ranks"
    if what:
        raise StrategyError(
            f"Task(buffers=...) asks for the sum of changes, or those of the first micro-batch, and {what}",
            next_step='choose sync=every-step without sync_batchnorm, or "mean"',
        )
