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
        StrategyError: there are no micro-batches of ranks.
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
    if recipe.batch.sync_batchnorm:
        raise StrategyError(
            "Task(buffers=...) asks for the sum of changes, or those of the first micro-batch, and"
            " batch.sync_batchnorm has one forward of all ranks",
            next_step='leave sync_batchnorm out, or choose "mean"',
        )
