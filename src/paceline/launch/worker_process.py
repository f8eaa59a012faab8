"""Worker processes that cannot outlive the launcher, and that end together with their child processes.

Invariant: every worker leads its own session, and the reaper knows every session before the launcher does
anything else.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import select
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from types import TracebackType
from typing import IO, Self

from paceline.errors import PacelineError
from paceline.launch import reaper as reaper_script
from paceline.launch.fork_client import ForkClient, ForkedProcess
from paceline.launch.job_spec import WorkerSpec
from paceline.launch.reaper import kill_session

_PR_SET_PDEATHSIG = 1
_REAPER_EXIT_SECONDS = 5.0
_C = ctypes.CDLL(None)  # loaded before any fork


class SessionReaper:
    """A helper process that kills the sessions of the workers if the launcher dies without doing so."""

    def __enter__(self) -> Self:
        self._process = subprocess.Popen(
            [sys.executable, "-I", "-S", reaper_script.__file__],
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
            bufsize=0,
        )
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: object, traceback: TracebackType | None
    ) -> None:
        with contextlib.suppress(BrokenPipeError):
            self._send("=\n")  # the launcher removes its folders itself
        stdin = self._process.stdin
        if stdin is not None:
            stdin.close()
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(_REAPER_EXIT_SECONDS)
        self._process.kill()  # if a signal has stopped it
        self._process.wait()

    def watch(self, pid: int) -> None:
        """Kill session `pid` when the launcher dies."""
        # If the reaper was killed, workers still die with the launcher.
        with contextlib.suppress(BrokenPipeError):
            self._send(f"+{pid}\n")

    def remove_at_death(self, *folders: Path | None) -> None:
        """Remove folders when the launcher dies."""
        for folder in folders:
            if folder is not None:
                with contextlib.suppress(BrokenPipeError):
                    self._send(f"={folder}\n")

    def forget(self, pid: int) -> None:
        """Drop session `pid`, which has ended."""
        with contextlib.suppress(BrokenPipeError):
            self._send(f"-{pid}\n")

    def _send(self, line: str) -> None:
        stdin: IO[bytes] | None = self._process.stdin
        if stdin is not None:
            stdin.write(line.encode())


@dataclass
class WorkerProcess:
    """A worker that has been started.

    Args:
        ended_at: seconds since the epoch when its end was noticed; None: it runs.
        killed: the launcher killed it.
        was_signalled: the launcher had asked it to exit before its end was noticed.
        overdue: why the launcher killed it as stuck; empty if it did not.
    """

    spec: WorkerSpec
    process: subprocess.Popen[bytes] | ForkedProcess
    reaper: SessionReaper
    ended_at: float | None = None
    killed: bool = False
    was_signalled: bool = False
    overdue: str = ""

    @property
    def pid(self) -> int:
        """The process ID, which is the ID of its session as well."""
        return self.process.pid

    @property
    def forked(self) -> bool:
        """True if a fork server has started it."""
        return isinstance(self.process, ForkedProcess)

    @property
    def fork_server_died(self) -> bool:
        """True if it ended because its fork server did."""
        return isinstance(self.process, ForkedProcess) and self.process.fork_server_died

    def poll(self) -> bool:
        """Notice that it has ended, and kill the children that it left; returns True only the first time."""
        if self.ended_at is not None or self.process.poll() is None:
            return False
        self.ended_at = time.time()
        kill_session(self.pid)  # at once, before the system can reuse the ID
        self.reaper.forget(self.pid)
        return True

    def terminate(self) -> None:
        """Send it SIGTERM, but not its children, which it ends itself."""
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGTERM)

    def kill(self, seconds: float) -> None:
        """Kill it and everything in its session; wait at most `seconds` if the system cannot."""
        if self.ended_at is not None:
            return
        self.killed = True
        kill_session(self.pid)
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.process.wait(seconds)
        self.poll()


def wait_for_end(workers: Sequence[WorkerProcess], seconds: float) -> None:
    """Sleep until one of the workers ends, at most `seconds`."""
    if sys.platform != "linux":
        time.sleep(min(seconds, 0.02))
        return
    poll = select.poll()
    with contextlib.ExitStack() as opened:
        for worker in workers:
            if worker.ended_at is None:
                poll.register(_end_descriptor(worker, opened), select.POLLIN)
        poll.poll(seconds * 1000)


def _end_descriptor(worker: WorkerProcess, opened: contextlib.ExitStack) -> int:
    """Return an open file that becomes readable when the process has ended."""
    if isinstance(worker.process, ForkedProcess):
        return worker.process.report
    descriptor = os.pidfd_open(worker.pid)
    opened.callback(os.close, descriptor)
    return descriptor


def start_worker(spec: WorkerSpec, reaper: SessionReaper, forks: ForkClient) -> WorkerProcess:
    """Start one worker in its own session; it dies when the calling thread ends.

    Args:
        forks: a fork server, which is used if the result is the same as that of a new process.
    Raises:
        PacelineError: the command cannot be executed.
    """
    with contextlib.nullcontext() if spec.log_file is None else spec.log_file.open("ab") as log:
        output, errors = (1, 2) if log is None else (log.fileno(), log.fileno())
        process = forks.start(spec, output, errors) or _execute(spec, output, errors)
    reaper.watch(process.pid)
    return WorkerProcess(spec, process, reaper)


def _execute(spec: WorkerSpec, output: int, errors: int) -> subprocess.Popen[bytes]:
    try:
        return subprocess.Popen(
            spec.argv,
            env=dict(spec.environ),
            cwd=spec.directory,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=errors,
            pass_fds=tuple(spec.files.values()),
            start_new_session=True,
            preexec_fn=partial(die_with_parent, os.getpid()),  # noqa: PLW1509, one system call
        )
    except OSError as error:
        raise PacelineError(
            f"cannot start {spec.argv[0]!r}: {error.strerror}",
            where="the command to launch",
            next_step="check its path and that it is executable",
        ) from error


def die_with_parent(parent: int) -> None:
    """Ask Linux to kill this process when the thread that forked it ends; elsewhere do nothing.

    Args:
        parent: process ID of that thread; if it is gone already, this process exits now.
    """
    if sys.platform != "linux":
        return  # the reaper kills it there
    _C.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:
        os._exit(128 + signal.SIGKILL)
