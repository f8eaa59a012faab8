"""What a worker is doing outside of its steps, in a small file that its launcher reads.

A worker that is stuck in a C call, or that a signal has stopped, cannot keep a deadline itself; its launcher
can. Invariant: a phase that can be read is whole, and reading never fails.
"""

from __future__ import annotations

import json
import time
from dataclasses import asdict, dataclass
from pathlib import Path

CONNECTED = "running with the others"
TRAINING = "training"
SERVED = "training for a server"
"""The job may go on without a worker that is lost."""
LEAVING = "leaving"
NOTHING_TO_SAVE = "stopped before the first step: there was nothing to save"


@dataclass(frozen=True)
class Phase:
    """One phase of a worker.

    Args:
        what: in words, as in "rank 1 is building the task".
        until: when it has to be over, on this host's monotonic clock; None: it may take any time.
    """

    what: str
    until: float | None


def enter_phase(folder: Path | None, global_rank: int, what: str, seconds: float | None = None) -> None:
    """Say what this worker does from now on.

    Args:
        folder: of the launcher; None: nobody reads it.
        seconds: how long it may take; None: any time.
    """
    if folder is None:
        return
    until = None if seconds is None else time.monotonic() + seconds
    path = _file(folder, global_rank)
    hidden = path.with_suffix(".writing")
    try:
        hidden.write_text(json.dumps(asdict(Phase(what, until))), encoding="utf-8")
        hidden.rename(path)
    except OSError:  # the disk is full: an old phase would be taken for the present one
        path.unlink(missing_ok=True)


def read_phase(folder: Path, global_rank: int) -> Phase | None:
    """What a worker said last; None if it has said nothing."""
    try:
        found = json.loads(_file(folder, global_rank).read_text(encoding="utf-8"))
        return Phase(str(found["what"]), None if found["until"] is None else float(found["until"]))
    except (OSError, ValueError, KeyError, TypeError, OverflowError, RecursionError):
        return None


def clear_phase(folder: Path, global_rank: int) -> None:
    """Remove what an earlier job left."""
    _file(folder, global_rank).unlink(missing_ok=True)


def _file(folder: Path, global_rank: int) -> Path:
    return folder / f"rank-{global_rank}.phase"
