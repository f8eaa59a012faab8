"""The folder of a run: what its files are called, and where runs are. Imports no torch.

recipe.toml      what was asked for, every key; without `run_dir`, which the folder itself says
metrics.jsonl    one record a line, see docs/reference/metrics.md; full ones are metrics.0001.jsonl, ...
log.txt          the same for people
checkpoints/     saved states
certificate.json what `paceline verify RUN` found
lock             which process writes here, while it does
report.html      the run as one page
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from datetime import datetime
from pathlib import Path

from paceline.errors import DataError

RECIPE = "recipe.toml"
METRICS = "metrics.jsonl"
LOG = "log.txt"
CHECKPOINTS = "checkpoints"
CERTIFICATE = "certificate.json"
REPORT = "report.html"
RUNS = Path("runs")


def new_run_dir(task: str) -> Path:
    """A name under `runs/` that no other process takes: time, task, number of this process."""
    name = Path(task.partition(":")[0]).stem
    return RUNS / f"{datetime.now():%Y%m%d-%H%M%S}-{name}-{os.getpid()}"


def is_run(folder: Path) -> bool:
    """Whether a folder is that of a run that has begun."""
    return (folder / RECIPE).is_file()


def find_runs(folders: Sequence[Path]) -> list[Path]:
    """The run folders among these and directly inside them, the oldest first.

    Raises:
        DataError: one of them does not exist.
    """
    found: set[Path] = set()
    for folder in folders:
        if not folder.is_dir():
            raise DataError(
                f"there is no folder '{folder}'",
                next_step="runs are under runs/ of the folder in which they were started",
            )
        found |= {path.parent for path in (folder / RECIPE, *folder.glob(f"*/{RECIPE}")) if path.is_file()}
    return sorted(found, key=lambda run: ((run / RECIPE).stat().st_mtime_ns, run.name))


def checked_run(folder: Path) -> Path:
    """A run folder, also named by a checkpoint inside it.

    Raises:
        DataError: it is none; names the nearest that is.
    """
    for candidate in (folder, folder.parent.parent):
        if is_run(candidate):
            return candidate
    inside = [path.parent for path in folder.glob(f"*/{RECIPE}")] if folder.is_dir() else []
    hint = f"did you mean {max(inside)}?" if inside else "`paceline runs` lists those under runs/"
    raise DataError(f"'{folder}' is no run folder: it has no {RECIPE}", next_step=hint)
