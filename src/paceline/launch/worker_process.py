"""Worker processes: start them so that they cannot outlive the launcher, and end them with their children.

Invariant: every worker leads a session of its own, and every session is known to the keeper before the
launcher does anything else.
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
from paceline.launch import reaper as keeper_script
from paceline.launch.fork_client import ForkClient, ForkedProcess
from paceline.launch.job_spec import WorkerSpec
from paceline.launch.reaper import kill_session

_PR_SET_PDEATHSIG = 1
_REAPER_EXIT_SECONDS = 5.0
_C = ctypes.CDLL(None)  # loaded before a fork, not after it


class SessionReaper:
    """The process that kills the workers' sessions if this one dies without doing so."""

    def __enter__(self) -> Self:
        self._process = subprocess.Popen(
            [sys.executable, "-I", "-S", keeper_script.__file__],
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
            self._send("=\n")  # this launcher removes its folders itself
        stdin = self._process.stdin
        if stdin is not None:
            stdin.close()
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(_REAPER_EXIT_SECONDS)
        self._process.kill()  # if a signal has stopped it
        self._process.wait()

    def watch(self, pid: int) -> None:
        """Kill session `pid` when the launcher dies."""
        with contextlib.suppress(BrokenPipeError):  # the keeper was killed: workers die with this process too
            self._send(f"+{pid}\n")

    def remove_at_death(self, *folders: Path | None) -> None:
        """Remove folders when the launcher dies."""
        for folder in folders:
            if folder is not None:
                with contextlib.suppress(BrokenPipeError):
                    self._send(f"={folder}\n")

    def forget(self, pid: int) -> None:
        """Session `pid` is over."""
        with contextlib.suppress(BrokenPipeError):  # if the keeper was killed, there is nobody to forget
            self._send(f"-{pid}\n")

    def _send(self, line: str) -> None:
        stdin: IO[bytes] | None = self._process.stdin
        if stdin is not None:
            stdin.write(line.encode())


@dataclass
class WorkerProcess:
    """A worker and its process.

    Args:
        ended_at: seconds since the epoch when it was seen to have ended; None: it runs.
        killed: the launcher killed it.
        told: the launcher had told it to end before it was seen to have ended.
        overdue: why the launcher gave it up; empty if it did not.
    """

    worker: WorkerSpec
    process: subprocess.Popen[bytes] | ForkedProcess
    keeper: SessionReaper
    ended_at: float | None = None
    killed: bool = False
    told: bool = False
    overdue: str = ""

    @property
    def pid(self) -> int:
        """Process and session."""
        return self.process.pid

    @property
    def forked(self) -> bool:
        """Whether a fork server has started it."""
        return isinstance(self.process, ForkedProcess)

    @property
    def fork_server_died(self) -> bool:
        """Whether it ended because the fork server that started it did."""
        return isinstance(self.process, ForkedProcess) and self.process.fork_server_died

    def poll(self) -> bool:
        """Notice the end, and end the children that it left; True the first time."""
        if self.ended_at is not None or self.process.poll() is None:
            return False
        self.ended_at = time.time()
        kill_session(self.pid)  # at once, before the number can belong to another
        self.keeper.forget(self.pid)
        return True

    def terminate(self) -> None:
        """Ask it to end; its children are its own business."""
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGTERM)

    def kill(self, seconds: float) -> None:
        """End it with everything in its session; wait at most `seconds` if the system cannot end it."""
        if self.ended_at is not None:
            return
        self.killed = True
        kill_session(self.pid)
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.process.wait(seconds)
        self.poll()


def wait_for_end(running: Sequence[WorkerProcess], seconds: float) -> None:
    """Sleep until one of the processes ends, at most `seconds`."""
    if sys.platform != "linux":
        time.sleep(min(seconds, 0.02))
        return
    poll = select.poll()
    with contextlib.ExitStack() as opened:
        for one in running:
            if one.ended_at is None:
                poll.register(_end_descriptor(one, opened), select.POLLIN)
        poll.poll(seconds * 1000)


def _end_descriptor(one: WorkerProcess, opened: contextlib.ExitStack) -> int:
    """An open file that can be read when the process has ended."""
    if isinstance(one.process, ForkedProcess):
        return one.process.report
    handle = os.pidfd_open(one.pid)
    opened.callback(os.close, handle)
    return handle


def start_worker(worker: WorkerSpec, keeper: SessionReaper, forks: ForkClient) -> WorkerProcess:
    """Start one worker in a session of its own; it dies when the thread that calls this ends.

    Args:
        forks: forks it where that makes no difference but in time.
    Raises:
        PacelineError: the command cannot be executed.
    """
    with contextlib.nullcontext() if worker.log_file is None else worker.log_file.open("ab") as log:
        output, errors = (1, 2) if log is None else (log.fileno(), log.fileno())
        process = forks.start(worker, output, errors) or _execute(worker, output, errors)
    keeper.watch(process.pid)
    return WorkerProcess(worker, process, keeper)


def _execute(worker: WorkerSpec, output: int, errors: int) -> subprocess.Popen[bytes]:
    try:
        return subprocess.Popen(
            worker.argv,
            env=dict(worker.environ),
            cwd=worker.directory,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=errors,
            pass_fds=tuple(worker.files.values()),
            start_new_session=True,
            preexec_fn=partial(die_with_parent, os.getpid()),  # noqa: PLW1509, one system call
        )
    except OSError as error:
        raise PacelineError(
            f"Cannot start {worker.argv[0]!r}: {error.strerror}.",
            where="the command to launch",
            next_step="check its path and that it may be executed",
        ) from error


def die_with_parent(parent: int) -> None:
    """Let the system kill this process when the thread that forked it ends; nothing happens off Linux.

    Args:
        parent: the process of that thread; if it is gone already, this one ends now.
    """
    if sys.platform != "linux":
        return  # the keeper does it there
    _C.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:
        os._exit(128 + signal.SIGKILL)
