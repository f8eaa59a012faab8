"""The worker's side of the launcher: report an exception, then exit at once.

Errors about memory, open files and loader workers get a message with a next step, which torch does not give.
They are recognised by the names and texts of exceptions, so that torch is not imported here. Tracebacks show
the frames of the user's code and fold those of Paceline, of libraries and of Python. If the last frame is
Paceline's or no frame would be left, all are shown, since the bug can be in Paceline.

Invariant: an exception in a worker reaches the launcher as a complete file or not at all, and the process
exits without waiting for a process group in which its peers can be stuck.
"""

from __future__ import annotations

import errno
import json
import multiprocessing
import os
import signal
import sys
import sysconfig
import time
import traceback
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from textwrap import dedent, indent
from types import TracebackType
from typing import IO, Self

from paceline.errors import DataError, MemoryLimitError, PacelineError, format_count
from paceline.job.cluster import Cluster
from paceline.job.launcher_reports import error_file, stack_file
from paceline.launch.job_spec import socket_folder
from paceline.launch.process_inspection import enable_stack_dump

_MEMORY_ADVICE = (
    "use fewer processes on this host, more batch.accumulation (smaller micro-batches), a smaller model, "
    'or memory.recompute = "blocks"; --resume RUN continues from the last checkpoint'
)
_SHARED_MEMORY_ADVICE = (
    "enlarge /dev/shm (mount -o remount,size=2g /dev/shm; docker run --shm-size 2g), "
    "or set loader.workers = 0; --resume RUN continues from the last checkpoint"
)
_NO_SHARED_MEMORY_ADVICE = (
    "mount it (docker run --shm-size 2g; in a pod an emptyDir with medium Memory), or set loader.workers = 0"
)
_LOADER_ADVICE = (
    "if the kernel log (dmesg) says out of memory, use fewer loader.workers; "
    "set loader.workers = 0 to see the error in the training process"
)
_OPEN_FILES_ADVICE = (
    "raise the limit of ulimit -n, or use fewer processes on this host; --resume RUN continues the run"
)
_HOST_TEXTS = (
    *("can't allocate memory", "Cannot allocate memory", "not enough memory"),
    *("can't start new thread", "failed to map segment"),
)
_SHARED_TEXTS = ("</torch_", "unable to allocate shared memory", "out of shared memory")
_MEMORY_ERROR_NAMES = {"MemoryError", "OutOfMemoryError"}
_ERRORS_WITH_TEXT = {"RuntimeError", "OSError", "ImportError", "PacelineError"}
_AFTER_SIGNAL = {
    signal.SIGKILL: f"next:  if the kernel log (dmesg) says out of memory: {_MEMORY_ADVICE}",
    signal.SIGBUS: f"next:  {_SHARED_MEMORY_ADVICE}",
}


def advise_after_signal(number: int) -> str:
    """Return the next step for a worker that a signal ended; empty if there is none."""
    return {int(key): text for key, text in _AFTER_SIGNAL.items()}.get(number, "")


def explain_error(error: BaseException) -> PacelineError | None:
    """Return an error with a next step for memory, loader workers or open files; None for other errors."""
    return explain_memory(error) or _explain_loader(error) or _explain_files(error)


def _explain_loader(error: BaseException) -> DataError | None:
    # PyTorch raises this wherever the main thread is, as soon as a loader worker has died
    for cause in _exception_chain(error):
        message = str(cause).partition("\n")[0]
        if type(cause) is RuntimeError and message.startswith("DataLoader worker"):
            return DataError(f"the loader failed: {message}", next_step=_LOADER_ADVICE)
    return None


def _explain_files(error: BaseException) -> MemoryLimitError | None:
    if any("Too many open files" in str(cause) for cause in _exception_chain(error)):  # the text of EMFILE
        message = str(error).partition("\n")[0]
        return MemoryLimitError(f"too many files are open: {message}", next_step=_OPEN_FILES_ADVICE)
    return None


def explain_memory(error: BaseException) -> MemoryLimitError | None:
    """Return an error with a next step if this one, or one that caused it, says that memory ran out."""
    message = str(error).partition("\n")[0]
    for cause in _exception_chain(error):
        if _is_of_semaphore(cause):
            return MemoryLimitError(
                f"this container has no /dev/shm, which loader workers need: {message}",
                next_step=_NO_SHARED_MEMORY_ADVICE,
            )
        names = {kind.__name__ for kind in type(cause).__mro__}
        text = str(cause) if names & _ERRORS_WITH_TEXT else ""
        if any(part in text for part in _SHARED_TEXTS):
            return MemoryLimitError(
                f"this host is out of shared memory: {message}", next_step=_SHARED_MEMORY_ADVICE
            )
        named = names & _MEMORY_ERROR_NAMES or getattr(cause, "errno", None) == errno.ENOMEM
        if named or any(part in text for part in _HOST_TEXTS):
            return MemoryLimitError(f"out of memory: {message}", next_step=_MEMORY_ADVICE)
    return None


def _is_of_semaphore(error: BaseException) -> bool:
    """Return whether a semaphore could not be created for want of /dev/shm; the error names no file."""
    frames = traceback.extract_tb(error.__traceback__)
    creates = bool(frames) and frames[-1].filename.endswith("multiprocessing/synchronize.py")
    return creates and isinstance(error, FileNotFoundError)


def _exception_chain(error: BaseException) -> Iterator[BaseException]:
    """Yield an error and the errors that caused it, as Python prints them."""
    cause: BaseException | None = error
    while cause is not None:
        yield cause
        cause = cause.__cause__ or (None if cause.__suppress_context__ else cause.__context__)


_ENOUGH_ADDRESS_SPACE_BYTES = 2 * 2**30
_ADDRESS_SPACE_CODES = (1, -signal.SIGABRT, -signal.SIGSEGV, -signal.SIGBUS)


def explain_address_space(code: int, limit_bytes: int) -> MemoryLimitError | None:
    """Return the error of a process that ended by itself, without a report, under a small `ulimit -v`; pure.

    C and C++ libraries end the process where Python would raise a MemoryError (`std::bad_alloc`, OpenBLAS).

    Args:
        code: exit code, or the negative number of a signal.
        limit_bytes: of its address space; -1: there is none.
    """
    if code not in _ADDRESS_SPACE_CODES or not 0 <= limit_bytes < _ENOUGH_ADDRESS_SPACE_BYTES:
        return None
    return MemoryLimitError(
        f"out of memory: ulimit -v allows {limit_bytes / 2**20:,.0f} MiB of address space",
        next_step="raise it (ulimit -v unlimited), or use fewer threads; PyTorch alone maps more than 1 GiB",
    )


_PACKAGE_FOLDER = str(Path(__file__).resolve().parents[1])
_FOLDED_FOLDERS = (
    _PACKAGE_FOLDER,
    *(sysconfig.get_path(name) for name in ("stdlib", "platstdlib", "purelib", "platlib")),
)


def render_trace(error: BaseException) -> str:
    """Return the traceback of an error and its causes, with frames of Paceline and libraries folded."""
    return "".join(_format_chain(traceback.TracebackException.from_exception(error)))


def _format_chain(error: traceback.TracebackException) -> list[str]:
    cause = error.__cause__ or (None if error.__suppress_context__ else error.__context__)
    lines = [] if cause is None else [*_format_chain(cause), "\nThis caused:\n\n"]
    shown = [frame for frame in error.stack if not is_folded(frame.filename)]
    if not shown or error.stack[-1].filename.startswith(_PACKAGE_FOLDER):
        shown = list(error.stack)
    num_folded = len(error.stack) - len(shown)
    note = f"; {format_count(num_folded, 'frame')} of Paceline and libraries hidden" if num_folded else ""
    head = [f"Traceback (most recent call last{note}):\n"] if shown else []
    frames = traceback.StackSummary.from_list(shown).format()
    return [*lines, *head, *frames, *error.format_exception_only()]


def is_folded(filename: str) -> bool:
    """Return whether frames of this file are hidden, since they are not the user's code."""
    return filename.startswith(("<frozen", *_FOLDED_FOLDERS))


_MAX_FOLDER_LENGTH = 80  # the path of a Unix socket is limited to 107 bytes
_CONNECTION_TYPES = {"CommunicationError", "DistError"}


@dataclass(frozen=True)
class ErrorReport:
    """The report of a worker about its exception.

    Args:
        when: seconds since the epoch.
        type, message, traceback: of the exception, as text.
        details: what a user needs after the first line: the traceback, or where it happened and what to do.
        exit_code: of the process.
        connection: the error says that another rank is gone or does not respond, so it is unlikely to be the
            cause.
    """

    when: float
    type: str
    message: str
    traceback: str
    details: str
    exit_code: int
    connection: bool

    @classmethod
    def of(cls, error: BaseException) -> ErrorReport:
        """Describe an exception."""
        shown = explain_error(error) or error
        return cls(
            when=time.time(),
            type=type(shown).__name__,
            message=str(shown),
            traceback="".join(traceback.format_exception(error)),
            details=_details(error, shown, render_trace(error)),
            exit_code=_exit_code(shown),
            connection=is_connection_error(shown),
        )

    @property
    def headline(self) -> str:
        """The exception, in one line."""
        summary = self.message.partition("\n")[0]
        return f"raised {self.type}: {summary}" if summary else f"raised {self.type}"

    def render(self, global_rank: int) -> str:
        """Return the text for a user, with a newline."""
        return f"rank {global_rank} {self.headline}\n" + indent(self.details, "  ").rstrip() + "\n"

    def save(self, path: Path) -> None:
        """Write the report atomically: a reader of the file sees all of it."""
        draft = path.with_suffix(".writing")
        draft.write_text(json.dumps(vars(self)), encoding="utf-8")
        draft.rename(path)

    @classmethod
    def load(cls, path: Path) -> ErrorReport | None:
        """Read the report of a worker; None if there is none that can be read."""
        try:
            fields = json.loads(path.read_text(encoding="utf-8"))
            report = cls(**fields)
        except (OSError, ValueError, TypeError, RecursionError):
            return None
        # a worker can write anything into its own folder; the types are those of an example
        example = cls(0.0, "", "", "", "", 1, False)
        is_valid = all(type(value) is type(getattr(example, name)) for name, value in fields.items())
        return report if is_valid else None


def _details(error: BaseException, shown: BaseException, trace: str) -> str:
    """Return the lines after the first: a traceback if it helps, the place and the next step."""
    advice = dedent("\n".join(str(shown).splitlines()[1:])) if isinstance(shown, PacelineError) else ""
    if shown is error:
        return advice if _needs_no_traceback(error) else trace
    # Frames of libraries and of Paceline say nothing about where memory went.
    return trace + advice if not isinstance(error, PacelineError) and _has_user_frame(error) else advice


def _has_user_frame(error: BaseException) -> bool:
    return any(
        not is_folded(frame.filename)
        for cause in _exception_chain(error)
        for frame in traceback.extract_tb(cause.__traceback__)
    )


def _needs_no_traceback(error: BaseException) -> bool:
    """Return whether the message of an error is enough: it is Paceline's, and no user code caused it."""
    foreign = error.__cause__ is not None and not isinstance(error.__cause__, PacelineError | OSError)
    return isinstance(error, PacelineError) and not foreign and not hasattr(error, "__notes__")


def _exit_code(error: BaseException) -> int:
    if isinstance(error, PacelineError):
        return error.exit_code
    return 130 if isinstance(error, KeyboardInterrupt) else 1


def is_connection_error(error: BaseException) -> bool:
    """Return whether an error of Paceline, torch or Gloo says that another rank is gone."""
    # Gloo raises a plain RuntimeError with its source file in the text
    names = {kind.__name__ for kind in type(error).__mro__}
    return bool(names & _CONNECTION_TYPES) or ("RuntimeError" in names and "/gloo/" in str(error))


def _redirect_multiprocessing_sockets(folder: Path) -> None:
    """Let `multiprocessing` create its sockets in a folder that the launcher removes."""
    folder.mkdir(exist_ok=True)
    name = str(folder)
    # a folder that this process keeps open has a short name in /proc, which its children can use as well
    if len(name) > _MAX_FOLDER_LENGTH:
        name = f"/proc/{os.getpid()}/fd/{os.open(folder, os.O_RDONLY | os.O_DIRECTORY)}"
    if Path(name).is_dir():
        vars(multiprocessing.current_process())["_config"]["tempdir"] = name


class guard:
    """A context manager around the main function of a worker: `with guard(cluster): ...`.

    An exception is written to the launcher's folder, which prints it, or without a launcher to standard
    error, and the process exits at once with its exit code, without destroying process groups (that would
    wait for peers). `SystemExit` passes through. Without a launcher and without other ranks, exceptions pass
    through as well.

    Args:
        cluster: this process in its job; `cluster.error_dir` is the folder that the launcher reads.
    """

    def __init__(self, cluster: Cluster) -> None:
        self._cluster = cluster
        self._stack: IO[str] | None = None

    def __enter__(self) -> Self:
        if self._cluster.faults_dir is not None:
            from paceline.lab.worker_hook import install_fault_hook

            install_fault_hook(self._cluster.faults_dir, self._cluster.local_rank)
        if self._cluster.error_dir is not None:
            self._stack = enable_stack_dump(stack_file(self._cluster.error_dir, self._cluster.global_rank))
            _redirect_multiprocessing_sockets(
                socket_folder(self._cluster.error_dir, self._cluster.global_rank)
            )
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        cluster = self._cluster
        alone = cluster.error_dir is None and cluster.world_size == 1
        if error is None or isinstance(error, SystemExit) or alone:
            return
        report = ErrorReport.of(error)
        if cluster.error_dir is None:
            sys.stderr.write(report.render(cluster.global_rank))
        else:
            with suppress(OSError):  # the disk is full: the exit code still says what happened
                report.save(error_file(cluster.error_dir, cluster.global_rank))
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(report.exit_code)
