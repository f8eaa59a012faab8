"""Which run to go on with, and under which recipe."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING

from paceline.cli.common_options import NEWEST
from paceline.errors import RecipeError
from paceline.report.run_files import RECIPE, RUNS

if TYPE_CHECKING:
    from paceline.recipe.recipe import Recipe


def find_run(asked: str, runs: Path = RUNS) -> Path:
    """The run folder, or checkpoint inside one, that was asked for; "newest": the last one begun in `runs/`.

    Raises:
        RecipeError: there is none.
    """
    if asked != NEWEST:
        find_recipe(Path(asked))
        return Path(asked)
    found = [path.parent for path in runs.glob(f"*/{RECIPE}")]
    if not found:
        raise RecipeError(
            f"there is no run in '{runs}/' to go on with", next_step="name a run folder: --resume RUN"
        )
    return max(found, key=lambda run: ((run / RECIPE).stat().st_mtime_ns, run.name))


def require_own_run(run: Path, trust: bool) -> None:
    """A run folder is code: going on with it runs what its recipe names, with the rights of who does so.

    Raises:
        RecipeError: the folder or its recipe is another user's, and `trust` is not said.
    """
    recipe = find_recipe(run)
    owners = {recipe.stat().st_uid, recipe.parent.stat().st_uid} - {os.getuid()}
    if owners and not trust:
        raise RecipeError(
            f"the run belongs to another user ({', '.join(map(str, sorted(owners)))}): "
            "to go on with it runs the task that its recipe names",
            where=str(recipe),
            next_step="look at `task` in that file and at the code it names; then --trust",
        )


def find_recipe(run: Path) -> Path:
    """The recipe of a run folder (or of a checkpoint inside one).

    Raises:
        RecipeError: there is none.
    """
    for folder in (run, run.parent.parent):
        if (folder / RECIPE).exists():
            return folder / RECIPE
    raise RecipeError(
        f"'{run}' is no run folder: it has no {RECIPE}",
        next_step="name the folder that the run printed, for example runs/20260101-120000-digits-1",
    )


def recipe_changes(run: Path, recipe: Recipe) -> list[str]:
    """What changes when a run goes on under a recipe.

    Raises:
        RecipeError: something differs that must not.
    """
    from paceline.recipe.recipe_loading import load_recipe
    from paceline.recipe.resume_changes import refuse_changes

    return refuse_changes(load_recipe(find_recipe(run)), recipe, str(run))
