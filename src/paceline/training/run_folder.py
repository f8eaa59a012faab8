"""The folder of a run: its name, its recipe, its checkpoints. Rank 0 writes, all ranks know the name."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from paceline.checkpoint import Files, Lock, Patience, has_published, insist, refused
from paceline.comm.text import share_text
from paceline.observe.append import say_on_stderr
from paceline.recipe import Recipe, load_recipe, to_toml
from paceline.recipe.changes import refuse_changes
from paceline.report.folder import CHECKPOINTS, RECIPE, new_run_dir
from paceline.training import saving
from paceline.training.session import Session


def prepare(session: Session, resume: Path | None) -> Path:
    """The folder of the run, the same on every rank; rank 0 makes it and writes the recipe there.

    Raises:
        RecipeError: the run goes on, and the recipe differs in what must stay.
    """
    if resume is not None:
        chosen = str(run_of(resume))
    else:
        chosen = session.recipe.run_dir or str(new_run_dir(session.recipe.task))
    chosen = share_text(chosen, session.mesh.world, session.net, session.placed.holding.device)
    run_dir = Path(chosen)
    if session.is_first:
        if resume is not None:
            refuse_changes(load_recipe(run_dir / RECIPE), session.recipe, chosen)
        asked = session.recipe.replace(run_dir=None)  # the folder says it; a copy is free to go elsewhere
        text, files = to_toml(asked).encode(), Files(chosen)
        _lock(session, run_dir)
        patience = Patience(session.recipe.checkpoint.full_disk_seconds, say_on_stderr)
        insist(lambda: files.publish(RECIPE, text), files, [], patience)  # a crash must not leave half of it
    return run_dir


def _lock(session: Session, run_dir: Path) -> None:
    """Keep other jobs out of the folders of the run and of its checkpoints until the session is closed."""
    folder = session.recipe.checkpoint.folder
    for url in (str(run_dir), *([] if folder is None else [folder])):
        try:
            session.closers.append(Lock(Files(url), say_on_stderr).release)
        except OSError as error:
            raise refused(url, error) from error


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
