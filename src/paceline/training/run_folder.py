"""The folder of a run: its name, its recipe, its checkpoints. Rank 0 writes, all ranks know the name."""

from __future__ import annotations

import os
from datetime import datetime
from pathlib import Path

from paceline import checkpoint
from paceline.comm.text import share_text
from paceline.errors import CheckpointError
from paceline.recipe import to_toml
from paceline.training.session import Session


def prepare(session: Session, resume: Path | None) -> Path:
    """The folder of the run, the same on every rank; rank 0 makes it and writes the recipe there."""
    if resume is not None:
        chosen = str(run_of(resume))
    else:
        chosen = session.recipe.run_dir or _new_name(session.recipe.task)
    chosen = share_text(chosen, session.mesh.world, session.net, session.placed.device)
    run_dir = Path(chosen)
    if session.is_first:
        run_dir.mkdir(parents=True, exist_ok=True)
        (run_dir / "recipe.toml").write_text(to_toml(session.recipe), encoding="utf-8")
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


def _new_name(task: str) -> str:
    name = Path(task.partition(":")[0]).stem
    return str(Path("runs") / f"{datetime.now():%Y%m%d-%H%M%S}-{name}-{os.getpid()}")
