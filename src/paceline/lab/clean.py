"""What labs have left behind, and its removal.

Invariant: a lab whose owner lives is left alone unless it is asked for; everything else of this user's labs
goes, and nothing that is no lab's is touched.
"""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Hashable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

from paceline.lab.cores import remove_groups
from paceline.lab.state import PREFIX, folders, records, remove_folder

_Found = TypeVar("_Found", bound=Hashable)

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
    if running:
        _kill_owners()
    pids = _end_processes()
    groups = _remove_groups(groups_root)
    left = _without_owner({folder: folder.name for folder in folders()})
    for folder in left:
        remove_folder(folder)
    names = {folder.name for folder in left} | {
        Path(group).name for group in groups if PREFIX in Path(group).name
    }
    return Cleaned(tuple(sorted(names)), tuple(pids), tuple(groups), tuple(sorted(_alive())))


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


def _alive() -> set[str]:
    """The labs whose owner lives, by name, and those that are just being made."""
    named = {record.name for record in records() if record.owner.alive}
    return named | {folder.name for folder in folders() if _is_begun(folder)}


def _is_begun(folder: Path) -> bool:
    """A lab's folder that has no record yet, and has not stood for long without."""
    try:
        return not (folder / "lab.json").exists() and time.time() - folder.stat().st_mtime < _GONE_SECONDS
    except FileNotFoundError:
        return False  # it has ended


def _without_owner(found: Mapping[_Found, str]) -> list[_Found]:
    """What belongs to no living lab, of things with the names of their labs.

    Who lives is asked after the things were found: a lab that began in between is spared.
    """
    alive = _alive()
    return [thing for thing, lab in found.items() if lab not in alive]


def _kill_owners() -> None:
    owners = [record.owner for record in records() if record.owner.alive]
    for owner in owners:
        with suppress(ProcessLookupError):
            os.kill(owner.pid, signal.SIGKILL)
    expires = time.monotonic() + _GONE_SECONDS
    while any(owner.alive for owner in owners) and time.monotonic() < expires:
        time.sleep(0.01)


def _end_processes() -> list[int]:
    """Kill what keeps a lab alive; the kernel ends the rest of its hosts."""
    ended: set[int] = set()
    expires = time.monotonic() + _GONE_SECONDS
    while found := _without_owner(lab_processes()):
        for pid in found:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        ended.update(found)
        if time.monotonic() > expires:
            break
        time.sleep(0.02)
    return sorted(ended)


def _remove_groups(root: Path) -> list[str]:
    tops = [top for parent in _GROUP_PARENTS for top in sorted((root / parent).glob(f"{PREFIX}*"))]
    found: list[str] = []
    for top in _without_owner({top: top.name for top in tops}):
        with suppress(FileNotFoundError):  # its lab has just ended
            if top.stat().st_uid == os.getuid():
                found += map(str, (top, *sorted(inner for inner in top.iterdir() if inner.is_dir())))
    return _wait_removed(found)


def _wait_removed(found: Sequence[str]) -> list[str]:
    """A group can go when its last process has been buried, which may take a moment."""
    expires = time.monotonic() + _GONE_SECONDS
    while any(Path(folder).exists() for folder in found) and time.monotonic() < expires:
        remove_groups(found)
        time.sleep(0.01)
    return [folder for folder in found if not Path(folder).exists()]
