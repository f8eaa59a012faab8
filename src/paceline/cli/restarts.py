"""Restarts of a whole job from its newest checkpoint, after the loss of a process that it cannot survive.

Invariant: every restart begins at a later checkpoint than the one before, so a job that is killed at the same
place again and again ends.
"""

from __future__ import annotations

from pathlib import Path

from paceline.errors import CheckpointError, RunFolderError
from paceline.launch.outcome import LaunchOutcome
from paceline.recipe.recipe import Recipe
from paceline.recipe.recovery import recovery_of
from paceline.report.run_files import CHECKPOINTS


class RestartPolicy:
    """The decision whether a job is started again, and from which checkpoint.

    Args:
        recipe: of the run.
        run_dir: its folder.
        nodes: number of nodes; on several the engine that has started them restarts the job.
        is_resumed: the run may have checkpoints already.
    Attributes:
        num_restarts: restarts so far.
    """

    def __init__(self, recipe: Recipe, run_dir: Path, nodes: int, *, is_resumed: bool) -> None:
        self._recipe, self._run_dir = recipe, run_dir
        self._most = recipe.elastic.max_restarts if nodes == 1 and recovery_of(recipe).kind != "none" else 0
        self._step = self._newest_step()[0] if self._most and is_resumed else 0
        self.num_restarts = 0

    def next_checkpoint(self, outcome: LaunchOutcome) -> str | None:
        """Return the name of the checkpoint from which the job starts again; None if it ends.

        It is restarted if a signal has killed a process, since an error would be raised again, and if there
        is a newer checkpoint than at its last start.
        """
        if self.num_restarts >= self._most or not outcome.failures or outcome.failures[0].kind != "signal":
            return None
        step, name = self._newest_step()
        if step <= self._step:
            return None
        self._step = step
        self.num_restarts += 1
        return name

    def _newest_step(self) -> tuple[int, str]:
        folder = self._recipe.checkpoint.folder or str(self._run_dir / CHECKPOINTS)
        return find_newest_checkpoint(folder)


def find_newest_checkpoint(folder: str) -> tuple[int, str]:
    """Return step and name of the newest whole checkpoint of a folder; 0 and an empty name without one."""
    # Imported late: the launcher of a job that loses nobody does not need them.
    from paceline.checkpoint.catalog import CheckpointCatalog
    from paceline.checkpoint.storage import StorageFolder

    try:
        found = CheckpointCatalog.read(StorageFolder(folder)).whole
    except (OSError, CheckpointError, RunFolderError):
        return 0, ""
    return (found[-1].step, found[-1].name) if found else (0, "")
