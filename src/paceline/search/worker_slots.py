"""Worker slots: processes of this machine that launch one run after the other.

A slot is a process that runs `main`; it reads a request per line and answers it with
how the run ended. Each run has processes of its own, which die with the slot, as the slot does with the
coordinator.
Invariant: a request has exactly one answer, or the slot is gone and a new one takes its place.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import IO

from paceline.errors import NumericError, RecipeError
from paceline.job.cluster import process_environment
from paceline.launch.job_spec import LaunchJob
from paceline.launch.launcher import launch
from paceline.launch.outcome import STOPPED_EXIT_CODE, LaunchOutcome
from paceline.launch.shutdown import ShutdownTimeouts
from paceline.launch.worker_process import die_with_parent
from paceline.search.study_log import LeaseEnd

_EXIT_SECONDS = 10.0
_SLOT = "from paceline.search.worker_slots import main; main()"
_STOP_CODES = (129, 130, STOPPED_EXIT_CODE)


@dataclass(frozen=True)
class SlotRequest:
    """A run for a slot.

    Args:
        folder: of the run.
        processes, threads, servers: of its job.
        pauses: the run may end before its last step without being stopped.
        grace_seconds, stuck_seconds: see `ShutdownTimeouts`.
    """

    folder: str
    processes: int
    threads: int
    servers: int = 0
    pauses: bool = False
    grace_seconds: float = 30.0
    stuck_seconds: float = 120.0


RunEnd = tuple[LeaseEnd, str]
"""How a run ended, and the reason if it is no success."""


class WorkerSlot:
    """The coordinator's end of one slot.

    Args:
        number: from 0.
        environ: variables of the slot; they name the fork server, if there is one.
    """

    def __init__(self, number: int, environ: Mapping[str, str]) -> None:
        self.number = number
        self._environ = environ
        self._process: subprocess.Popen[str] | None = None
        self._stopping = False
        self._lock = threading.Lock()

    @property
    def pid(self) -> int:
        """Process ID; 0 if it was not started yet."""
        return self._process.pid if self._process is not None else 0

    def run(self, request: SlotRequest) -> RunEnd:
        """Run a request and wait for its end; a slot that dies is a run that was killed."""
        process = self._started()
        if process is None:
            return "stopped", ""
        stdin, stdout = _pipes(process)
        with suppress(BrokenPipeError):
            stdin.write(json.dumps(asdict(request)) + "\n")
            stdin.flush()
        # without a deadline: the launcher in the slot has those of the job
        answer = stdout.readline()
        if not answer.endswith("\n"):
            process.wait(_EXIT_SECONDS)
            return ("stopped", "") if self._stopping else ("killed", "its worker slot was killed")
        end, reason = json.loads(answer)
        return ("stopped", "") if self._stopping and end == "paused" else (end, reason)

    def stop(self) -> None:
        """Let the run save and end, and start no other one."""
        with self._lock:
            self._stopping = True
            if self._process is not None:
                self._process.send_signal(signal.SIGTERM)

    def close(self) -> None:
        """End the process."""
        process = self._process
        if process is None:
            return
        stdin, stdout = _pipes(process)
        with suppress(BrokenPipeError):
            stdin.close()
        try:
            process.wait(_EXIT_SECONDS)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
        stdout.close()

    def _started(self) -> subprocess.Popen[str] | None:
        with self._lock:
            if self._stopping:
                return None
            if self._process is None or self._process.poll() is not None:
                self._process = subprocess.Popen(
                    [sys.executable, "-c", _SLOT, str(os.getpid())],
                    stdin=subprocess.PIPE,
                    stdout=subprocess.PIPE,
                    text=True,
                    env=dict(self._environ),
                    start_new_session=True,
                )
            return self._process


def _pipes(process: subprocess.Popen[str]) -> tuple[IO[str], IO[str]]:
    assert process.stdin is not None and process.stdout is not None
    return process.stdin, process.stdout


def judge_outcome(outcome: LaunchOutcome, *, pauses: bool) -> RunEnd:
    """Return how a run ended; pure."""
    reason = outcome.report.partition("\n")[0]
    if outcome.exit_code == 0:
        return "done", ""
    if outcome.failures and outcome.failures[0].kind == "signal":
        return "killed", reason
    if outcome.exit_code in _STOP_CODES and not outcome.failures:
        return ("paused" if pauses else "stopped"), ""
    ends: dict[int, LeaseEnd] = {NumericError.exit_code: "diverged", RecipeError.exit_code: "refused"}
    return ends.get(outcome.exit_code, "failed"), reason or f"exit code {outcome.exit_code}"


def _launch(request: SlotRequest, environ: Mapping[str, str]) -> RunEnd:
    folder = Path(request.folder)
    job = LaunchJob(
        (sys.executable, "-m", "paceline", "tune", request.folder),
        request.processes,
        threads=request.threads,
        log_dir=folder / "logs",
        output="logged",
        timeouts=ShutdownTimeouts(stuck_seconds=request.stuck_seconds, grace_seconds=request.grace_seconds),
        announces=True,
        servers=request.servers,
    )
    return judge_outcome(launch(job, environ=environ, log=lambda text: None), pauses=request.pauses)


def main() -> None:
    """Answer requests until the coordinator closes its end or is gone."""
    die_with_parent(int(sys.argv[1]))
    environ = process_environment()
    for line in sys.stdin:
        end, reason = _launch(SlotRequest(**json.loads(line)), environ)
        sys.stdout.write(json.dumps([end, reason]) + "\n")
        sys.stdout.flush()
