"""How a forked command ends: as Python ends it, without taking apart what it shares with its server.

Python clears every module at its end. In a forked process each object that is touched is a page that is
copied: 0.36 s of the processor for all that a fork server has imported, and 0.06 s without. Processes of
`multiprocessing` end like this, too.

Invariant: threads are waited for, what `atexit` knows is run, and no file lacks what was written to it.

`python -m paceline.launch.fork_server FOLDER SOCKET PARENT MODULE...` forks workers, which do not import.

It imports what workers use, then serves the listening SOCKET, an open file that it inherits and whose name is
in FOLDER, until its standard input ends. Every launcher that connects gets a process of its own, which forks
what the launcher orders, and reports how it ended.

Invariant: whoever dies, nothing of a launcher's job outlives the launcher: its process ends when the
connection does, and the workers die with that process.
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
from pathlib import Path
from typing import Any

from paceline.job.cluster import change_environment, process_environment
from paceline.launch import fork_protocol
from paceline.launch.fork_protocol import process_context
from paceline.launch.fork_server_preload import import_modules
from paceline.launch.worker_process import die_with_parent

_C = ctypes.CDLL(None)  # loaded before a fork, not after it
_PLAIN_FILE_TYPES = (io.BufferedReader, io.BufferedWriter, io.BufferedRandom, io.BytesIO)


def run_module_and_exit(module: str) -> None:
    """Run a module as `python -m` does, and end this process; raises where Python has to end it."""
    code = 0
    try:
        runpy.run_module(module, run_name="__main__", alter_sys=True)
    except SystemExit as end:
        if not isinstance(end.code, int | None):
            raise  # it has a text to show
        code = end.code or 0
    vars(threading)["_shutdown"]()
    atexit._run_exitfuncs()
    try:
        sys.stdout.flush()
        sys.stderr.flush()
    except OSError:
        sys.exit(code)  # nobody can read it: Python says so
    _close_files()
    _C.fflush(None)
    os._exit(code & 0xFF)


def _close_files() -> None:
    """Files that are still open get what was written to them; those around others come first."""
    objects = gc.get_objects()
    kinds = {kind for kind in set(map(type, objects)) if issubclass(kind, io.IOBase)}
    found = [one for one in objects if type(one) in kinds]
    standard = {id(one) for one in (sys.stdin, sys.stdout, sys.stderr)}
    texts = [one for one in found if isinstance(one, io.TextIOWrapper) and id(one) not in standard]
    others = [
        one for one in found if isinstance(one, io.BufferedIOBase) and type(one) not in _PLAIN_FILE_TYPES
    ]
    for one in (*texts, *others):
        with suppress(Exception):
            one.close()
    for one in found:
        with suppress(Exception):
            one.flush()


_COMMAND = "paceline"
_NAME_BYTES = 15
_OUTPUTS = 3
_CREDENTIALS = struct.Struct("3i")  # process, user and group of the other end


@dataclass(frozen=True)
class ForkRequest:
    """A worker that a launcher wants: what it runs, and the open files that come with the message.

    Args:
        argv: the module and its arguments, as after `python -m`.
        environ: the whole environment.
        directory: where it runs.
        output, errors: standard output and standard error.
        report: where its exit status is written when it has ended; the worker itself does not hold it.
        inherited: files that the worker inherits, by the variable that tells it their number.
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
        """What a message orders; None if it is no order."""
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


def main(folder: Path, handle: int, modules: list[str]) -> None:
    """Serve; in a worker, run what it is for."""
    here = process_context(process_environment())
    with socket.socket(fileno=handle) as listener:
        import_modules(modules)
        connection = _accept(listener)
    if connection is None:
        shutil.rmtree(folder, ignore_errors=True)  # who should remove it is gone
        return
    order = None
    with suppress(ConnectionError):  # the launcher died while it was being answered
        order = _LauncherConnection(connection).run(here)
    if order is None:
        os._exit(0)  # at once: there is nothing to tidy up
    _assume_identity(order)
    if order.argv[0] == _COMMAND:
        run_module_and_exit(_COMMAND)
    else:  # a user's script may leave more to Python
        runpy.run_module(order.argv[0], run_name="__main__", alter_sys=True)


def _accept(listener: socket.socket) -> socket.socket | None:
    """Wait for launchers; returns their connection in the process that is theirs, None in the server."""
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # the system forgets the processes that have ended
    poll = select.poll()
    poll.register(listener, select.POLLIN)
    poll.register(0, select.POLLIN)
    while not any(handle == 0 for handle, _ in poll.poll()):
        connection, _ = listener.accept()
        if not _is_same_user(connection):
            connection.close()
        elif _fork() == 0:
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)
            return connection
        connection.close()
    return None


def _is_same_user(connection: socket.socket) -> bool:
    """Whether a process of the same user is at the other end."""
    size = _CREDENTIALS.size
    raw = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, size)
    return bool(_CREDENTIALS.unpack(raw)[1] == os.getuid())


class _LauncherConnection:
    """What this process does for its launcher.

    Args:
        connection: to the launcher.
    """

    def __init__(self, connection: socket.socket) -> None:
        self._connection = connection
        self._poll = select.poll()
        self._poll.register(connection, select.POLLIN)
        self._workers: dict[int, tuple[int, int]] = {}  # by handle: its number, and where its end is reported

    def run(self, here: dict[str, str]) -> ForkRequest | None:
        """Fork what is ordered until the launcher is gone; returns the order in a worker, else None."""
        fork_protocol.send_message(self._connection, [here, os.getpid()])
        while True:
            for handle, _ in self._poll.poll():
                if handle in self._workers:
                    self._report(handle)
                    continue
                message = fork_protocol.receive_message(self._connection)
                if message is None:
                    return None
                order = ForkRequest.read(*message)
                if order is None:
                    return None
                if self._fork(order):
                    return order

    def _fork(self, order: ForkRequest) -> bool:
        """True in the worker, which keeps nothing of the server's."""
        server, pid = os.getpid(), _fork()
        if pid == 0:
            os.setsid()
            die_with_parent(server)
            reports = [report for _, report in self._workers.values()]
            _close(self._connection.detach(), order.report, *self._workers, *reports)
            return True
        _close(order.output, order.errors, *order.inherited.values())
        fork_protocol.send_message(self._connection, pid)
        handle = os.pidfd_open(pid)
        self._workers[handle] = (pid, order.report)
        self._poll.register(handle, select.POLLIN)
        return False

    def _report(self, handle: int) -> None:
        """Write how a worker ended, as `subprocess` would say it."""
        pid, report = self._workers.pop(handle)
        self._poll.unregister(handle)
        _, status = os.waitpid(pid, 0)
        with suppress(BrokenPipeError):  # the launcher is gone; that is noticed next
            os.write(report, str(os.waitstatus_to_exitcode(status)).encode())
        _close(handle, report)


def _assume_identity(order: ForkRequest) -> None:
    """Take on what a process that the launcher starts would have from its birth."""
    for file, place in ((os.open(os.devnull, os.O_RDONLY), 0), (order.output, 1), (order.errors, 2)):
        os.dup2(file, place)
        os.close(file)
    own = {name: str(file) for name, file in order.inherited.items()}
    change_environment({**dict.fromkeys(process_environment()), **order.environ, **own})
    os.chdir(order.directory)
    if not sys.flags.safe_path:
        sys.path[0] = order.directory
    sys.argv = ["-m", *order.argv[1:]]
    rank = order.environ.get("RANK")
    _name_process(_COMMAND if rank is None else f"rank {rank}")
    _reset_libraries(order.environ)


def _name_process(name: str) -> None:
    Path("/proc/self/comm").write_text(name[:_NAME_BYTES])


def _reset_libraries(environ: dict[str, str]) -> None:
    """What libraries did when they were imported, once for all, and every process does for itself."""
    tempfile.tempdir = None  # where the variables of this process say
    numpy, torch = sys.modules.get("numpy"), sys.modules.get("torch")
    if numpy is not None:
        numpy.random.seed()  # the global generator; Python's own does this by itself
    if torch is not None:
        torch.set_num_threads(int(environ.get("OMP_NUM_THREADS", len(os.sched_getaffinity(0)))))


def _fork() -> int:
    with warnings.catch_warnings():
        # Python warns that other threads exist. They are those of numpy's library, which prepares for forks.
        warnings.simplefilter("ignore", DeprecationWarning)
        return os.fork()


def _close(*files: int) -> None:
    for file in files:
        os.close(file)


if __name__ == "__main__":
    die_with_parent(int(sys.argv[3]))  # at once, also while it imports
    main(Path(sys.argv[1]), int(sys.argv[2]), sys.argv[4:])
