"""Console output of the commands: what goes to which stream, and how errors look.

rich takes longer to import than typer, so it is imported only when something is printed.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable
from typing import IO, TYPE_CHECKING, Any, TextIO, cast

from paceline.errors import PacelineError

if TYPE_CHECKING:
    from rich.console import Console


def output() -> Console:
    """Return standard output, for commands that only show something: a failed write is an error."""
    from rich.console import Console

    return Console()


def error_output() -> Console:
    """Return standard error, for messages of commands whose standard output can be JSON."""
    from rich.console import Console

    return Console(stderr=True)


def print_plain(text: str, console: Console | None = None) -> None:
    """Print a line as it is: no markup, no colours, no wrapping, and no controls of the terminal.

    Args:
        console: None: standard output.
    """
    from paceline.observe.terminal_text import escape_controls

    # paths and error texts contain brackets, which rich would take for markup
    (console or output()).print(escape_controls(text), markup=False, highlight=False, soft_wrap=True)


def print_json(value: Any) -> None:
    """Print a value as JSON on standard output, in ASCII: other characters are escaped."""
    output().print_json(json.dumps(value), ensure_ascii=True)


def print_warning(text: str) -> None:
    """Print a line on standard error, since standard output may be JSON."""
    print_plain(text, error_output())


def discard_warning(text: str) -> None:
    """Drop a warning that the first process prints."""


def job_output() -> Console:
    """Return standard output for a job, which continues when its reader is gone or the disk is full."""
    from rich.console import Console

    # asked of the stream: a notebook sets FORCE_COLOR for all its processes, and a pipe is not a terminal
    return Console(file=cast(IO[str], _BestEffortStream(sys.stdout)), force_terminal=sys.stdout.isatty())


class _BestEffortStream:
    """A text stream that warns once when a write fails, and discards everything after that."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream

    def write(self, text: str) -> int:
        return self._ignoring_errors(lambda: self._stream.write(text), len(text))

    def flush(self) -> None:
        self._ignoring_errors(self._flush, 0)

    def isatty(self) -> bool:
        return self._stream.isatty()

    def fileno(self) -> int:
        return self._stream.fileno()

    @property
    def encoding(self) -> str:
        return self._stream.encoding

    def _flush(self) -> int:
        self._stream.flush()
        return 0

    def _ignoring_errors(self, call: Callable[[], int], default: int) -> int:
        try:
            return call()
        except OSError as error:
            from paceline.observe.file_writing import warn_on_stderr

            warn_on_stderr(f"cannot write to standard output: {error.strerror}; the run continues without it")
            discard_output()
            return default


def discard_output() -> None:
    """Redirect standard output to /dev/null, including what Python flushes when the process ends."""
    null = os.open(os.devnull, os.O_WRONLY)
    os.dup2(null, sys.stdout.fileno())
    os.close(null)


def print_error(error: PacelineError) -> None:
    """Print an error to standard error."""
    from paceline.observe.terminal_text import escape_controls

    console = error_output()
    console.print(
        escape_controls(f"error: {error}"), style="red", markup=False, highlight=False, soft_wrap=True
    )


def write_text(text: str) -> None:
    """Write text to the terminal at once, without a new line; its control characters are written out."""
    from paceline.observe.terminal_text import escape_controls

    sys.stdout.write(escape_controls(text))
    sys.stdout.flush()
