"""Temporary folders of launchers that are dead: the next launcher removes what they could not.

Invariant: a folder goes only if it is this user's, and names as its owner a process of this very system that
has ended.
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
    """Write down that a temporary folder is this process's."""
    with suppress(OSError):  # on a full disk it stays, should this process be killed
        (folder / _OWNER_FILE).write_text(json.dumps(_process_identity(os.getpid())), encoding="utf-8")


def remove_stale_folders() -> list[Path]:
    """Remove the folders of dead owners; returns them."""
    found = [path for path in Path(tempfile.gettempdir()).glob(f"{FOLDER_PREFIX}*") if _is_stale(path)]
    for path in found:
        shutil.rmtree(path, ignore_errors=True)
    return found


def _is_stale(folder: Path) -> bool:
    try:
        said = json.loads((folder / _OWNER_FILE).read_text(encoding="utf-8"))
        pid = int(said["pid"])
        return folder.stat().st_uid == os.getuid() and _process_identity(pid) != said and _same_system(said)
    except (OSError, ValueError, KeyError, TypeError, OverflowError, RecursionError):
        return False


def _same_system(said: dict[str, object]) -> bool:
    here = _process_identity(os.getpid())
    return all(here[key] and said.get(key) == here[key] for key in ("boot", "processes"))


def _process_identity(pid: int) -> dict[str, object]:
    """A process by its number, its beginning, and the system in which that number means it."""
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()
        processes = str(Path("/proc/self/ns/pid").readlink())
    except OSError:
        boot = processes = ""
    return {"pid": pid, "start": process_start_ticks(pid), "boot": boot, "processes": processes}
