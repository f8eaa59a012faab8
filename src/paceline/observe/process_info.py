"""Facts about a process: start time, state and memory; and the folder of caches of its user."""

from __future__ import annotations

import ctypes
import os
import re
import resource
import sys
import tempfile
from collections.abc import Callable
from functools import cache
from pathlib import Path

_MEMORY_SUMMARY = Path("/proc/self/smaps_rollup")
_PROPORTIONAL_KIB = re.compile(rb"^Pss: *([0-9]+)", re.MULTILINE)


def process_start_ticks(pid: int) -> int:
    """Return when a process of this host began, in clock ticks; 0 if it has ended or the host does not say.

    Process ids are reused, so only the id and the start together identify a process.
    """
    fields = read_stat_fields(pid)
    if not fields:
        return 0
    # Z is a zombie and X a process that is about to vanish: neither runs any more.
    return 0 if fields[0] in "ZX" else int(fields[19])


def is_stopped(pid: int) -> bool:
    """Return whether a signal has stopped a process (SIGSTOP, SIGTSTP); stops by a debugger do not count."""
    return read_stat_fields(pid)[:1] == ["T"]


def read_stat_fields(pid: int) -> list[str]:
    """Return the fields of /proc/PID/stat from the third on, the state; empty if the process has ended."""
    try:
        text = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8", errors="replace")
    except OSError:
        return []
    return text.rpartition(")")[2].split()  # the second field, the name, can contain anything


def cache_folder() -> Path:
    """Return the folder for files that can be made again; without a home it lies in the temporary folder."""
    try:
        return Path.home() / ".cache" / "paceline"
    except RuntimeError:  # no HOME, and no entry of the user's number in passwd
        return Path(tempfile.gettempdir()) / f"paceline-cache-{os.getuid()}"


def peak_memory_bytes() -> float:
    """Return the largest resident memory of this process so far, in bytes."""
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return float(peak if sys.platform == "darwin" else 1024 * peak)  # Linux counts in KiB, macOS in bytes


def proportional_memory_bytes() -> float:
    """Return the proportional set size of this process in bytes: a page that n processes map counts 1 / n.

    Where the host does not say (other systems than Linux), the peak of the resident memory is returned.
    """
    try:
        found = _PROPORTIONAL_KIB.search(_MEMORY_SUMMARY.read_bytes())
    except OSError:
        found = None
    return 1024.0 * int(found[1]) if found is not None else peak_memory_bytes()


@cache
def _malloc_trim() -> Callable[[int], int] | None:
    """Return the function of glibc; None with another C library."""
    return getattr(ctypes.CDLL(None), "malloc_trim", None)


def return_freed_memory() -> None:
    """Return freed blocks of the heap to the system; without glibc nothing is done."""
    trim = _malloc_trim()
    if trim is not None:
        trim(0)
