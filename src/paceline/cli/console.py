"""Where commands print, and how errors look. rich is loaded when something is printed."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from typing import IO, TYPE_CHECKING, TextIO, cast

from paceline.errors import PacelineError

if TYPE_CHECKING:
    from rich.console import Console


def output() -> Console:
    """Standard output; what comes of a command that only shows something must reach the user."""
    from rich.console import Console

    return Console()


def error_output() -> Console:
    """Standard error, where standard output may be JSON."""
    from rich.console import Console

    return Console(stderr=True)


def job_output() -> Console:
    """Standard output for a job, which goes on when nobody reads it any more, or its disk is full."""
    from rich.console import Console

    # asked of the stream: a notebook says FORCE_COLOR to all that it starts, and a pipe is no terminal
    return Console(file=cast(IO[str], _BestEffortStream(sys.stdout)), force_terminal=sys.stdout.isatty())


class _BestEffortStream:
    """Writes to a stream until that fails; says so, and writes nothing from there on."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream

    def write(self, text: str) -> int:
        """As a stream's."""
        return self._unless_gone(lambda: self._stream.write(text), len(text))

    def flush(self) -> None:
        """As a stream's."""
        self._unless_gone(self._flush, 0)

    def isatty(self) -> bool:
        """As a stream's."""
        return self._stream.isatty()

    def fileno(self) -> int:
        """As a stream's."""
        return self._stream.fileno()

    @property
    def encoding(self) -> str:
        """As a stream's."""
        return self._stream.encoding

    def _flush(self) -> int:
        self._stream.flush()
        return 0

    def _unless_gone(self, act: Callable[[], int], otherwise: int) -> int:
        try:
            return act()
        except OSError as error:
            from paceline.observe.file_writing import warn_on_stderr

            warn_on_stderr(f"standard output cannot be written: {error.strerror}; the run goes on without it")
            discard_output()
            return otherwise


def discard_output() -> None:
    """Let standard output lead nowhere, also for what is still to be written at the end of the process."""
    nowhere = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, sys.stdout.fileno())
    os.close(nowhere)


def print_error(error: PacelineError) -> None:
    """Print an error to standard error."""
    console = error_output()
    console.print(f"error: {error}", style="red", markup=False, highlight=False, soft_wrap=True)
