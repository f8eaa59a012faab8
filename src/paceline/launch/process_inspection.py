"""The state of another process: from /proc, and its Python stack, which it writes when it gets a signal.

Invariant: requesting the stack of a process that is not prepared, or that has ended, does nothing and never
ends it. Where there is no /proc, nothing is known about a process.
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

from paceline.observe.process_info import read_stat_fields


def is_handling_signal(pid: int, number: int) -> bool:
    """Return whether a signal is pending or handled; False if the process is stopped or has ended.

    The kernel delivers a signal to the main thread, and blocks it there while the handler runs.
    """
    try:
        lines = Path(f"/proc/{pid}/status").read_text(errors="replace").splitlines()
    except OSError:
        return False
    status = {name: value.strip() for name, _, value in (line.partition(":") for line in lines)}
    masks = (int(status.get(name, "0"), 16) for name in ("SigPnd", "ShdPnd", "SigBlk"))
    return status.get("State", "X")[0] in "RSD" and any(mask >> (number - 1) & 1 for mask in masks)


def handles_stack_requests(pid: int) -> bool:
    """Return whether a process writes its stack on request; a signal would end one that does not."""
    try:
        lines = Path(f"/proc/{pid}/status").read_text(errors="replace").splitlines()
    except OSError:
        return False
    caught = next((line.partition(":")[2] for line in lines if line.startswith("SigCgt:")), "0")
    return bool(int(caught, 16) >> (_SIGNAL - 1) & 1)


def session_cpu_seconds(pid: int) -> float:
    """Return the CPU time of a worker and of its child processes that run, in seconds."""
    total = 0
    for process in Path("/proc").glob("[0-9]*"):
        fields = read_stat_fields(int(process.name))
        if len(fields) > 12 and int(fields[3]) == pid:
            total += int(fields[11]) + int(fields[12])
    return total / os.sysconf("SC_CLK_TCK")


def zombie_exit_status(pid: int) -> int | None:
    """Return the status that `waitpid` would give for a process that is a zombie; None if it is none."""
    fields = read_stat_fields(pid)
    return int(fields[49]) if fields and fields[0] == "Z" else None


_FRAME = re.compile(r'^  File "(?P<file>.*)", line (?P<line>\d+) in (?P<function>.*)$')
_PACKAGE_FOLDER = str(Path(__file__).resolve().parents[1])
_SIGNAL = signal.SIGUSR2  # batch systems send SIGUSR1 before they take a machine away
_ANSWER_SECONDS = 2.0  # a process can wait that long for a core on a busy machine
_POLL_SECONDS = 0.05


def enable_stack_dump(path: Path) -> IO[str]:
    """Let this process write the stacks of all its threads to `path` when it gets a signal.

    Returns:
        The open file; the caller keeps it open as long as stacks may be requested.
    """
    faulthandler.unregister(_SIGNAL)  # else a second call in one process would leave it ignored
    signal.signal(_SIGNAL, signal.SIG_IGN)  # for the time after the interpreter has removed its handlers
    draft = path.with_suffix(".preparing")
    stream = draft.open("w", encoding="utf-8")
    faulthandler.register(_SIGNAL, file=stream, all_threads=True)
    draft.rename(path)  # the file tells others that this process is prepared
    return stream


def request_stack_dumps(processes: Sequence[tuple[int, Path]]) -> None:
    """Request the stacks of some processes, and wait until they are written, even if a C call blocks them.

    A process that a signal has stopped is not waited for, and one that the system cannot interrupt only for
    `_ANSWER_SECONDS`.

    Args:
        processes: the ID of each process, and its file of `enable_stack_dump`.
    """
    prepared = [pid for pid, path in processes if path.exists()]
    for pid in prepared:
        with suppress(ProcessLookupError):  # it has ended just now
            os.kill(pid, _SIGNAL)
    expires, pending = time.monotonic() + _ANSWER_SECONDS, prepared
    while pending and time.monotonic() < expires:
        time.sleep(_POLL_SECONDS)
        pending = [pid for pid in pending if is_handling_signal(pid, _SIGNAL)]


def read_position(path: Path) -> str:
    """Return the position of the main thread: "all_reduce (distributed.py:31), called from step (my.py:7)".

    That is the innermost frame, and the innermost one of the user's code; without one, the innermost one
    outside of the standard library and of installed packages. The text is empty if there is no stack in the
    file.
    """
    if not path.exists():
        return ""
    blocks = path.read_text(encoding="utf-8", errors="replace").split("\n\n")
    # A process that was asked several times has appended its stacks; the last one is the present one.
    current = [block for block in blocks if block.startswith("Current thread")] or blocks[-1:]
    frames = [match for line in current[-1].splitlines() if (match := _FRAME.match(line))]
    if not frames:
        return ""
    outside = [frame for frame in frames if not _is_installed(frame["file"])]
    own = [frame for frame in outside if not frame["file"].startswith(_PACKAGE_FOLDER)]
    # The user's code says most; Paceline's own command line is below everything.
    caller = next(iter(own or outside or frames))
    called = "" if caller is frames[0] else f", called from {_format_frame(caller)}"
    return _format_frame(frames[0]) + called


def _is_installed(file: str) -> bool:
    return "site-packages" in file or file.startswith(("<", sysconfig.get_path("stdlib")))


def _format_frame(frame: re.Match[str]) -> str:
    return f"{frame['function']} ({Path(frame['file']).name}:{frame['line']})"
