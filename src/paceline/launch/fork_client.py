"""Workers that a fork server starts in milliseconds, since it has done their imports.

A fork server pays off when several jobs follow each other, as in a sweep, and when a job has as many workers
as the machine has cores, which would all import at the same time. The variable PACELINE_FORK_SERVER names
it, so that every command inside of `fork_server()` finds it; "none" disables it.

Invariant: a worker is forked only if it would be equal to a process that is started in the ordinary way.
"""

from __future__ import annotations

import json
import os
import select
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from types import TracebackType
from typing import Self

from paceline.job.cluster import process_environment
from paceline.launch import fork_protocol
from paceline.launch.fork_protocol import process_context
from paceline.launch.job_spec import WorkerSpec, common_environment
from paceline.launch.process_inspection import zombie_exit_status
from paceline.launch.stale_folders import FOLDER_PREFIX, mark_owner
from paceline.observe.process_info import is_stopped

FORK_SERVER_VARIABLE = "PACELINE_FORK_SERVER"
NO_FORK_SERVER = "none"
_SOCKET = "socket"
_MODULE = "paceline.launch.fork_server"
_COMMAND, _SCRIPT = "paceline", "paceline.launch"
_PID_FILE = "pid"
_ANSWER_SECONDS = 120.0  # the server may still import, from a cold disk or on a busy machine
_MESSAGE_SECONDS = 5.0  # for the rest of a message that has begun
_POLL_SECONDS = 0.1
_REPORT_SECONDS = 1.0  # after the end of a worker, until the server must have reported it


@contextmanager
def fork_server(
    modules: Sequence[str] = (), environ: Mapping[str, str] | None = None
) -> Iterator[dict[str, str]]:
    """Run a fork server during the block, unless one is running already.

    There is none off Linux, and none on machines with GPUs: a process cannot use CUDA if its parent had
    initialised it, and imports are not guaranteed not to.

    Args:
        modules: modules to import in addition to those that every worker uses.
        environ: the variables that workers inherit; None: those of this process.
    Yields:
        The variables with which `launch` finds it; empty if there is none.
    """
    inherited = process_environment() if environ is None else environ
    if FORK_SERVER_VARIABLE in inherited or sys.platform != "linux" or Path("/dev/nvidiactl").exists():
        yield {}
        return
    with tempfile.TemporaryDirectory(prefix=FOLDER_PREFIX) as folder:
        mark_owner(Path(folder))
        with socket.socket(socket.AF_UNIX) as listener:
            listener.bind(str(Path(folder) / _SOCKET))
            listener.listen()
            server = subprocess.Popen(
                _command(folder, listener, modules),
                # One thread: those that libraries start while they are imported would not survive a fork.
                env={**common_environment(inherited), "OMP_NUM_THREADS": "1"},
                stdin=subprocess.PIPE,
                pass_fds=[listener.fileno()],
                start_new_session=True,
            )
        (Path(folder) / _PID_FILE).write_text(str(server.pid))
        with server:
            try:
                yield {FORK_SERVER_VARIABLE: folder}
            finally:
                server.kill()  # it has no state; the processes that it forked end with their launchers


def _command(folder: str, listener: socket.socket, modules: Sequence[str]) -> list[str]:
    return [sys.executable, "-m", _MODULE, folder, str(listener.fileno()), str(os.getpid()), *modules]


def is_worthwhile(workers: Sequence[WorkerSpec], cores: int) -> bool:
    """Return whether a job starts faster with its own fork server.

    That is the case only for commands of Paceline: a user's script can set variables before it imports
        PyTorch.
    """
    # With fewer workers than cores the imports run side by side, and the server would add its own.
    return len(workers) >= max(2, cores) and _module_of(workers[0]) == _COMMAND


def _module_of(worker: WorkerSpec) -> str:
    return worker.argv[2] if worker.argv[:2] == (sys.executable, "-m") else ""


WaitForAnswer = Callable[[socket.socket], None]


class ForkedProcess:
    """A worker that a fork server has started, with the interface of `subprocess.Popen`.

    Args:
        pid: its process ID.
        report: an open pipe on which the server reports its exit code. A server that is stopped reports
            nothing; then /proc is read.
    Attributes:
        fork_server_died: the server died, and the worker with it.
    """

    def __init__(self, pid: int, report: int) -> None:
        self.pid = pid
        self.returncode: int | None = None
        self.report = report
        self.fork_server_died = False
        self._ended_at: float | None = None

    def poll(self) -> int | None:
        """Return the exit code; None while it runs."""
        if self.returncode is not None:
            return self.returncode
        if select.select([self.report], [], [], 0)[0]:
            code = os.read(self.report, 16)
            os.close(self.report)
            self.fork_server_died = not code
            self.returncode = int(code) if code else -signal.SIGKILL
        else:
            self._poll_system()
        return self.returncode

    def _poll_system(self) -> None:
        # a stopped server does not wait for its children, so a worker that has ended stays a zombie
        status = zombie_exit_status(self.pid)
        if status is None:
            return
        self._ended_at = self._ended_at or time.monotonic()
        if time.monotonic() > self._ended_at + _REPORT_SECONDS:
            os.close(self.report)
            self.returncode = os.waitstatus_to_exitcode(status)

    def wait(self, timeout: float) -> int:
        """Wait until it has ended; returns the exit code.

        Raises:
            subprocess.TimeoutExpired: it still runs after `timeout` seconds.
        """
        expires = time.monotonic() + timeout
        while self.poll() is None:
            remaining = expires - time.monotonic()
            if remaining <= 0:
                raise subprocess.TimeoutExpired("a worker", timeout)
            select.select([self.report], [], [], min(remaining, _POLL_SECONDS))
        return self.returncode or 0

    def send_signal(self, number: int) -> None:
        """Send a signal, if it still runs."""
        if self.poll() is None:
            with suppress(ProcessLookupError):
                os.kill(self.pid, number)


class ForkClient:
    """A launcher's connection to the fork server, opened for the first worker that could be forked.

    Args:
        environ: the variables that workers inherit; they name the server, if there is one.
        stop_requested: returns whether the launcher should stop, and thus not wait for the server any longer.
    Attributes:
        lost: the server did not answer; the workers that it had forked end with it.
    """

    def __init__(
        self, environ: Mapping[str, str], stop_requested: Callable[[], bool] = lambda: False
    ) -> None:
        folder = environ.get(FORK_SERVER_VARIABLE, NO_FORK_SERVER)
        self._folder = folder if folder != NO_FORK_SERVER and sys.platform == "linux" else ""
        self._connection: socket.socket | None = None
        self._server_context: dict[str, str] = {}
        self._stop_requested, self._server_pid = stop_requested, 0
        self.lost = False

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: object, traceback: TracebackType | None
    ) -> None:
        self._leave()

    def start(self, worker: WorkerSpec, output: int, errors: int) -> ForkedProcess | None:
        """Fork a worker in its own session; None if it has to be started in the ordinary way.

        Args:
            output, errors: open files for its standard output and standard error.
        """
        if not self._folder or _module_of(worker) not in (_COMMAND, _SCRIPT):
            return None
        try:
            connection = self._connection or self._connect()
            if self._server_context == process_context(worker.environ):
                return _request_fork(connection, worker, [output, errors], self._wait_for_answer)
        except (OSError, EOFError, ValueError, TypeError):  # it is gone, does not answer, or sends garbage
            self._leave()
            self.lost = True
        return None

    def _connect(self) -> socket.socket:
        self._connection = connection = socket.socket(socket.AF_UNIX)
        connection.settimeout(_MESSAGE_SECONDS)
        connection.connect(str(Path(self._folder) / _SOCKET))
        self._server_pid = int((Path(self._folder) / _PID_FILE).read_text())  # until its child sends its own
        self._wait_for_answer(connection)
        (self._server_context, self._server_pid), _ = fork_protocol.expect_message(connection)
        return connection

    def _wait_for_answer(self, connection: socket.socket) -> None:
        """Wait until the server has sent something.

        Raises:
            TimeoutError: the server is stopped or takes too long, or the launcher should stop.
        """
        expires = time.monotonic() + _ANSWER_SECONDS
        while not select.select([connection], [], [], _POLL_SECONDS)[0]:
            if is_stopped(self._server_pid) or self._stop_requested() or time.monotonic() > expires:
                raise TimeoutError("the fork server does not answer")

    def _leave(self) -> None:
        self._folder = ""
        if self._connection is not None:
            self._connection.close()
            if self._server_context and is_stopped(self._server_pid):  # a stopped server would never notice
                with suppress(ProcessLookupError):
                    os.kill(self._server_pid, signal.SIGKILL)


def _request_fork(
    connection: socket.socket, worker: WorkerSpec, output: Sequence[int], wait_for_answer: WaitForAnswer
) -> ForkedProcess:
    """Request a worker from the server, with a pipe on which the server reports its exit code."""
    with ExitStack() as opened:
        report, far_end = os.pipe()
        opened.callback(os.close, report)
        files = [*output, far_end, *worker.files.values()]
        try:
            directory = str(worker.directory or Path.cwd())
            fork_protocol.send_message(
                connection, [worker.argv[2:], dict(worker.environ), directory, [*worker.files]], files
            )
        finally:
            # The server has a copy; with ours open, the end of the server would not be seen.
            os.close(far_end)
        wait_for_answer(connection)
        pid, _ = fork_protocol.expect_message(connection)
        opened.pop_all()
    return ForkedProcess(pid, report)


def serve_until_input_ends() -> None:
    """Run a fork server until standard input ends; print the variables that name it, as JSON."""
    inherited = {name: text for name, text in process_environment().items() if name != FORK_SERVER_VARIABLE}
    with fork_server((), inherited) as variables:
        sys.stdout.write(json.dumps(variables or {FORK_SERVER_VARIABLE: NO_FORK_SERVER}) + "\n")
        sys.stdout.flush()
        sys.stdin.read()
