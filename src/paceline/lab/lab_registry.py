"""What is written down about a lab, so that another process can look into it and clean up after it.

Invariant: a lab's folder is there before anything of the lab is, and goes last. A process is known by its
number and the time it started, so a number that was given to another process is never mistaken for it.

What labs have left behind, and its removal.

Invariant: a lab whose owner lives is left alone unless it is asked for; everything else of this user's labs
goes, and nothing that is no lab's is touched.
"""

from __future__ import annotations

import json
import os
import secrets
import shutil
import signal
import tempfile
import time
from collections.abc import Hashable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TypeVar

from paceline.lab.host_cores import remove_control_groups

LAB_PREFIX = "paceline-lab-"


@dataclass(frozen=True)
class ProcessIdentity:
    """A process by number and start time (in clock ticks since the machine started)."""

    pid: int
    started: int

    @classmethod
    def of(cls, pid: int) -> ProcessIdentity:
        """The process that has this number now; `started` is 0 if there is none."""
        return cls(pid, _start_time(pid))

    @property
    def alive(self) -> bool:
        """Whether it still runs (a zombie does not)."""
        return self.started > 0 and _start_time(self.pid) == self.started


def _start_time(pid: int) -> int:
    try:
        fields = Path(f"/proc/{pid}/stat").read_text(errors="replace").rpartition(")")[2].split()
    except OSError:
        return 0
    return 0 if fields[0] in "ZX" else int(fields[19])


@dataclass
class LabRecord:
    """A lab.

    Args:
        name: unique on this machine, begins with `LAB_PREFIX`.
        folder: the lab's own files.
        owner: the process that made it.
        first: by host (and "switch"), the first process of its namespaces.
        addresses: by host.
        kinds: namespaces to enter in order to be inside.
        cgroups: folders that the lab made, inner ones last.
        command: that it runs, for people.
    """

    name: str
    folder: Path
    owner: ProcessIdentity
    first: dict[str, ProcessIdentity] = field(default_factory=dict)
    holders: dict[str, ProcessIdentity] = field(default_factory=dict)
    addresses: dict[str, str] = field(default_factory=dict)
    kinds: tuple[str, ...] = ()
    cgroups: list[str] = field(default_factory=list)
    command: str = ""

    def save(self) -> None:
        """Write atomically."""
        hidden = self.folder / "lab.writing"
        hidden.write_text(json.dumps({**asdict(self), "folder": str(self.folder)}), encoding="utf-8")
        hidden.rename(self.folder / "lab.json")

    @classmethod
    def load(cls, folder: Path) -> LabRecord:
        """Read what `save` wrote.

        Raises:
            OSError, ValueError, KeyError, TypeError: there is none, or it was not written by this version.
        """
        found = json.loads((folder / "lab.json").read_text(encoding="utf-8"))
        for name in ("first", "holders"):
            found[name] = {host: ProcessIdentity(**value) for host, value in found[name].items()}
        owner, kinds = ProcessIdentity(**found.pop("owner")), tuple(found.pop("kinds"))
        return cls(**{**found, "folder": folder}, owner=owner, kinds=kinds)


def labs_folder() -> Path:
    """Where the labs of this user write; private to the user."""
    return Path(tempfile.gettempdir()) / f"paceline-labs-{os.getuid()}"


def create_lab_record() -> LabRecord:
    """Make the folder of a new lab that this process owns."""
    name = LAB_PREFIX + secrets.token_hex(4)
    folder = labs_folder() / name
    while not folder.exists():
        labs_folder().mkdir(mode=0o700, exist_ok=True)
        with suppress(FileNotFoundError):  # another lab was the last one, and took the folder of all with it
            folder.mkdir(mode=0o700)
    record = LabRecord(name, folder, ProcessIdentity.of(os.getpid()))
    record.save()
    return record


def find_lab_folders() -> Iterator[Path]:
    """The folders of all labs of this user, oldest first."""
    found: dict[Path, float] = {}
    if labs_folder().is_dir():
        for path in labs_folder().glob(f"{LAB_PREFIX}*"):
            with suppress(FileNotFoundError):  # its lab has just ended
                found[path] = path.stat().st_mtime
    yield from sorted(found, key=lambda path: found[path])


def read_lab_records() -> Iterator[LabRecord]:
    """All labs of this user that can be read, oldest first."""
    for folder in find_lab_folders():
        try:
            yield LabRecord.load(folder)
        except (OSError, ValueError, KeyError, TypeError):
            continue  # half made when its owner was killed; `clean` removes it


def remove_lab_folder(folder: Path) -> None:
    """Remove a lab's folder, and the folder of all labs when it was the last one."""
    shutil.rmtree(folder, ignore_errors=True)
    try:
        labs_folder().rmdir()
    except OSError:
        return  # other labs


_Resource = TypeVar("_Resource", bound=Hashable)

_REMOVAL_SECONDS = 10.0
_GROUP_PARENTS = ("cpu", "cpu,cpuacct", ".")


@dataclass(frozen=True)
class CleanupResult:
    """What was removed: labs by name, processes by number, control groups by folder; and labs that run on."""

    labs: tuple[str, ...]
    processes: tuple[int, ...]
    groups: tuple[str, ...]
    running: tuple[str, ...]


def clean(*, running: bool = False, groups_root: Path = Path("/sys/fs/cgroup")) -> CleanupResult:
    """Remove what labs of this user have left.

    Args:
        running: also end labs that are in use.
        groups_root: where control groups are mounted.
    """
    if running:
        _kill_owners()
    pids = _end_processes()
    groups = _remove_orphan_groups(groups_root)
    left = _orphans({folder: folder.name for folder in find_lab_folders()})
    for folder in left:
        remove_lab_folder(folder)
    names = {folder.name for folder in left} | {
        Path(group).name for group in groups if LAB_PREFIX in Path(group).name
    }
    return CleanupResult(tuple(sorted(names)), tuple(pids), tuple(groups), tuple(sorted(_running_labs())))


def find_lab_processes() -> dict[int, str]:
    """The processes of this user that keep labs alive, by number, with the name of their lab."""
    found: dict[int, str] = {}
    for path in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):
            words = (path / "cmdline").read_bytes().decode(errors="replace").split("\0")
            names = [word for word in words[3:6] if word.startswith(LAB_PREFIX)]
            if names and "paceline/lab/inside/" in words[3] and path.stat().st_uid == os.getuid():
                found[int(path.name)] = names[0]
    return found


def _running_labs() -> set[str]:
    """The labs whose owner lives, by name, and those that are just being made."""
    named = {record.name for record in read_lab_records() if record.owner.alive}
    return named | {folder.name for folder in find_lab_folders() if _is_being_made(folder)}


def _is_being_made(folder: Path) -> bool:
    """A lab's folder that has no record yet, and has not stood for long without."""
    try:
        return not (folder / "lab.json").exists() and time.time() - folder.stat().st_mtime < _REMOVAL_SECONDS
    except FileNotFoundError:
        return False  # it has ended


def _orphans(found: Mapping[_Resource, str]) -> list[_Resource]:
    """What belongs to no living lab, of things with the names of their labs.

    Who lives is asked after the things were found: a lab that began in between is spared.
    """
    alive = _running_labs()
    return [thing for thing, lab in found.items() if lab not in alive]


def _kill_owners() -> None:
    owners = [record.owner for record in read_lab_records() if record.owner.alive]
    for owner in owners:
        with suppress(ProcessLookupError):
            os.kill(owner.pid, signal.SIGKILL)
    expires = time.monotonic() + _REMOVAL_SECONDS
    while any(owner.alive for owner in owners) and time.monotonic() < expires:
        time.sleep(0.01)


def _end_processes() -> list[int]:
    """Kill what keeps a lab alive; the kernel ends the rest of its hosts."""
    ended: set[int] = set()
    expires = time.monotonic() + _REMOVAL_SECONDS
    while found := _orphans(find_lab_processes()):
        for pid in found:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        ended.update(found)
        if time.monotonic() > expires:
            break
        time.sleep(0.02)
    return sorted(ended)


def _remove_orphan_groups(root: Path) -> list[str]:
    tops = [top for parent in _GROUP_PARENTS for top in sorted((root / parent).glob(f"{LAB_PREFIX}*"))]
    found: list[str] = []
    for top in _orphans({top: top.name for top in tops}):
        with suppress(FileNotFoundError):  # its lab has just ended
            if top.stat().st_uid == os.getuid():
                found += map(str, (top, *sorted(inner for inner in top.iterdir() if inner.is_dir())))
    return _remove_until_gone(found)


def _remove_until_gone(found: Sequence[str]) -> list[str]:
    """A group can go when its last process has been buried, which may take a moment."""
    expires = time.monotonic() + _REMOVAL_SECONDS
    while any(Path(folder).exists() for folder in found) and time.monotonic() < expires:
        remove_control_groups(found)
        time.sleep(0.01)
    return [folder for folder in found if not Path(folder).exists()]
