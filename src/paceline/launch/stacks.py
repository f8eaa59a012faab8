"""Where a process hangs: its Python stack, written on a signal and read by whoever waits for it.

Invariant: asking a process that is not prepared does nothing, and never ends it.
"""

from __future__ import annotations

import faulthandler
import os
import re
import signal
import sysconfig
from pathlib import Path
from typing import IO

_FRAME = re.compile(r'^  File "(?P<file>.*)", line (?P<line>\d+) in (?P<function>.*)$')
_SIGNAL = signal.SIGUSR2  # SIGUSR1 is what batch systems send before they take a machine away


def prepare_stack(path: Path) -> IO[str]:
    """Let this process write the stacks of all its threads to `path` when it is asked.

    Returns:
        The open file; the caller keeps it as long as the process may be asked.
    """
    signal.signal(_SIGNAL, signal.SIG_IGN)  # what is left when the interpreter takes its handlers down
    hidden = path.with_suffix(".preparing")
    stream = hidden.open("w", encoding="utf-8")
    faulthandler.register(_SIGNAL, file=stream, all_threads=True)
    hidden.rename(path)  # the file is the sign that this process may be asked
    return stream


def request_stack(pid: int, path: Path) -> None:
    """Ask process `pid` for its stack. It writes within milliseconds, also while a C call blocks it."""
    if path.exists():
        os.kill(pid, _SIGNAL)


def read_position(path: Path) -> str:
    """Where the main thread is, for example "all_reduce (distributed.py:31), called from step (my.py:7)".

    Returns:
        The innermost frame, and the innermost one outside of the standard library and installed
        packages; empty if there is no stack in the file.
    """
    if not path.exists():
        return ""
    blocks = path.read_text(encoding="utf-8", errors="replace").split("\n\n")
    current = [block for block in blocks if block.startswith("Current thread")] or blocks[-1:]
    frames = [match for line in current[0].splitlines() if (match := _FRAME.match(line))]
    if not frames:
        return ""
    own = next((frame for frame in frames if not _installed(frame["file"])), frames[0])
    called = "" if own is frames[0] else f", called from {_spell(own)}"
    return _spell(frames[0]) + called


def _installed(file: str) -> bool:
    return "site-packages" in file or file.startswith(("<", sysconfig.get_path("stdlib")))


def _spell(frame: re.Match[str]) -> str:
    return f"{frame['function']} ({Path(frame['file']).name}:{frame['line']})"
