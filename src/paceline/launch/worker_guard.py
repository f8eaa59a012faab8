"""What to do about memory that is used up, and lost loader workers: torch says neither with a next step.

Pure, and without torch: errors are told by their names and texts.

A traceback as its reader needs it: the frames of the user's code, and how many of ours were folded.

Pure. A frame is folded if its file is Paceline's, a library's or Python's own; where no frame is left, or the
last one is Paceline's, nothing is folded: then the mistake may be ours.

The worker's side of the launcher: say what went wrong, then end at once.

Invariant: an exception in a worker reaches the launcher as a complete file or not at all, and the process
ends without waiting for a process group that its peers may be stuck in.
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
from textwrap import dedent
from types import TracebackType
from typing import IO, Self

from paceline.errors import DataError, MemoryLimitError, PacelineError
from paceline.job.cluster import Cluster
from paceline.launch.job_spec import error_file, socket_folder, stack_file
from paceline.launch.process_inspection import enable_stack_dump

_MEMORY_ADVICE = (
    "fewer processes on this host, more batch.accumulation (smaller micro-batches), a smaller model, "
    'or memory.recompute = "blocks"; --resume RUN goes on from the last checkpoint'
)
_SHARED_MEMORY_ADVICE = (
    "give /dev/shm more room (mount -o remount,size=2g /dev/shm; docker run --shm-size 2g), "
    "or set loader.workers = 0; --resume RUN goes on from the last checkpoint"
)
_LOADER_ADVICE = (
    "if the kernel's log (dmesg) says that it was out of memory: fewer loader.workers; "
    "set loader.workers = 0 to see it happen in the training process"
)
_OPEN_FILES_ADVICE = "raise what ulimit -n says, or use fewer processes on this host; --resume RUN goes on"
_HOST_TEXTS = (
    *("can't allocate memory", "Cannot allocate memory", "not enough memory"),
    *("can't start new thread", "failed to map segment"),
)
_SHARED_TEXTS = ("</torch_", "unable to allocate shared memory", "out of shared memory")
_MEMORY_ERROR_NAMES = {"MemoryError", "OutOfMemoryError"}
_ERRORS_WITH_TEXT = {"RuntimeError", "OSError", "ImportError", "PacelineError"}
_AFTER_SIGNAL = {
    signal.SIGKILL: f"next:  if the kernel's log (dmesg) says that it was out of memory: {_MEMORY_ADVICE}",
    signal.SIGBUS: f"next:  {_SHARED_MEMORY_ADVICE}",
}


def advise_after_signal(number: int) -> str:
    """A line for a worker that a signal ended; empty if there is nothing to advise."""
    return {int(key): text for key, text in _AFTER_SIGNAL.items()}.get(number, "")


def explain_error(error: BaseException) -> PacelineError | None:
    """The error in words of its own, if they are known; None: it says what there is to say."""
    return explain_memory(error) or _explain_loader(error) or _explain_files(error)


def _explain_loader(error: BaseException) -> DataError | None:
    """PyTorch raises this wherever the main thread is, as soon as a loader worker has died."""
    for one in _exception_chain(error):
        said = str(one).partition("\n")[0]
        if type(one) is RuntimeError and said.startswith("DataLoader worker"):
            return DataError(f"the loader failed: {said}", next_step=_LOADER_ADVICE)
    return None


def _explain_files(error: BaseException) -> MemoryLimitError | None:
    if any("Too many open files" in str(one) for one in _exception_chain(error)):  # as the system says it
        first = str(error).partition("\n")[0]
        return MemoryLimitError(f"too many files are open: {first}", next_step=_OPEN_FILES_ADVICE)
    return None


def explain_memory(error: BaseException) -> MemoryLimitError | None:
    """The error in words of its own, if it, or one that caused it, says that memory is used up."""
    first = str(error).partition("\n")[0]
    for one in _exception_chain(error):
        names = {kind.__name__ for kind in type(one).__mro__}
        says = str(one) if names & _ERRORS_WITH_TEXT else ""
        if any(words in says for words in _SHARED_TEXTS):
            return MemoryLimitError(
                f"the shared memory of this host is used up: {first}", next_step=_SHARED_MEMORY_ADVICE
            )
        named = names & _MEMORY_ERROR_NAMES or getattr(one, "errno", None) == errno.ENOMEM
        if named or any(words in says for words in _HOST_TEXTS):
            return MemoryLimitError(f"the memory is used up: {first}", next_step=_MEMORY_ADVICE)
    return None


def _exception_chain(error: BaseException) -> Iterator[BaseException]:
    """An error, and those that it was raised from."""
    one: BaseException | None = error
    while one is not None:
        yield one
        one = one.__cause__


_PACKAGE_FOLDER = str(Path(__file__).resolve().parents[1])
_FOLDED_FOLDERS = (
    _PACKAGE_FOLDER,
    *(sysconfig.get_path(name) for name in ("stdlib", "platstdlib", "purelib", "platlib")),
)


def render_trace(error: BaseException) -> str:
    """The traceback of an error and of what caused it, with our frames folded."""
    told = traceback.TracebackException.from_exception(error)
    return "".join(_format_chain(told))


def _format_chain(told: traceback.TracebackException) -> list[str]:
    before = told.__cause__ or (None if told.__suppress_context__ else told.__context__)
    lines = [] if before is None else [*_format_chain(before), "\nThe above led to:\n\n"]
    shown = [frame for frame in told.stack if not is_folded(frame.filename)]
    if not shown or told.stack[-1].filename.startswith(_PACKAGE_FOLDER):
        shown = list(told.stack)
    folded = len(told.stack) - len(shown)
    said = f"; {folded} frames of Paceline and of libraries are folded" if folded else ""
    head = [f"Traceback (most recent call last{said}):\n"] if shown else []
    frames = traceback.StackSummary.from_list(shown).format()
    return [*lines, *head, *frames, *told.format_exception_only()]


def is_folded(filename: str) -> bool:
    """Whether a frame of this file is no code of the user's."""
    return filename.startswith(("<frozen", *_FOLDED_FOLDERS))


_MAX_FOLDER_LENGTH = 80  # the name of a socket has 107 bytes at most
_CONNECTION_TYPES = {"CommunicationError", "DistError"}


@dataclass(frozen=True)
class ErrorReport:
    """What a worker says about its exception.

    Args:
        when: seconds since the epoch.
        type, message, traceback: of the exception, as text.
        details: what a user needs beside the first line: the traceback, or where and what next.
        exit_code: of the process.
        connection: the error says that another rank is gone or silent, so it is unlikely to be the cause.
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
        said = explain_error(error) or error
        trace = "".join(traceback.format_exception(error))
        shown = render_trace(error)
        return cls(
            when=time.time(),
            type=type(said).__name__,
            message=str(said),
            traceback=trace,
            details=_details(error, said, shown),
            exit_code=_exit_code(said),
            connection=is_connection_error(said),
        )

    def save(self, path: Path) -> None:
        """Write atomically: who reads the file sees all of it."""
        hidden = path.with_suffix(".writing")
        hidden.write_text(json.dumps(vars(self)), encoding="utf-8")
        hidden.rename(path)

    @classmethod
    def load(cls, path: Path) -> ErrorReport | None:
        """Read what a worker saved; None if it saved nothing that can be read."""
        try:
            said = json.loads(path.read_text(encoding="utf-8"))
            report = cls(**said)
        except (OSError, ValueError, TypeError, RecursionError):
            return None
        right = cls(0.0, "", "", "", "", 1, False)
        return (
            report if all(type(value) is type(getattr(right, name)) for name, value in said.items()) else None
        )


def _details(error: BaseException, said: BaseException, trace: str) -> str:
    """The traceback where it is needed, and where and what next of what is ours."""
    rest = dedent("\n".join(str(said).splitlines()[1:])) if isinstance(said, PacelineError) else ""
    if said is error:
        return rest if _needs_no_traceback(error) else trace
    return rest if isinstance(error, PacelineError) else trace + rest


def _needs_no_traceback(error: BaseException) -> bool:
    """An error of ours does, unless it was raised because of one of the user's."""
    foreign = error.__cause__ is not None and not isinstance(error.__cause__, PacelineError | OSError)
    return isinstance(error, PacelineError) and not foreign and not hasattr(error, "__notes__")


def _exit_code(error: BaseException) -> int:
    if isinstance(error, PacelineError):
        return error.exit_code
    return 130 if isinstance(error, KeyboardInterrupt) else 1


def is_connection_error(error: BaseException) -> bool:
    """Does it say that another rank is gone? Ours, torch's, or Gloo's plain RuntimeError; needs no torch."""
    names = {kind.__name__ for kind in type(error).__mro__}
    return bool(names & _CONNECTION_TYPES) or ("RuntimeError" in names and "/gloo/" in str(error))


def _redirect_multiprocessing_sockets(folder: Path) -> None:
    """Let `multiprocessing` make its sockets where the launcher removes them, however this process ends.

    A folder with a long name has a short one as long as this process has it open, for its children too.
    """
    folder.mkdir(exist_ok=True)
    name = str(folder)
    if len(name) > _MAX_FOLDER_LENGTH:
        name = f"/proc/{os.getpid()}/fd/{os.open(folder, os.O_RDONLY | os.O_DIRECTORY)}"
    if Path(name).is_dir():
        vars(multiprocessing.current_process())["_config"]["tempdir"] = name


class guard:
    """Wrap a worker's main: `with guard(cluster): ...`.

    An exception is written to the launcher's folder and to standard error, and the process ends at once
    with its exit code, without destroying process groups (that would wait for peers). `SystemExit` passes
    through. Without a launcher and without other ranks, exceptions pass through as well.

    Args:
        cluster: this process's place; `cluster.error_dir` is where the launcher looks.
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
        if cluster.error_dir is not None:
            with suppress(OSError):  # no space: the exit code still says what it was
                report.save(error_file(cluster.error_dir, cluster.global_rank))
        if cluster.error_dir is None or cluster.local_rank != 0:  # the launcher shows the first rank's itself
            sys.stderr.write(report.traceback)
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(report.exit_code)
