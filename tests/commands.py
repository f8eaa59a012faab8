"""`paceline` in a process of its own, forked where that makes no difference but in time.

Python takes a second of the processor to load a command, and five to load one that needs PyTorch. The fork
server of the suite (`quick_workers`) has loaded both. A command that would not be the same as one that is
started (other variables, limits or namespaces; see `ForkClient`) is started, and so is one told to be `anew`.
"""

from __future__ import annotations

import signal
import subprocess
import sys
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from tempfile import TemporaryFile
from types import TracebackType
from typing import Self

from paceline.job.cluster import process_environment
from paceline.launch.fork_client import FORK_SERVER_VARIABLE, NO_FORK_SERVER, ForkClient, ForkedProcess
from paceline.launch.job_spec import WorkerSpec, common_environment

_SECONDS = 400.0


class Command:
    """A process of its own; it is used as a `subprocess.Popen` of texts is.

    What it says goes to files, so that it never waits for a reader. Who leaves it by an exception kills it.

    Args:
        words: those after `python -m`.
        folder: where it runs.
        environ: its variables, beside those of this process.
        before: words before the command, which make it another one: it is started.
        anew: it is started by a new interpreter.
    """

    def __init__(
        self,
        words: Sequence[str],
        folder: Path,
        environ: Mapping[str, str],
        *,
        before: Sequence[str] = (),
        anew: bool = False,
    ) -> None:
        self.args = [*before, sys.executable, "-m", *words]
        self._said: tuple[str, str] | None = None
        may_fork = not before and not anew and environ.get(FORK_SERVER_VARIABLE) != NO_FORK_SERVER
        with ExitStack() as opened:
            out, err = (opened.enter_context(TemporaryFile("a+", encoding="utf-8")) for _ in range(2))
            self._files = out, err
            one = self._fork(folder, environ, opened) if may_fork else None
            self._process = one or self._start(folder, environ)
            self._opened = opened.pop_all()
        self.pid = self._process.pid

    def _fork(self, folder: Path, environ: Mapping[str, str], opened: ExitStack) -> ForkedProcess | None:
        inherited = process_environment()
        variables = {**common_environment(inherited), **environ}
        nowhere = folder / "none"
        worker = WorkerSpec(0, 0, tuple(self.args), variables, {}, None, nowhere, nowhere, folder)
        client = opened.enter_context(ForkClient(inherited))
        return client.start(worker, *(file.fileno() for file in self._files))

    def _start(self, folder: Path, environ: Mapping[str, str]) -> subprocess.Popen[bytes]:
        out, err = self._files
        variables = {**process_environment(), **environ}
        return subprocess.Popen(
            self.args, cwd=folder, env=variables, stdin=subprocess.DEVNULL, stdout=out, stderr=err
        )

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: object, traceback: TracebackType | None
    ) -> None:
        if kind is not None:
            self.kill()
        self.wait(_SECONDS)

    @property
    def forked(self) -> bool:
        """Whether it comes from the fork server."""
        return isinstance(self._process, ForkedProcess)

    @property
    def returncode(self) -> int | None:
        """The exit code, or the signal that ended it, negative; None: it was not seen to have ended."""
        return self._process.returncode

    def poll(self) -> int | None:
        """The exit code; None while it runs."""
        return self._process.poll()

    def wait(self, timeout: float = _SECONDS) -> int:
        """Wait for its end.

        Raises:
            subprocess.TimeoutExpired: it still runs.
        """
        code = self._process.wait(timeout)
        if self._said is None:
            for file in self._files:
                file.seek(0)
            out, err = (file.read() for file in self._files)
            self._said = out, err
            self._opened.close()
        return code

    def communicate(self, timeout: float = _SECONDS) -> tuple[str, str]:
        """Wait for its end; returns what it said to standard output and to standard error.

        Raises:
            subprocess.TimeoutExpired: it still runs.
        """
        self.wait(timeout)
        assert self._said is not None
        return self._said

    def send_signal(self, number: int) -> None:
        """Send a signal, if it still runs."""
        self._process.send_signal(number)

    def kill(self) -> None:
        """Kill it; what it has started is its keeper's business."""
        self.send_signal(signal.SIGKILL)


def start(folder: Path, *words: object, anew: bool = False, **environ: str) -> Command:
    """`paceline WORDS` in a folder."""
    return Command(["paceline", *map(str, words)], folder, environ, anew=anew)


def run(
    folder: Path, *words: object, seconds: float = _SECONDS, anew: bool = False, **environ: str
) -> subprocess.CompletedProcess[str]:
    """The same to its end, for at most so many seconds."""
    with start(folder, *words, anew=anew, **environ) as command:
        out, err = command.communicate(seconds)
        return subprocess.CompletedProcess(command.args, command.wait(), out, err)
