"""The folder of a run: its name, its recipe, its checkpoints. Rank 0 writes, all ranks know the name."""

from __future__ import annotations

from pathlib import Path

from paceline import checkpoint
from paceline.comm.text import share_text
from paceline.errors import CheckpointError
from paceline.recipe import to_toml
from paceline.report.folder import RECIPE, new_run_dir
from paceline.training.session import Session


def prepare(session: Session, resume: Path | None) -> Path:
    """The folder of the run, the same on every rank; rank 0 makes it and writes the recipe there."""
    if resume is not None:
        chosen = str(run_of(resume))
    else:
        chosen = session.recipe.run_dir or str(new_run_dir(session.recipe.task))
    chosen = share_text(chosen, session.mesh.world, session.net, session.placed.device)
    run_dir = Path(chosen)
    if session.is_first:
        run_dir.mkdir(parents=True, exist_ok=True)
        asked = session.recipe.replace(
            run_dir=None
        )  # the folder itself says it, and a copy of the recipe is free
        (run_dir / RECIPE).write_text(to_toml(asked), encoding="utf-8")
    return run_dir


def restore(session: Session, resume: Path) -> None:
    """Load the newest checkpoint of a run folder, or the given one.

    Raises:
        CheckpointError: there is none, or it is damaged or does not fit.
    """
    path = resume if _is_checkpoint(resume) else checkpoint.latest(resume / "checkpoints")
    if path is None:
        raise CheckpointError(
            "there is no checkpoint to resume from",
            where=str(resume),
            next_step="name a run folder with a checkpoints folder in it",
        )
    found = checkpoint.load(path)
    session.restore(found.tensors, found.scalars)


def run_of(resume: Path) -> Path:
    """The run folder of a run folder, or of a checkpoint inside one."""
    return resume.parent.parent if _is_checkpoint(resume) else resume


def _is_checkpoint(path: Path) -> bool:
    return path.parent.name == "checkpoints"
