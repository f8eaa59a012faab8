"""Resolve arguments of callers: a recipe or its file, a task or its function, a run or a folder of runs."""

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
_COMMON_FUNCTION_NAMES = frozenset({"build", "build_task", "make", "make_task", "main", "task", "<lambda>"})
RecipeLike = Recipe | str | PathLike[str]
_TASK_TUPLE_LENGTH = 3


def resolve_recipe(recipe: RecipeLike, task: TaskLike | None, base_dir: Path | None) -> tuple[Recipe, Path]:
    """Return the recipe, and the folder to which the file of its task is relative.

    Args:
        recipe: a recipe or the path of its file.
        base_dir: None: the folder of that file, or the working directory.
    Raises:
        RecipeError: neither the recipe nor `task` names a task.
    """
    if not isinstance(recipe, Recipe):
        base_dir = base_dir or Path(recipe).resolve().parent
        recipe = load_recipe(recipe)
    if not recipe.task and task is None:
        raise RecipeError(
            "the recipe names no task, and none was passed",
            where="Recipe(...)",
            next_step='call train(recipe, build) with a function, or set Recipe(task="file.py:build", ...)',
        )
    if not recipe.task:
        recipe = recipe.replace(task=getattr(task, "__name__", "given"))
    return recipe, base_dir or Path.cwd()


def run_name_of_call(recipe: RecipeLike, task: TaskLike | None) -> str | None:
    """Return the name of the run folder of a call from Python; None: the name of the recipe's task.

    It is that of the recipe's file, or of the function that builds the task. If that is a word that every
    script uses, such as "build", it is the name of the function's file.
    """
    if not isinstance(recipe, Recipe):
        return Path(recipe).stem
    function_name: str | None = getattr(task, "__name__", None)
    if function_name not in _COMMON_FUNCTION_NAMES:
        return function_name
    file = str(getattr(getattr(task, "__code__", None), "co_filename", "<unknown>"))
    # A cell of a notebook has no file.
    return function_name if file.startswith("<") else Path(file).stem


def resolve_task(task: TaskLike | None) -> Task | Callable[..., Any] | None:
    """Return a task, or a function that builds one; a tuple (model, data, loss) becomes a task.

    Raises:
        TaskError: it is something else.
    """
    if isinstance(task, tuple) and len(task) == _TASK_TUPLE_LENGTH:
        return Task(*task)
    if task is None or isinstance(task, Task) or callable(task):
        return task
    raise TaskError(
        f"expected a task, found {type(task).__name__}",
        next_step="pass Task(model, data, loss), (model, data, loss), or a function that returns one",
    )


def resolve_run(resume: str | PathLike[str] | None) -> Path | None:
    """Return a run folder or a checkpoint inside of one; of a folder of runs the newest run.

    Raises:
        DataError: there is no run in that folder.
    """
    if resume is None:
        return None
    path = Path(resume)
    if is_run_folder(path) or is_run_folder(path.parent.parent) or not path.is_dir():
        return path
    runs = find_runs([path])
    if not runs:
        raise DataError(f"there is no run in '{path}' to resume", next_step="name a run folder")
    return runs[-1]
