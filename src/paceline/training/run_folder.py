"""The folder of a run: its name, its recipe, its checkpoints. Rank 0 writes, all ranks know the name."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from paceline.checkpoint import Files, Shelf
from paceline.comm.text import share_text
from paceline.errors import RecipeError
from paceline.observe.disk import explained
from paceline.recipe import Recipe, load_recipe, to_toml
from paceline.recipe.changes import refuse_changes
from paceline.report.folder import CHECKPOINTS, RECIPE, claim_run_dir, name_of_task, refuse_taken
from paceline.training import saving
from paceline.training.session import Session


def prepare(session: Session, resume: Path | None, name: str | None = None) -> Path:
    """The folder of the run, the same on every rank; rank 0 makes it and writes the recipe there.

    Args:
        name: what a new folder under `runs/` is called after; the task's function if None.
    Raises:
        RecipeError: the run goes on, and the recipe differs in what must stay; or another run is there.
        RunFolderError: the folder cannot be written.
    """
    chosen = ""
    if session.is_first:
        chosen = str(_claim(session, name) if resume is None else run_of(resume))
    chosen = share_text(chosen, session.mesh.world, session.net, session.placed.device)
    run_dir = Path(chosen)
    if session.is_first:
        if resume is not None:
            refuse_changes(load_recipe(run_dir / RECIPE), session.recipe, chosen)
        asked = session.recipe.replace(run_dir=None)  # the folder says it; a copy is free to go elsewhere
        with explained(run_dir):
            Files(chosen).publish(RECIPE, to_toml(asked).encode())  # a crash must not leave half of it
    return run_dir


def _claim(session: Session, name: str | None) -> Path:
    """A folder that is no other run's, and checkpoints that are no other run's either.

    A process that an agent starts again after a failure goes on in the folder of the first attempt.
    """
    recipe, again = session.recipe, session.cluster.attempt > 0
    if not again:
        _refuse_used(recipe)
    if recipe.run_dir is None:
        return claim_run_dir(name or name_of_task(recipe.task))
    folder = Path(recipe.run_dir)
    with explained(folder):
        folder.mkdir(parents=True, exist_ok=True)
        try:
            (folder / RECIPE).touch(exist_ok=again)
        except FileExistsError:  # another run has begun in this very moment
            refuse_taken(folder)
    return folder


def _refuse_used(recipe: Recipe) -> None:
    """Raises: RecipeError: the folder that the recipe names, of the run or its checkpoints, is in use."""
    if recipe.run_dir is not None:
        refuse_taken(Path(recipe.run_dir))
    if recipe.run_dir is None and recipe.checkpoint.folder is None:
        return
    files = saving.files_of(recipe, Path(recipe.run_dir or ""))
    taken = Shelf.look(files).whole
    if taken:
        raise RecipeError(
            f"there are checkpoints of another run here already, {taken[-1].name} the newest",
            where=files.url,
            next_step="name another checkpoint.folder; `paceline train --resume RUN` goes on with a run",
        )


def restore(session: Session, resume: Path, warn: Callable[[str], None] = lambda text: None) -> str:
    """Go on from the newest valid checkpoint of a run folder, or from the given one; returns its name.

    Raises:
        CheckpointError: there is none, or it is damaged or does not fit.
    """
    files = saving.files_of(session.recipe, run_of(resume))
    return saving.restore(session, files, resume.name if _is_checkpoint(resume) else None, warn)


def run_of(resume: Path) -> Path:
    """The run folder of a run folder, or of a checkpoint inside one."""
    return resume.parent.parent if _is_checkpoint(resume) else resume


def _is_checkpoint(path: Path) -> bool:
    return path.parent.name == CHECKPOINTS
