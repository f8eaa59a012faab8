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

import re
from collections.abc import Sequence
from contextlib import suppress
from datetime import datetime
from itertools import count
from pathlib import Path

from paceline.errors import DataError, RecipeError
from paceline.observe.file_writing import explain_os_errors

RECIPE = "recipe.toml"
METRICS = "metrics.jsonl"
LOG = "log.txt"
CHECKPOINTS = "checkpoints"
CERTIFICATE = "certificate.json"
REPORT = "report.html"
RUNS = Path("runs")


def claim_run_dir(name: str, runs: Path = RUNS) -> Path:
    """Make a new folder `runs/TIME-NAME`; where there is one of this second, `-2`, `-3` and so on follow.

    Raises:
        RunFolderError: the folder cannot be made.
    """
    begin = runs / f"{datetime.now():%Y%m%d-%H%M%S}-{name}"
    with explain_os_errors(runs):
        runs.mkdir(parents=True, exist_ok=True)
        for number in count(1):
            folder = Path(f"{begin}-{number}" if number > 1 else begin)
            with suppress(FileExistsError):
                folder.mkdir()
                break
    return folder


def run_name_of_task(task: str) -> str:
    """What to call a run of a task: its function, or its own name; never its file."""
    return re.sub(r"[^\w.-]+", "-", task.rpartition(":")[2]).strip("-.") or "run"


def refuse_existing_run(folder: Path) -> None:
    """A run never writes over another one.

    Raises:
        RecipeError: the folder holds a run.
    """
    if is_run_folder(folder):
        saved = any((folder / CHECKPOINTS).glob("step-*"))
        first = (
            f"go on with it: paceline train --resume {folder}" if saved else "remove it: nothing was saved"
        )
        raise RecipeError(
            f"'{folder}' holds a run already, and a run never writes over another",
            where="run_dir",
            next_step=f"{first}; or name another run_dir, or leave it out for a new folder under runs/",
        )


def is_run_folder(folder: Path) -> bool:
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


def resolve_run_folder(folder: Path) -> Path:
    """A run folder, also named by a checkpoint inside it.

    Raises:
        DataError: it is none; names the nearest that is.
    """
    for candidate in (folder, folder.parent.parent):
        if is_run_folder(candidate):
            return candidate
    inside = [path.parent for path in folder.glob(f"*/{RECIPE}")] if folder.is_dir() else []
    hint = f"did you mean {max(inside)}?" if inside else "`paceline runs` lists those under runs/"
    raise DataError(f"'{folder}' is no run folder: it has no {RECIPE}", next_step=hint)
