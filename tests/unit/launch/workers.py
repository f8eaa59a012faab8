"""Workers as a launcher sees them when they have ended."""

from __future__ import annotations

import subprocess
import time
from pathlib import Path

from paceline.launch.job_spec import WorkerSpec
from paceline.launch.worker_guard import ErrorReport
from paceline.launch.worker_process import SessionReaper, WorkerProcess


def ended(
    folder: Path,
    rank: int,
    code: int,
    kind: str = "",
    message: str = "",
    *,
    told: bool = False,
    connection: bool = False,
) -> WorkerProcess:
    """A worker that ended with `code`; with a `kind` it has reported that error."""
    error_file = folder / f"rank-{rank}.json"
    if kind:
        ErrorReport(time.time(), kind, message, "", "", code, connection).save(error_file)
    worker = WorkerSpec(rank, rank, ("true",), {}, {}, None, error_file, folder / f"rank-{rank}.stack")
    process = subprocess.Popen(["sh", "-c", f"exit {code}"])
    process.wait()
    return WorkerProcess(worker, process, SessionReaper(), ended_at=time.time(), was_signalled=told)
