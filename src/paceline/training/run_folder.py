"""The folder of a run: its name, its recipe, its checkpoints. Rank 0 writes, all ranks know the name."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from paceline.checkpoint import Files, Lock, Patience, Shelf, has_published, insist, refused
from paceline.comm.text import share_text
from paceline.errors import RecipeError, RunFolderError
from paceline.observe.append import say_on_stderr
from paceline.observe.disk import explained, unwritable
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
    chosen = share_text(chosen, session.mesh.world, session.net, session.placed.holding.device)
    run_dir = Path(chosen)
    if session.is_first:
        if resume is not None:
            refuse_changes(load_recipe(run_dir / RECIPE), session.recipe, chosen)
            _lock(session, run_dir)
        _write_recipe(session.recipe, run_dir)
    return run_dir


def _claim(session: Session, name: str | None) -> Path:
    """A folder that is no other run's, and checkpoints that are no other run's either.

    A process that an agent starts again after a failure goes on in the folder of the first attempt.
    """
    recipe, again = session.recipe, session.cluster.attempt > 0
    if not again:
        _refuse_used(recipe)
    folder = (
        claim_run_dir(name or name_of_task(recipe.task)) if recipe.run_dir is None else Path(recipe.run_dir)
    )
    _lock(session, folder)
    if not again:
        refuse_taken(folder)  # another run had it until this very moment
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


def _lock(session: Session, run_dir: Path) -> None:
    """Keep other jobs out of the folders of the run and of its checkpoints until the session is closed."""
    with explained(run_dir):
        session.leavers.append(Lock(Files(str(run_dir)), say_on_stderr).release)
    folder = session.recipe.checkpoint.folder
    if folder is None:
        return
    try:
        session.leavers.append(Lock(Files(folder), say_on_stderr).release)
    except OSError as error:
        raise refused(folder, error) from error


def _write_recipe(recipe: Recipe, run_dir: Path) -> None:
    """What was asked for; the folder says where, so that a copy is free to go elsewhere."""
    text, files = to_toml(recipe.replace(run_dir=None)).encode(), Files(str(run_dir))
    patience = Patience(recipe.checkpoint.full_disk_seconds, say_on_stderr)

    def refuse(place: str, error: OSError) -> RunFolderError:
        return unwritable(error, run_dir)

    # a crash must not leave half of it
    insist(lambda: files.publish(RECIPE, text), files, [], patience, refuse=refuse)


def find_source(recipe: Recipe, resume: Path | None, warn: Callable[[str], None]) -> Path | None:
    """What a run that goes on restores: `resume`, unless its folder has no checkpoint yet; that is told."""
    if resume is None or _is_checkpoint(resume) or has_published(saving.files_of(recipe, run_of(resume))):
        return resume
    warn("there is no checkpoint yet: the run begins at step 0")
    return None


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
