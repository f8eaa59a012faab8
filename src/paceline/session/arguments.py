"""What a caller may give: a recipe or its file, a task or what makes one, a run or a folder of runs."""

from __future__ import annotations

from collections.abc import Callable
from os import PathLike
from pathlib import Path
from typing import Any

from paceline.errors import DataError, RecipeError, TaskError
from paceline.recipe.recipe import Recipe
from paceline.recipe.recipe_loading import load_recipe
from paceline.report.run_files import find_runs, is_run_folder
from paceline.task import Task

TaskLike = Task | Callable[..., Any] | tuple[Any, ...]
RecipeLike = Recipe | str | PathLike[str]
_TASK_TUPLE_LENGTH = 3


def resolve_recipe(recipe: RecipeLike, task: TaskLike | None, base_dir: Path | None) -> tuple[Recipe, Path]:
    """The recipe, and the folder that its task's file is relative to.

    Args:
        recipe: or the path of its file.
        base_dir: None: the folder of that file, or the working directory.
    Raises:
        RecipeError: nothing says what to train.
    """
    if not isinstance(recipe, Recipe):
        base_dir = base_dir or Path(recipe).resolve().parent
        recipe = load_recipe(recipe)
    if not recipe.task and task is None:
        raise RecipeError(
            "nothing says what to train",
            where="Recipe(...)",
            next_step='train(recipe, build) with a function, or Recipe(task="file.py:build", ...)',
        )
    if not recipe.task:
        recipe = recipe.replace(task=getattr(task, "__name__", "given"))
    return recipe, base_dir or Path.cwd()


def resolve_task(task: TaskLike | None) -> Task | Callable[..., Any] | None:
    """A tuple (model, data, loss) is a task.

    Raises:
        TaskError: it is something else.
    """
    if isinstance(task, tuple) and len(task) == _TASK_TUPLE_LENGTH:
        return Task(*task)
    if task is None or isinstance(task, Task) or callable(task):
        return task
    raise TaskError(
        f"the task is {type(task).__name__}, which is no task",
        next_step="give Task(model, data, loss), (model, data, loss), or a function that returns one",
    )


def resolve_run(resume: str | PathLike[str] | None) -> Path | None:
    """A run folder, a checkpoint inside one, or the newest run of a folder of them.

    Raises:
        DataError: there is no run in that folder.
    """
    if resume is None:
        return None
    path = Path(resume)
    if is_run_folder(path) or is_run_folder(path.parent.parent) or not path.is_dir():
        return path
    found = find_runs([path])
    if not found:
        raise DataError(f"there is no run in '{path}' to go on with", next_step="name a run folder")
    return found[-1]
