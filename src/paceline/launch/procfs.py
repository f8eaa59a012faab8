"""What the system knows of a process by its number, from /proc; off Linux it knows nothing."""

from __future__ import annotations

from pathlib import Path


def is_stopped(pid: int) -> bool:
    """Whether a signal has stopped it (SIGSTOP, SIGTSTP); a debugger's stop is another one."""
    return _fields(pid)[:1] == ["T"]


def is_handling(pid: int, number: int) -> bool:
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


def status_of_ended(pid: int) -> int | None:
    """How a process has ended that nobody has waited for, as `waitpid` would say it; None: there is none."""
    fields = _fields(pid)
    return int(fields[49]) if fields and fields[0] == "Z" else None


def _fields(pid: int) -> list[str]:
    """Those of proc(5) from the third on, behind the name, which may hold anything; empty: no process."""
    try:
        return Path(f"/proc/{pid}/stat").read_text(errors="replace").rpartition(")")[2].split()
    except OSError:
        return []
