"""The run folder that `--resume` names, its recipe, and whether this user should run it."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING

from paceline.cli.common_options import NEWEST
from paceline.errors import RecipeError
from paceline.report.run_files import RECIPE, RUNS

if TYPE_CHECKING:
    from paceline.recipe.recipe import Recipe


def find_run(name: str, runs: Path = RUNS) -> Path:
    """Return the run folder, or the checkpoint inside one, that `name` stands for.

    Args:
        name: its path, or "newest" for the run that began last in `runs`.
    Raises:
        RecipeError: there is none.
    """
    if name != NEWEST:
        find_recipe(Path(name))
        return Path(name)
    folders = [path.parent for path in runs.glob(f"*/{RECIPE}")]
    if not folders:
        raise RecipeError(
            f"there is no run in '{runs}/' to resume", next_step="name a run folder: --resume RUN"
        )
    # Names decide between runs that began within one tick of the file system's clock.
    return max(folders, key=lambda run: ((run / RECIPE).stat().st_mtime_ns, run.name))


def require_own_run(run: Path, trust: bool) -> None:
    """Refuse another user's run folder, since resuming it runs the code that its recipe names.

    Raises:
        RecipeError: the folder or its recipe belongs to another user and `trust` is not set.
    """
    recipe = find_recipe(run)
    # Of both: who owns the folder can replace the recipe in it.
    owners = {recipe.stat().st_uid, recipe.parent.stat().st_uid} - {os.getuid()}
    if owners and not trust:
        raise RecipeError(
            f"the run belongs to another user ({', '.join(map(str, sorted(owners)))}), and resuming it would"
            " run the task that its recipe names",
            where=str(recipe),
            next_step="look at `task` in that file and at the code it names, then pass --trust",
        )


def find_recipe(run: Path) -> Path:
    """Return the recipe of a run folder, or of the run that a checkpoint belongs to.

    Raises:
        RecipeError: there is none.
    """
    # A checkpoint is RUN/checkpoints/NAME, so its run is two folders up.
    for folder in (run, run.parent.parent):
        if (folder / RECIPE).exists():
            return folder / RECIPE
    raise RecipeError(
        f"'{run}' is not a run folder: it has no {RECIPE}",
        next_step="name the folder that the run printed, for example runs/20260101-120000-digits-1",
    )


def recipe_changes(run: Path, recipe: Recipe) -> list[str]:
    """Return a line for each key that changes when a run is resumed with a recipe.

    Raises:
        RecipeError: a key differs that must not change.
    """
    from paceline.recipe.recipe_loading import load_recipe
    from paceline.recipe.resume_changes import refuse_changes

    return refuse_changes(load_recipe(find_recipe(run)), recipe, str(run))
