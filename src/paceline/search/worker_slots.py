"""Worker slots: processes of this machine that launch one run after the other.

A slot is a process that runs `main`; it reads a request per line and answers it with
how the run ended. Each run has processes of its own, which die with the slot, as the slot does with the
coordinator. A slot of a worker on another machine also dies when its lease is not renewed.
Invariant: a request has exactly one answer, or the slot is gone and a new one takes its place.
"""

from __future__ import annotations

import json
import os
import select
import signal
import subprocess
import sys
import threading
import time
from collections import deque
from collections.abc import Iterable, Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from queue import SimpleQueue
from typing import IO, Protocol

from paceline.errors import DeadlineError, NumericError, PacelineError, RecipeError
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
_READ_BYTES = 1 << 16
_POLL_SECONDS = 0.2
_NO_SLOT_SECONDS = 600.0


@dataclass(frozen=True)
class SlotRequest:
    """A run for a slot.

    Args:
        folder: of the run.
        processes, threads, servers: of its job.
        pauses: the run may end before its last step without being stopped.
        grace_seconds, stuck_seconds: see `ShutdownTimeouts`.
        lease_seconds: the slot kills itself, and so the run, when `renew` was not called for so long; 0:
            never.
    """

    folder: str
    processes: int
    threads: int
    servers: int = 0
    pauses: bool = False
    grace_seconds: float = 30.0
    stuck_seconds: float = 120.0
    lease_seconds: float = 0.0


RunEnd = tuple[LeaseEnd, str]
"""How a run ended, and the reason if it is no success."""


class RunSlot(Protocol):
    """A place for one run at a time, in this machine or another."""

    def run(self, request: SlotRequest, lease: int) -> RunEnd:
        """Run a request under the lease with this number, and wait for its end."""

    def stop(self) -> None:
        """Let the run save and end, and start no other one."""

    def close(self) -> None:
        """End the processes of the slot."""


class SlotPool:
    """The numbers of slots that have no run. Slots can join and leave; any thread may call.

    Args:
        numbers: of the slots at the beginning.
        patience_seconds: for how long `take` waits while there is no slot at all.
    """

    def __init__(self, numbers: Iterable[int] = (), patience_seconds: float = _NO_SLOT_SECONDS) -> None:
        self._free = deque(numbers)
        self._known = set(self._free)
        self._patience_seconds = patience_seconds
        self._is_closed = False
        self._failure: PacelineError | None = None
        self._changed = threading.Condition()

    def add(self, number: int) -> None:
        """Let a slot join."""
        with self._changed:
            self._known.add(number)
            self._free.append(number)
            self._changed.notify()

    def remove(self, number: int) -> None:
        """Let a slot leave; `give_back` ignores it from now on."""
        with self._changed:
            self._known.discard(number)
            if number in self._free:
                self._free.remove(number)

    def take(self) -> int | None:
        """Wait for a slot without a run; None if the pool is closed.

        Raises:
            DeadlineError: for a long time there was no slot at all.
            PacelineError: the one that was given to `fail`.
        """
        expires = time.monotonic() + self._patience_seconds
        with self._changed:
            while not self._free and not self._is_closed:
                if self._failure is not None:
                    raise self._failure
                if self._known:
                    expires = time.monotonic() + self._patience_seconds
                elif time.monotonic() > expires:
                    raise DeadlineError(
                        f"no worker has joined the study for {self._patience_seconds:g} s",
                        next_step="start workers: paceline tune work HOST:PORT --token-file KEY; the same"
                        " command continues the study",
                    )
                self._changed.wait(_POLL_SECONDS)
            return None if self._is_closed else self._free.popleft()

    def give_back(self, number: int) -> None:
        """Return a slot whose run has ended."""
        with self._changed:
            if number in self._known:
                self._free.append(number)
                self._changed.notify()

    def fail(self, error: PacelineError) -> None:
        """Let `take` raise an error as soon as no slot is free: no other one will join."""
        with self._changed:
            self._failure = error
            self._changed.notify_all()

    def close(self) -> None:
        """Let no run begin any more."""
        with self._changed:
            self._is_closed = True
            self._changed.notify_all()


class WorkerSlot:
    """A slot of this machine, at the end of who uses it.

    Args:
        environ: variables of the slot; they name the fork server, if there is one.
    """

    def __init__(self, environ: Mapping[str, str]) -> None:
        self._environ = environ
        self._process: subprocess.Popen[str] | None = None
        self._stopping = False
        self._lock = threading.RLock()  # a signal handler may call `stop` in between

    @property
    def pid(self) -> int:
        """Process ID; 0 if it was not started yet."""
        return self._process.pid if self._process is not None else 0

    def run(self, request: SlotRequest, lease: int) -> RunEnd:
        """Run a request and wait for its end; a slot that dies is a run that was killed."""
        process = self._started()
        if process is None:
            return "stopped", ""
        self._write(process, json.dumps(asdict(request)))
        _, stdout = _pipes(process)
        # without a deadline: the launcher in the slot has those of the job
        answer = stdout.readline()
        if not answer.endswith("\n"):
            process.wait(_EXIT_SECONDS)
            return ("stopped", "") if self._stopping else ("killed", "its worker slot was killed")
        end, reason = json.loads(answer)
        return ("stopped", "") if self._stopping and end == "paused" else (end, reason)

    def renew(self) -> None:
        """Extend the lease of the run; see `SlotRequest.lease_seconds`."""
        process = self._process
        if process is not None:
            self._write(process, "")

    def kill(self) -> None:
        """Kill the process, and so its run."""
        process = self._process
        if process is not None:
            process.kill()

    def _write(self, process: subprocess.Popen[str], line: str) -> None:
        stdin, _ = _pipes(process)
        with self._lock, suppress(BrokenPipeError):
            stdin.write(line + "\n")
            stdin.flush()

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
    requests: SimpleQueue[SlotRequest | None] = SimpleQueue()
    threading.Thread(target=_read_requests, args=(requests,), daemon=True, name="slot-requests").start()
    while (request := requests.get()) is not None:
        end, reason = _launch(request, environ)
        sys.stdout.write(json.dumps([end, reason]) + "\n")
        sys.stdout.flush()


def _read_requests(requests: SimpleQueue[SlotRequest | None]) -> None:
    """Pass requests on; kill this process, and so its run, if the lease is not renewed in time."""
    received, seconds, renewed = b"", 0.0, time.monotonic()
    while True:
        wait_seconds = max(0.0, renewed + seconds - time.monotonic()) if seconds else None
        if not select.select([0], [], [], wait_seconds)[0]:
            os.kill(os.getpid(), signal.SIGKILL)
        data = os.read(0, _READ_BYTES)
        renewed = time.monotonic()
        if not data:
            requests.put(None)
            return
        *lines, received = (received + data).split(b"\n")
        for line in filter(None, lines):  # an empty line renews
            request = SlotRequest(**json.loads(line))
            seconds = request.lease_seconds
            requests.put(request)
