"""`python -m paceline.launch.fork_server FOLDER SOCKET PARENT MODULE...` forks workers that need no imports.

The server imports the modules that workers use. Then it serves the listening SOCKET, an inherited open file
whose name is in FOLDER, until its standard input ends. Every launcher that connects gets its own process,
which forks the workers that the launcher requests and reports how they ended.

Invariants: nothing of a job outlives its launcher, whichever process dies; the launcher's process here ends
with the connection, and the workers die with that process. A forked command ends as Python would end it:
threads are waited for, `atexit` functions run, and all files are flushed.
"""

from __future__ import annotations

import atexit
import ctypes
import gc
import io
import os
import runpy
import select
import shutil
import signal
import socket
import struct
import sys
import tempfile
import threading
import warnings
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import Any

from paceline.job.cluster import change_environment, process_environment
from paceline.launch import fork_protocol
from paceline.launch.fork_protocol import process_context
from paceline.launch.fork_server_preload import import_modules
from paceline.launch.worker_process import die_with_parent

_C = ctypes.CDLL(None)  # loaded before any fork
_PLAIN_FILE_TYPES = (io.BufferedReader, io.BufferedWriter, io.BufferedRandom, io.BytesIO)


def run_module_and_exit(module: str) -> None:
    """Run a module as `python -m` does, and exit without the clean-up of the interpreter.

    Python clears every module when it exits. In a forked process each object that is touched copies a page:
    0.36 s of CPU time for all that the server has imported, 0.06 s without. `multiprocessing` exits in the
    same way.
    """
    code = 0
    try:
        runpy.run_module(module, run_name="__main__", alter_sys=True)
    except SystemExit as end:
        if not isinstance(end.code, int | None):
            raise  # a message, which Python prints
        code = end.code or 0
    vars(threading)["_shutdown"]()
    atexit._run_exitfuncs()
    try:
        sys.stdout.flush()
        sys.stderr.flush()
    except OSError:
        sys.exit(code)  # standard output is closed: Python prints the error
    _close_files()
    _C.fflush(None)
    os._exit(code & 0xFF)


def _close_files() -> None:
    """Flush all files that are still open, the wrappers before the files that they wrap."""
    objects = gc.get_objects()
    # by type: isinstance on every object would be slow, and would run code of lazy proxies
    kinds = {kind for kind in set(map(type, objects)) if issubclass(kind, io.IOBase)}
    files = [file for file in objects if type(file) in kinds]
    standard = {id(file) for file in (sys.stdin, sys.stdout, sys.stderr)}
    texts = [file for file in files if isinstance(file, io.TextIOWrapper) and id(file) not in standard]
    wrappers = [
        file for file in files if isinstance(file, io.BufferedIOBase) and type(file) not in _PLAIN_FILE_TYPES
    ]
    for file in (*texts, *wrappers):
        with suppress(Exception):
            file.close()
    for file in files:
        with suppress(Exception):
            file.flush()


_COMMAND = "paceline"
_NAME_BYTES = 15
_OUTPUTS = 3
_CREDENTIALS = struct.Struct("3i")  # process, user and group of the other end


@dataclass(frozen=True)
class ForkRequest:
    """A launcher's request for one worker, with the open files that come with the message.

    Args:
        argv: the module and its arguments, as after `python -m`.
        environ: the whole environment.
        directory: its working directory.
        output, errors: standard output and standard error.
        report: pipe for its exit status when it has ended; the worker itself closes it.
        inherited: files that the worker inherits, by the variable that holds their number.
    """

    argv: list[str]
    environ: dict[str, str]
    directory: str
    output: int
    errors: int
    report: int
    inherited: Mapping[str, int]

    @classmethod
    def read(cls, value: Any, files: list[int]) -> ForkRequest | None:
        """Decode a message; None if it is not a valid request."""
        match value:
            case [[str(), *_] as argv, dict() as environ, str(directory), list() as names] if len(
                files
            ) == _OUTPUTS + len(names):
                texts = [*argv, *environ, *environ.values(), directory, *names]
                if all(isinstance(text, str) and "\0" not in text for text in texts):
                    inherited = dict(zip(names, files[_OUTPUTS:], strict=True))
                    output, errors, report = files[:_OUTPUTS]
                    return cls(argv, environ, directory, output, errors, report, inherited)
        return None


def main(folder: Path, listener_fd: int, modules: list[str]) -> None:
    """Serve; in a forked worker, run the command that was requested."""
    context = process_context(process_environment())
    with socket.socket(fileno=listener_fd) as listener:
        import_modules(modules)
        connection = _accept(listener)
    if connection is None:
        shutil.rmtree(folder, ignore_errors=True)  # the process that should remove it is gone
        return
    request = None
    with suppress(ConnectionError):  # the launcher died while an answer was sent
        request = _LauncherConnection(connection).run(context)
    if request is None:
        os._exit(0)  # at once: there is nothing to clean up
    _assume_identity(request)
    if request.argv[0] == _COMMAND:
        run_module_and_exit(_COMMAND)
    else:  # a user's script may rely on the clean-up of the interpreter
        runpy.run_module(request.argv[0], run_name="__main__", alter_sys=True)


def _accept(listener: socket.socket) -> socket.socket | None:
    """Wait for launchers; returns the connection in the process forked for a launcher, None in the server."""
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # the kernel then reaps processes that have ended
    poll = select.poll()
    poll.register(listener, select.POLLIN)
    # Standard input is a pipe that ends with the process that started the server.
    poll.register(0, select.POLLIN)
    while not any(descriptor == 0 for descriptor, _ in poll.poll()):
        connection, _ = listener.accept()
        if not _is_same_user(connection):
            connection.close()
        elif _fork() == 0:
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)
            return connection
        connection.close()
    return None


def _is_same_user(connection: socket.socket) -> bool:
    """Return whether the process at the other end belongs to the same user."""
    size = _CREDENTIALS.size
    raw = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, size)
    return bool(_CREDENTIALS.unpack(raw)[1] == os.getuid())


class _LauncherConnection:
    """The connection to one launcher, and the workers that were forked for it."""

    def __init__(self, connection: socket.socket) -> None:
        self._connection = connection
        self._poll = select.poll()
        self._poll.register(connection, select.POLLIN)
        self._workers: dict[int, tuple[int, int]] = {}  # by pidfd: process ID and report pipe

    def run(self, context: dict[str, str]) -> ForkRequest | None:
        """Fork workers until the launcher is gone; returns the request in a worker, else None."""
        fork_protocol.send_message(self._connection, [context, os.getpid()])
        while True:
            for descriptor, _ in self._poll.poll():
                if descriptor in self._workers:
                    self._report(descriptor)
                    continue
                message = fork_protocol.receive_message(self._connection)
                if message is None:
                    return None
                request = ForkRequest.read(*message)
                if request is None:
                    return None
                if self._fork(request):
                    return request

    def _fork(self, request: ForkRequest) -> bool:
        """Fork a worker; returns True in the worker, which closes all files of the server."""
        server, pid = os.getpid(), _fork()
        if pid == 0:
            os.setsid()
            die_with_parent(server)
            reports = [report for _, report in self._workers.values()]
            _close(self._connection.detach(), request.report, *self._workers, *reports)
            return True
        _close(request.output, request.errors, *request.inherited.values())
        fork_protocol.send_message(self._connection, pid)
        descriptor = os.pidfd_open(pid)
        self._workers[descriptor] = (pid, request.report)
        self._poll.register(descriptor, select.POLLIN)
        return False

    def _report(self, descriptor: int) -> None:
        """Send the exit code of a worker to the launcher, in the convention of `subprocess`."""
        pid, report = self._workers.pop(descriptor)
        self._poll.unregister(descriptor)
        _, status = os.waitpid(pid, 0)
        with suppress(BrokenPipeError):  # the launcher is gone; that is noticed next
            os.write(report, str(os.waitstatus_to_exitcode(status)).encode())
        _close(descriptor, report)


def _assume_identity(request: ForkRequest) -> None:
    """Set up files, environment, folder and arguments as in a process that the launcher starts itself."""
    for file, target in ((os.open(os.devnull, os.O_RDONLY), 0), (request.output, 1), (request.errors, 2)):
        os.dup2(file, target)
        os.close(file)
    inherited = {name: str(file) for name, file in request.inherited.items()}
    change_environment({**dict.fromkeys(process_environment()), **request.environ, **inherited})
    os.chdir(request.directory)
    if not sys.flags.safe_path:
        sys.path[0] = request.directory
    sys.argv = ["-m", *request.argv[1:]]
    rank = request.environ.get("RANK")
    _name_process(_COMMAND if rank is None else f"rank {rank}")
    _reset_libraries(request.environ)


def _name_process(name: str) -> None:
    Path("/proc/self/comm").write_text(name[:_NAME_BYTES])


def _reset_libraries(environ: dict[str, str]) -> None:
    """Repeat what libraries do at import time and every process must do for itself."""
    tempfile.tempdir = None  # found again from the variables of this process
    site: Any = import_module("site")  # by name: for mypy, tools/site.py would be this module
    site.USER_BASE = site.USER_SITE = None
    site.getusersitepackages()  # sets both, below the HOME of this process
    numpy, torch = sys.modules.get("numpy"), sys.modules.get("torch")
    if numpy is not None:
        numpy.random.seed()  # the global generator; that of `random` is reseeded after a fork by Python
    if torch is not None:
        torch.set_num_threads(int(environ.get("OMP_NUM_THREADS", len(os.sched_getaffinity(0)))))


def _fork() -> int:
    with warnings.catch_warnings():
        # Python warns about other threads; they are those of OpenBLAS, which handles forks itself
        warnings.simplefilter("ignore", DeprecationWarning)
        return os.fork()


def _close(*files: int) -> None:
    for file in files:
        os.close(file)


if __name__ == "__main__":
    die_with_parent(int(sys.argv[3]))  # at once, so that it also works during the imports
    main(Path(sys.argv[1]), int(sys.argv[2]), sys.argv[4:])
