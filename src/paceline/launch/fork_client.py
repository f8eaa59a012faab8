"""Workers that a fork server starts: in milliseconds, because it has imported for them.

A fork server pays for itself where several jobs follow each other, as in a sweep, and where a job has as many
workers as the machine has cores: they would all import, and wait for each other. It is named by the variable
PACELINE_FORK_SERVER, so that every command inside of `fork_server()` finds it; "none" asks for none.

Invariant: a worker is forked only if it would be the same as one that is started anew; else there is none.
"""

from __future__ import annotations

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
from paceline.launch.process_inspection import is_stopped, zombie_exit_status
from paceline.launch.stale_folders import FOLDER_PREFIX, mark_owner

FORK_SERVER_VARIABLE = "PACELINE_FORK_SERVER"
NO_FORK_SERVER = "none"
_SOCKET = "socket"
_MODULE = "paceline.launch.fork_server"
_COMMAND, _SCRIPT = "paceline", "paceline.launch"
_PID_FILE = "pid"
_ANSWER_SECONDS = 120.0  # it may still be importing, from a cold disk or on a busy machine
_MESSAGE_SECONDS = 5.0  # once it has begun to speak
_POLL_SECONDS = 0.1
_REPORT_SECONDS = 1.0  # from a worker's end until the server must have reported it


@contextmanager
def fork_server(
    modules: Sequence[str] = (), environ: Mapping[str, str] | None = None
) -> Iterator[dict[str, str]]:
    """Keep a fork server, unless there is one; off Linux, and where there are GPUs, there is none.

    A process cannot use CUDA if the one that forked it has begun to; that no import does is not proven.

    Args:
        modules: what it imports beside what every worker uses.
        environ: what workers inherit; None: the variables of this process.
    Yields:
        The variables by which `launch` finds it.
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
                server.kill()  # it holds nothing; what it has forked ends with the launchers


def _command(folder: str, listener: socket.socket, modules: Sequence[str]) -> list[str]:
    return [sys.executable, "-m", _MODULE, folder, str(listener.fileno()), str(os.getpid()), *modules]


def is_worthwhile(workers: Sequence[WorkerSpec], cores: int) -> bool:
    """Whether a job is started sooner with a fork server of its own.

    Only for commands of Paceline: a user's script may set variables before it imports PyTorch.
    """
    return len(workers) >= max(2, cores) and _module_of(workers[0]) == _COMMAND


def _module_of(worker: WorkerSpec) -> str:
    return worker.argv[2] if worker.argv[:2] == (sys.executable, "-m") else ""


WaitForAnswer = Callable[[socket.socket], None]


class ForkedProcess:
    """A worker that a fork server has started; it is used as a `subprocess.Popen` is.

    Args:
        pid: its number.
        report: the open file at which the server reports its end. A server that is stopped reports nothing;
            then the system is asked.
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
        """The exit code; None while it runs."""
        if self.returncode is not None:
            return self.returncode
        if select.select([self.report], [], [], 0)[0]:
            said = os.read(self.report, 16)
            os.close(self.report)
            self.fork_server_died = not said
            self.returncode = int(said) if said else -signal.SIGKILL
        else:
            self._poll_system()
        return self.returncode

    def _poll_system(self) -> None:
        """Take the exit code of a process that ended a while ago, and that nobody has waited for."""
        status = zombie_exit_status(self.pid)
        if status is None:
            return
        self._ended_at = self._ended_at or time.monotonic()
        if time.monotonic() > self._ended_at + _REPORT_SECONDS:
            os.close(self.report)
            self.returncode = os.waitstatus_to_exitcode(status)

    def wait(self, timeout: float) -> int:
        """Wait for its end.

        Raises:
            subprocess.TimeoutExpired: it still runs.
        """
        expires = time.monotonic() + timeout
        while self.poll() is None:
            left = expires - time.monotonic()
            if left <= 0:
                raise subprocess.TimeoutExpired("a worker", timeout)
            select.select([self.report], [], [], min(left, _POLL_SECONDS))
        return self.returncode or 0

    def send_signal(self, number: int) -> None:
        """Send a signal, if it still runs."""
        if self.poll() is None:
            with suppress(ProcessLookupError):
                os.kill(self.pid, number)


class ForkClient:
    """A launcher's connection to the fork server, made when the first worker could come from it.

    Args:
        environ: the variables that workers inherit; they name the server, if there is one.
        stop_requested: whether the launcher is to stop; then nobody waits for the server any more.
    Attributes:
        lost: it did not answer; whom it had forked before ends with it.
    """

    def __init__(
        self, environ: Mapping[str, str], stop_requested: Callable[[], bool] = lambda: False
    ) -> None:
        named = (
            environ.get(FORK_SERVER_VARIABLE, NO_FORK_SERVER) if sys.platform == "linux" else NO_FORK_SERVER
        )
        self._folder = "" if named == NO_FORK_SERVER else named
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
        """Fork a worker in a session of its own; None if it has to be started anew.

        Args:
            output, errors: open files for its standard output and standard error.
        """
        if not self._folder or _module_of(worker) not in (_COMMAND, _SCRIPT):
            return None
        try:
            connection = self._connection or self._meet()
            if self._server_context == process_context(worker.environ):
                return _request_fork(connection, worker, [output, errors], self._await)
        except (OSError, EOFError, ValueError, TypeError):  # it is gone, does not answer, or says nonsense
            self._leave()
            self.lost = True
        return None

    def _meet(self) -> socket.socket:
        self._connection = connection = socket.socket(socket.AF_UNIX)
        connection.settimeout(_MESSAGE_SECONDS)
        connection.connect(str(Path(self._folder) / _SOCKET))
        self._server_pid = int((Path(self._folder) / _PID_FILE).read_text())  # until its child answers
        self._await(connection)
        (self._server_context, self._server_pid), _ = fork_protocol.expect_message(connection)
        return connection

    def _await(self, connection: socket.socket) -> None:
        """Wait until the server says something.

        Raises:
            OSError: it is stopped, it takes too long, or nobody wants to know any more.
        """
        expires = time.monotonic() + _ANSWER_SECONDS
        while not select.select([connection], [], [], _POLL_SECONDS)[0]:
            if is_stopped(self._server_pid) or self._stop_requested() or time.monotonic() > expires:
                raise TimeoutError("the fork server does not answer")

    def _leave(self) -> None:
        self._folder = ""
        if self._connection is not None:
            self._connection.close()
            if self._server_context and is_stopped(self._server_pid):  # it would never notice
                with suppress(ProcessLookupError):
                    os.kill(self._server_pid, signal.SIGKILL)


def _request_fork(
    connection: socket.socket, worker: WorkerSpec, output: Sequence[int], wait_for_answer: WaitForAnswer
) -> ForkedProcess:
    """Have a worker forked, and take the end of the pipe at which its end is reported."""
    with ExitStack() as opened:
        report, far_end = os.pipe()
        opened.callback(os.close, report)
        files = [*output, far_end, *worker.files.values()]
        try:
            place = str(worker.directory or Path.cwd())
            fork_protocol.send_message(
                connection, [worker.argv[2:], dict(worker.environ), place, [*worker.files]], files
            )
        finally:
            os.close(far_end)
        wait_for_answer(connection)
        pid, _ = fork_protocol.expect_message(connection)
        opened.pop_all()
    return ForkedProcess(pid, report)
