"""Workers as a launcher sees them when they have ended."""

from __future__ import annotations

import subprocess
import time
from pathlib import Path

from paceline.launch.process import Keeper, Running
from paceline.launch.render import Worker
from paceline.launch.worker import ErrorReport


def ended(
    folder: Path,
    rank: int,
    code: int,
    kind: str = "",
    message: str = "",
    *,
    told: bool = False,
    connection: bool = False,
) -> Running:
    """A worker that ended with `code`; with a `kind` it has reported that error."""
    error_file = folder / f"rank-{rank}.json"
    if kind:
        ErrorReport(time.time(), kind, message, "", "", code, connection).save(error_file)
    worker = Worker(rank, rank, ("true",), {}, {}, None, error_file, folder / f"rank-{rank}.stack")
    process = subprocess.Popen(["sh", "-c", f"exit {code}"])
    process.wait()
    return Running(worker, process, Keeper(), ended_at=time.time(), told=told)
