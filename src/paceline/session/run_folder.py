"""The folder of a run: create or reuse it, lock it, write its recipe, and find the checkpoint to resume from.

Rank 0 writes; all ranks know the name. Invariant: two running jobs never share a run folder or a
checkpoint folder (they are locked until the session closes), and a new run never writes into the folder of
another.
"""

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
    """Return the folder of the run, equal on every rank; rank 0 creates it and writes the recipe; collective.

    Args:
        name: part of the name of a new folder under `runs/`; None: the name of the task's function.
    Raises:
        RecipeError: the run is resumed and the recipe has changed where it must not, or the folder belongs to
            another run.
        RunFolderError: the folder cannot be written.
    """
    chosen = ""
    if session.is_first:
        chosen = str(_claim(session, name) if resume is None else run_folder_of(resume))
    # The name may contain a free number that only rank 0 has looked up.
    chosen = broadcast_text(chosen, session.mesh.world, session.net, session.runner.sharded_model.device)
    run_dir = Path(chosen)
    if session.is_first:
        if resume is not None:
            refuse_changes(load_recipe(run_dir / RECIPE), session.recipe, chosen)
            lock_folder(session, run_dir)
        _write_recipe(session.recipe, run_dir)
    return run_dir


def _claim(session: Session, name: str | None) -> Path:
    """Lock and return a folder that no other run uses, with checkpoints that no other run uses.

    If an elastic agent has restarted the processes after a failure, they continue in the folder of the
    first attempt.
    """
    recipe, is_restart = session.recipe, session.cluster.attempt > 0
    if not is_restart:
        _refuse_used(recipe)
    folder = (
        claim_run_dir(name or run_name_of_task(recipe.task))
        if recipe.run_dir is None
        else Path(recipe.run_dir)
    )
    lock_folder(session, folder)
    if not is_restart:
        refuse_existing_run(folder)  # again, now that it is locked: another run may have just ended here
    return folder


def _refuse_used(recipe: Recipe) -> None:
    """Raise a RecipeError if the recipe names a run folder or checkpoint folder that another run has used."""
    if recipe.run_dir is not None:
        refuse_existing_run(Path(recipe.run_dir))
    if recipe.run_dir is None and recipe.checkpoint.folder is None:
        return
    files = checkpointing.checkpoint_files(recipe, Path(recipe.run_dir or ""))
    existing = CheckpointCatalog.read(files).whole
    if existing:
        raise RecipeError(
            f"this folder has checkpoints of another run, the newest is {existing[-1].name}",
            where=files.url,
            next_step="name another checkpoint.folder, or resume that run with `paceline train --resume RUN`",
        )


def lock_folder(session: Session, run_dir: Path) -> None:
    """Lock the folders of the run and of its checkpoints until the session is closed."""
    exit_callbacks = session.session_base.layout.exit_callbacks
    with explain_os_errors(run_dir):
        exit_callbacks.append(FolderLock(StorageFolder(str(run_dir)), warn_on_stderr).release)
    folder = session.recipe.checkpoint.folder
    if folder is None:
        return
    try:
        exit_callbacks.append(FolderLock(StorageFolder(folder), warn_on_stderr).release)
    except OSError as error:
        raise refused_write_error(folder, error) from error


def _write_recipe(recipe: Recipe, run_dir: Path) -> None:
    """Write the recipe without the name of the folder, so that a copied folder can be resumed elsewhere."""
    text, files = to_toml(recipe.replace(run_dir=None)).encode(), StorageFolder(str(run_dir))
    patience = FullDiskPatience(recipe.checkpoint.full_disk_seconds, warn_on_stderr)

    def make_error(path: str, error: OSError) -> RunFolderError:
        return run_folder_error(error, run_dir)

    # Published by a rename, so that a crash does not leave half of it.
    write_with_retries(lambda: files.publish(RECIPE, text), files, [], patience, refuse=make_error)


def find_checkpoint_to_resume(
    recipe: Recipe, resume: Path | None, warn: Callable[[str], None]
) -> Path | None:
    """Return `resume`, or None with a message if that run has no checkpoint yet."""
    if (
        resume is None
        or _is_checkpoint(resume)
        or has_published(checkpointing.checkpoint_files(recipe, run_folder_of(resume)))
    ):
        return resume
    warn("warning: this run has no checkpoint yet, so it starts at step 0.")
    return None


def restore_run(session: Session, resume: Path, warn: Callable[[str], None] = lambda text: None) -> str:
    """Restore the newest valid checkpoint of a run folder, or the given one; return its name; collective.

    Raises:
        CheckpointError: there is no checkpoint, or it is damaged or does not fit.
    """
    files = checkpointing.checkpoint_files(session.recipe, run_folder_of(resume))
    return checkpointing.restore_checkpoint(
        session, files, resume.name if _is_checkpoint(resume) else None, warn
    )


def run_folder_of(resume: Path) -> Path:
    """Return the run folder for a run folder or a checkpoint inside of one."""
    return resume.parent.parent if _is_checkpoint(resume) else resume


def _is_checkpoint(path: Path) -> bool:
    return path.parent.name == CHECKPOINTS
