"""The folder of a run: the names of its files, where run folders are, and how they are found. Imports no
torch.

recipe.toml      the recipe with every key, but without `run_dir`, so that a copy can be trained elsewhere
metrics.jsonl    one record per line, see docs/reference/metrics.md; full files are metrics.0001.jsonl, ...
log.txt          the same for people
system.jsonl     samples of processes and of the host, with log.sample_seconds; other hosts: system-N.jsonl
checkpoints/     saved states
certificate.json result of `paceline verify RUN`
profile/         profiles of some steps, see `paceline.report.run_profile`
activity/        the current operation of each rank, while it runs
trace/           spans of each rank, and the files that `paceline trace` makes of them
lock             the process that writes here, while it does
report.html      the run as one page
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from contextlib import suppress
from datetime import datetime
from itertools import count
from pathlib import Path

from paceline.errors import DataError, RecipeError
from paceline.observe.file_writing import explain_os_errors

RECIPE = "recipe.toml"
CHECKPOINTS = "checkpoints"
CERTIFICATE = "certificate.json"
REPORT = "report.html"
RUNS = Path("runs")


def claim_run_dir(name: str, runs: Path = RUNS) -> Path:
    """Make a new folder `runs/TIME-NAME`; within the same second, `-2`, `-3` and so on are appended.

    Raises:
        RunFolderError: the folder cannot be made.
    """
    prefix = runs / f"{datetime.now():%Y%m%d-%H%M%S}-{name}"
    with explain_os_errors(runs):
        runs.mkdir(parents=True, exist_ok=True)
        for number in count(1):
            folder = Path(f"{prefix}-{number}" if number > 1 else prefix)
            with suppress(FileExistsError):
                folder.mkdir()
                break
    return folder


def run_name_of_task(task: str) -> str:
    """Return the name of a run of a task: the name of its function or the task, never of its file."""
    return re.sub(r"[^\w.-]+", "-", task.rpartition(":")[2]).strip("-.") or "run"


def refuse_existing_run(folder: Path) -> None:
    """Raise an error if a folder already holds a run.

    Raises:
        RecipeError: the folder holds a run.
    """
    if is_run_folder(folder):
        has_checkpoint = any((folder / CHECKPOINTS).glob("step-*"))
        first = (
            f"resume it: paceline train --resume {folder}"
            if has_checkpoint
            else "remove it: it has no checkpoint"
        )
        raise RecipeError(
            f"'{folder}' already holds a run, and runs never overwrite each other",
            where="run_dir",
            next_step=f"{first}; or choose another run_dir, or leave it out for a new folder in runs/",
        )


def is_run_folder(folder: Path) -> bool:
    """Return whether a folder holds a run that has started."""
    return (folder / RECIPE).is_file()


def find_runs(folders: Sequence[Path]) -> list[Path]:
    """Return the run folders among `folders` and directly inside them, oldest first.

    Raises:
        DataError: one of them does not exist.
    """
    runs: set[Path] = set()
    for folder in folders:
        if not folder.is_dir():
            raise DataError(
                f"the folder '{folder}' does not exist",
                next_step="runs are in runs/ of the folder in which they were started",
            )
        runs |= {path.parent for path in (folder / RECIPE, *folder.glob(f"*/{RECIPE}")) if path.is_file()}
    return sorted(runs, key=lambda run: ((run / RECIPE).stat().st_mtime_ns, run.name))


def resolve_run_folder(folder: Path) -> Path:
    """Return a run folder, given itself or a checkpoint inside it.

    Raises:
        DataError: it is no run folder; the message names the nearest one.
    """
    for candidate in (folder, folder.parent.parent):
        if is_run_folder(candidate):
            return candidate
    inside = [path.parent for path in folder.glob(f"*/{RECIPE}")] if folder.is_dir() else []
    hint = f"did you mean {max(inside)}?" if inside else "`paceline runs` lists those in runs/"
    raise DataError(f"'{folder}' is not a run folder: it has no {RECIPE}", next_step=hint)
