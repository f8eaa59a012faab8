"""What the operating system knows about a process."""

from __future__ import annotations

import os
import resource
import sys
import tempfile
from pathlib import Path


def process_start_ticks(pid: int) -> int:
    """When a process of this host began, in clock ticks; 0 if there is none or the host does not say.

    A pid is given again to others after a while; pid and start together mean one process.
    """
    try:
        fields = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8").rpartition(")")[2].split()
    except OSError:
        return 0
    return 0 if fields[0] == "Z" else int(fields[19])


def cache_folder() -> Path:
    """Where this user keeps what can be made again; a user without a home has a folder of temporary files."""
    try:
        return Path.home() / ".cache" / "paceline"
    except RuntimeError:  # no HOME, and no entry of the user's number in passwd
        return Path(tempfile.gettempdir()) / f"paceline-cache-{os.getuid()}"


def peak_memory_bytes() -> float:
    """The largest memory of this process so far; Linux counts in KiB, macOS in bytes."""
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return float(peak if sys.platform == "darwin" else 1024 * peak)
