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

from paceline.observe.process import process_start

PREFIX = "paceline-"
_OWNER = "owner.json"


def own(folder: Path) -> None:
    """Write down that a temporary folder is this process's."""
    with suppress(OSError):  # on a full disk it stays, should this process be killed
        (folder / _OWNER).write_text(json.dumps(_identity(os.getpid())), encoding="utf-8")


def clean_litter() -> list[Path]:
    """Remove the folders of dead owners; returns them."""
    found = [path for path in Path(tempfile.gettempdir()).glob(f"{PREFIX}*") if _is_litter(path)]
    for path in found:
        shutil.rmtree(path, ignore_errors=True)
    return found


def _is_litter(folder: Path) -> bool:
    try:
        said = json.loads((folder / _OWNER).read_text(encoding="utf-8"))
        pid = int(said["pid"])
        return folder.stat().st_uid == os.getuid() and _identity(pid) != said and _same_system(said)
    except (OSError, ValueError, KeyError, TypeError, OverflowError, RecursionError):
        return False


def _same_system(said: dict[str, object]) -> bool:
    here = _identity(os.getpid())
    return all(here[key] and said.get(key) == here[key] for key in ("boot", "processes"))


def _identity(pid: int) -> dict[str, object]:
    """A process by its number, its beginning, and the system in which that number means it."""
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()
        processes = str(Path("/proc/self/ns/pid").readlink())
    except OSError:
        boot = processes = ""
    return {"pid": pid, "start": process_start(pid), "boot": boot, "processes": processes}
