"""Temporary folders of dead launchers, which the next launcher removes.

Invariant: a folder is removed only if it belongs to this user and names as its owner a process of this system
(same boot, same PID namespace) that has ended.
"""

from __future__ import annotations

import json
import os
import shutil
import tempfile
from contextlib import suppress
from pathlib import Path

from paceline.observe.process_info import process_start_ticks

FOLDER_PREFIX = "paceline-"
_OWNER_FILE = "owner.json"


def mark_owner(folder: Path) -> None:
    """Record this process as the owner of a temporary folder."""
    with suppress(OSError):  # on a full disk the folder stays if this process is killed
        (folder / _OWNER_FILE).write_text(json.dumps(_process_identity(os.getpid())), encoding="utf-8")


def find_stale_folders() -> list[Path]:
    """Return the folders whose owner has ended."""
    return [path for path in Path(tempfile.gettempdir()).glob(f"{FOLDER_PREFIX}*") if _is_stale(path)]


def remove_stale_folders() -> list[Path]:
    """Remove the folders whose owner has ended; returns them."""
    stale = find_stale_folders()
    for path in stale:
        shutil.rmtree(path, ignore_errors=True)
    return stale


def _is_stale(folder: Path) -> bool:
    try:
        owner = json.loads((folder / _OWNER_FILE).read_text(encoding="utf-8"))
        pid = int(owner["pid"])
        return folder.stat().st_uid == os.getuid() and _process_identity(pid) != owner and _same_system(owner)
    except (OSError, ValueError, KeyError, TypeError, OverflowError, RecursionError):
        return False


def _same_system(owner: dict[str, object]) -> bool:
    this = _process_identity(os.getpid())
    # Process IDs of another boot or namespace say nothing about the processes here.
    return all(this[key] and owner.get(key) == this[key] for key in ("boot", "processes"))


def _process_identity(pid: int) -> dict[str, object]:
    """Return what identifies a process: its ID, its start time, and the boot and namespace of that ID."""
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()
        processes = str(Path("/proc/self/ns/pid").readlink())
    except OSError:
        boot = processes = ""
    return {"pid": pid, "start": process_start_ticks(pid), "boot": boot, "processes": processes}
