"""The folder of a run: its name, its recipe, its checkpoints. Rank 0 writes, all ranks know the name."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from paceline.checkpoint.catalog import CheckpointCatalog, has_published
from paceline.checkpoint.lock import FolderLock
from paceline.checkpoint.publish import FullDiskPatience, refused_write_error, write_with_retries
from paceline.checkpoint.storage import StorageFolder
from paceline.comm.group_collectives import broadcast_text
from paceline.errors import RecipeError, RunFolderError
from paceline.observe.file_writing import explain_os_errors, run_folder_error, warn_on_stderr
from paceline.recipe.recipe import Recipe, to_toml
from paceline.recipe.recipe_loading import load_recipe
from paceline.recipe.resume_changes import refuse_changes
from paceline.report.run_files import (
    CHECKPOINTS,
    RECIPE,
    claim_run_dir,
    refuse_existing_run,
    run_name_of_task,
)
from paceline.session import checkpointing
from paceline.session.session import Session


def prepare_folder(session: Session, resume: Path | None, name: str | None = None) -> Path:
    """The folder of the run, the same on every rank; rank 0 makes it and writes the recipe there.

    Args:
        name: what a new folder under `runs/` is called after; the task's function if None.
    Raises:
        RecipeError: the run goes on, and the recipe differs in what must stay; or another run is there.
        RunFolderError: the folder cannot be written.
    """
    chosen = ""
    if session.is_first:
        chosen = str(_claim(session, name) if resume is None else run_folder_of(resume))
    chosen = broadcast_text(chosen, session.mesh.world, session.net, session.runner.sharded_model.device)
    run_dir = Path(chosen)
    if session.is_first:
        if resume is not None:
            refuse_changes(load_recipe(run_dir / RECIPE), session.recipe, chosen)
            _lock_folder(session, run_dir)
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
        claim_run_dir(name or run_name_of_task(recipe.task))
        if recipe.run_dir is None
        else Path(recipe.run_dir)
    )
    _lock_folder(session, folder)
    if not again:
        refuse_existing_run(folder)  # another run had it until this very moment
    return folder


def _refuse_used(recipe: Recipe) -> None:
    """Raises: RecipeError: the folder that the recipe names, of the run or its checkpoints, is in use."""
    if recipe.run_dir is not None:
        refuse_existing_run(Path(recipe.run_dir))
    if recipe.run_dir is None and recipe.checkpoint.folder is None:
        return
    files = checkpointing.checkpoint_files(recipe, Path(recipe.run_dir or ""))
    taken = CheckpointCatalog.look(files).whole
    if taken:
        raise RecipeError(
            f"there are checkpoints of another run here already, {taken[-1].name} the newest",
            where=files.url,
            next_step="name another checkpoint.folder; `paceline train --resume RUN` goes on with a run",
        )


def _lock_folder(session: Session, run_dir: Path) -> None:
    """Keep other jobs out of the folders of the run and of its checkpoints until the session is closed."""
    with explain_os_errors(run_dir):
        session.session_base.layout.exit_callbacks.append(
            FolderLock(StorageFolder(str(run_dir)), warn_on_stderr).release
        )
    folder = session.recipe.checkpoint.folder
    if folder is None:
        return
    try:
        session.session_base.layout.exit_callbacks.append(
            FolderLock(StorageFolder(folder), warn_on_stderr).release
        )
    except OSError as error:
        raise refused_write_error(folder, error) from error


def _write_recipe(recipe: Recipe, run_dir: Path) -> None:
    """What was asked for; the folder says where, so that a copy is free to go elsewhere."""
    text, files = to_toml(recipe.replace(run_dir=None)).encode(), StorageFolder(str(run_dir))
    patience = FullDiskPatience(recipe.checkpoint.full_disk_seconds, warn_on_stderr)

    def refuse(place: str, error: OSError) -> RunFolderError:
        return run_folder_error(error, run_dir)

    # a crash must not leave half of it
    write_with_retries(lambda: files.publish(RECIPE, text), files, [], patience, refuse=refuse)


def find_checkpoint_to_resume(
    recipe: Recipe, resume: Path | None, warn: Callable[[str], None]
) -> Path | None:
    """What a run that goes on restores: `resume`, unless its folder has no checkpoint yet; that is told."""
    if (
        resume is None
        or _is_checkpoint(resume)
        or has_published(checkpointing.checkpoint_files(recipe, run_folder_of(resume)))
    ):
        return resume
    warn("there is no checkpoint yet: the run begins at step 0")
    return None


def restore_run(session: Session, resume: Path, warn: Callable[[str], None] = lambda text: None) -> str:
    """Go on from the newest valid checkpoint of a run folder, or from the given one; returns its name.

    Raises:
        CheckpointError: there is none, or it is damaged or does not fit.
    """
    files = checkpointing.checkpoint_files(session.recipe, run_folder_of(resume))
    return checkpointing.restore_checkpoint(
        session, files, resume.name if _is_checkpoint(resume) else None, warn
    )


def run_folder_of(resume: Path) -> Path:
    """The run folder of a run folder, or of a checkpoint inside one."""
    return resume.parent.parent if _is_checkpoint(resume) else resume


def _is_checkpoint(path: Path) -> bool:
    return path.parent.name == CHECKPOINTS
