"""The worker's side of the launcher: say what went wrong, then end at once.

Invariant: an exception in a worker reaches the launcher as a complete file or not at all, and the process
ends without waiting for a process group that its peers may be stuck in.
"""

from __future__ import annotations

import json
import multiprocessing
import os
import sys
import time
import traceback
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from textwrap import dedent
from types import TracebackType
from typing import IO, Self

from paceline.cluster import Cluster
from paceline.errors import PacelineError
from paceline.launch.advice import explain
from paceline.launch.frames import render_trace
from paceline.launch.render import error_file, sockets_folder, stack_file
from paceline.launch.stacks import prepare_stack

_LONGEST_FOLDER = 80  # the name of a socket has 107 bytes at most
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
        said = explain(error) or error
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
        return rest if _reads_alone(error) else trace
    return rest if isinstance(error, PacelineError) else trace + rest


def _reads_alone(error: BaseException) -> bool:
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


def _keep_sockets(folder: Path) -> None:
    """Let `multiprocessing` make its sockets where the launcher removes them, however this process ends.

    A folder with a long name has a short one as long as this process has it open, for its children too.
    """
    folder.mkdir(exist_ok=True)
    name = str(folder)
    if len(name) > _LONGEST_FOLDER:
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
            from paceline.lab.worker import arm

            arm(self._cluster.faults_dir, self._cluster.local_rank)
        if self._cluster.error_dir is not None:
            self._stack = prepare_stack(stack_file(self._cluster.error_dir, self._cluster.global_rank))
            _keep_sockets(sockets_folder(self._cluster.error_dir, self._cluster.global_rank))
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
