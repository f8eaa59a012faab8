"""What the system knows of a process by its number, from /proc; off Linux it knows nothing.

Where a process hangs: its Python stack, written on a signal and read by whoever waits for it.

Invariant: asking a process that is not prepared, or that has ended, does nothing, and never ends it.
"""

from __future__ import annotations

import faulthandler
import os
import re
import signal
import sysconfig
import time
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import IO


def is_stopped(pid: int) -> bool:
    """Whether a signal has stopped it (SIGSTOP, SIGTSTP); a debugger's stop is another one."""
    return _stat_fields(pid)[:1] == ["T"]


def is_handling_signal(pid: int, number: int) -> bool:
    """Whether a signal waits for it, or it is in its handler; not while it is stopped, nor once it has ended.

    The system gives a signal of the process to its main thread, and blocks it there while the handler runs.
    """
    try:
        lines = Path(f"/proc/{pid}/status").read_text(errors="replace").splitlines()
    except OSError:
        return False
    said = {name: value.strip() for name, _, value in (line.partition(":") for line in lines)}
    masks = (int(said.get(name, "0"), 16) for name in ("SigPnd", "ShdPnd", "SigBlk"))
    return said.get("State", "X")[0] in "RSD" and any(mask >> (number - 1) & 1 for mask in masks)


def zombie_exit_status(pid: int) -> int | None:
    """How a process has ended that nobody has waited for, as `waitpid` would say it; None: there is none."""
    fields = _stat_fields(pid)
    return int(fields[49]) if fields and fields[0] == "Z" else None


def _stat_fields(pid: int) -> list[str]:
    """Those of proc(5) from the third on, behind the name, which may hold anything; empty: no process."""
    try:
        return Path(f"/proc/{pid}/stat").read_text(errors="replace").rpartition(")")[2].split()
    except OSError:
        return []


_FRAME = re.compile(r'^  File "(?P<file>.*)", line (?P<line>\d+) in (?P<function>.*)$')
_SIGNAL = signal.SIGUSR2  # SIGUSR1 is what batch systems send before they take a machine away
_ANSWER_SECONDS = 2.0  # on a busy machine a process may wait so long for a core
_POLL_SECONDS = 0.05


def enable_stack_dump(path: Path) -> IO[str]:
    """Let this process write the stacks of all its threads to `path` when it is asked.

    Returns:
        The open file; the caller keeps it as long as the process may be asked.
    """
    faulthandler.unregister(_SIGNAL)  # else, the second time in a process, it would stay ignored
    signal.signal(_SIGNAL, signal.SIG_IGN)  # what is left when the interpreter takes its handlers down
    hidden = path.with_suffix(".preparing")
    stream = hidden.open("w", encoding="utf-8")
    faulthandler.register(_SIGNAL, file=stream, all_threads=True)
    hidden.rename(path)  # the file is the sign that this process may be asked
    return stream


def request_stack_dumps(asked: Sequence[tuple[int, Path]]) -> None:
    """Ask processes for their stacks, and wait until they have written, also while a C call blocks them.

    Who is stopped by a signal is not waited for, nor is anybody for longer than `_ANSWER_SECONDS`: a process
    that the system cannot interrupt.

    Args:
        asked: the number of each process, and its file of `enable_stack_dump`.
    """
    prepared = [pid for pid, path in asked if path.exists()]
    for pid in prepared:
        with suppress(ProcessLookupError):  # it has ended just now
            os.kill(pid, _SIGNAL)
    expires, owing = time.monotonic() + _ANSWER_SECONDS, prepared
    while owing and time.monotonic() < expires:
        time.sleep(_POLL_SECONDS)
        owing = [pid for pid in owing if is_handling_signal(pid, _SIGNAL)]


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
    own = next((frame for frame in frames if not _is_installed(frame["file"])), frames[0])
    called = "" if own is frames[0] else f", called from {_format_frame(own)}"
    return _format_frame(frames[0]) + called


def _is_installed(file: str) -> bool:
    return "site-packages" in file or file.startswith(("<", sysconfig.get_path("stdlib")))


def _format_frame(frame: re.Match[str]) -> str:
    return f"{frame['function']} ({Path(frame['file']).name}:{frame['line']})"
