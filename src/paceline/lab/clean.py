"""What labs have left behind, and its removal.

Invariant: a lab whose owner lives is left alone unless it is asked for; everything else of this user's labs
goes, and nothing that is no lab's is touched.
"""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from paceline.lab.cores import remove_groups
from paceline.lab.state import PREFIX, folders, records, remove_folder

_GONE_SECONDS = 10.0
_GROUP_PARENTS = ("cpu", "cpu,cpuacct", ".")


@dataclass(frozen=True)
class Cleaned:
    """What was removed: labs by name, processes by number, control groups by folder; and labs that run on."""

    labs: tuple[str, ...]
    processes: tuple[int, ...]
    groups: tuple[str, ...]
    running: tuple[str, ...]


def clean(*, running: bool = False, groups_root: Path = Path("/sys/fs/cgroup")) -> Cleaned:
    """Remove what labs of this user have left.

    Args:
        running: also end labs that are in use.
        groups_root: where control groups are mounted.
    """
    alive = {record.name: record for record in records() if record.owner.alive}
    if running:
        for record in alive.values():
            with suppress(ProcessLookupError):
                os.kill(record.owner.pid, signal.SIGKILL)
    spared = set() if running else set(alive)
    pids = _end_processes(spared)
    groups = _remove_groups(spared, groups_root)
    left = [folder for folder in folders() if folder.name not in spared]
    for folder in left:
        remove_folder(folder)
    names = {folder.name for folder in left} | {
        Path(group).name for group in groups if PREFIX in Path(group).name
    }
    return Cleaned(tuple(sorted(names)), tuple(pids), tuple(groups), tuple(sorted(spared)))


def lab_processes() -> dict[int, str]:
    """The processes of this user that keep labs alive, by number, with the name of their lab."""
    found: dict[int, str] = {}
    for path in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):
            words = (path / "cmdline").read_bytes().decode(errors="replace").split("\0")
            names = [word for word in words[3:6] if word.startswith(PREFIX)]
            if names and "paceline/lab/inside/" in words[3] and path.stat().st_uid == os.getuid():
                found[int(path.name)] = names[0]
    return found


def _end_processes(spared: set[str]) -> list[int]:
    """Kill what keeps a lab alive; the kernel ends the rest of its hosts."""
    ended: set[int] = set()
    expires = time.monotonic() + _GONE_SECONDS
    while found := [pid for pid, lab in lab_processes().items() if lab not in spared]:
        for pid in found:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        ended.update(found)
        if time.monotonic() > expires:
            break
        time.sleep(0.02)
    return sorted(ended)


def _remove_groups(spared: set[str], root: Path) -> list[str]:
    tops = [top for parent in _GROUP_PARENTS for top in sorted((root / parent).glob(f"{PREFIX}*"))]
    mine = [top for top in tops if top.name not in spared and top.stat().st_uid == os.getuid()]
    found = [str(path) for top in mine for path in (top, *sorted(p for p in top.iterdir() if p.is_dir()))]
    return _wait_removed(found)


def _wait_removed(found: Sequence[str]) -> list[str]:
    """A group can go when its last process has been buried, which may take a moment."""
    expires = time.monotonic() + _GONE_SECONDS
    while any(Path(folder).exists() for folder in found) and time.monotonic() < expires:
        remove_groups(found)
        time.sleep(0.01)
    return [folder for folder in found if not Path(folder).exists()]
