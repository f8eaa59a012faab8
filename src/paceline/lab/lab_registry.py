"""The records of all labs of this user, for other processes, and the removal of labs that were left behind.

Invariant: the folder of a lab is made before any other part of it, and removed last. A process is identified
by its number and start time, so that a number that was reused is never mistaken for it. `clean` spares labs
whose owner lives, unless it is told otherwise, and touches nothing that is not part of a lab.
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
from paceline.observe.process_info import process_start_ticks

LAB_PREFIX = "paceline-lab-"


@dataclass(frozen=True)
class ProcessIdentity:
    """A process, identified by its number and its start time in clock ticks since the machine started."""

    pid: int
    started: int

    @classmethod
    def of(cls, pid: int) -> ProcessIdentity:
        """Identify the process that has this number now; `started` is 0 if there is none."""
        return cls(pid, process_start_ticks(pid))

    @property
    def alive(self) -> bool:
        """Return whether the process still runs (a zombie does not)."""
        return self.started > 0 and process_start_ticks(self.pid) == self.started


@dataclass
class LabRecord:
    """The record of a lab.

    Args:
        name: unique on this machine, begins with `LAB_PREFIX`.
        folder: the files of the lab.
        owner: the process that made it.
        first: first process of the namespaces, by host and for "switch".
        holders: process that holds the namespaces, likewise.
        addresses: IPv4 address by host.
        kinds: namespaces that a process enters to be inside a host.
        cgroups: control groups of the lab, inner ones last.
        command: the command that runs, for `lab list`.
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
        """Write the record atomically."""
        temporary = self.folder / "lab.writing"
        temporary.write_text(json.dumps({**asdict(self), "folder": str(self.folder)}), encoding="utf-8")
        temporary.rename(self.folder / "lab.json")

    @classmethod
    def load(cls, folder: Path) -> LabRecord:
        """Read a record that `save` wrote.

        Raises:
            OSError, ValueError, KeyError, TypeError: there is no record, or another version wrote it.
        """
        record = json.loads((folder / "lab.json").read_text(encoding="utf-8"))
        for name in ("first", "holders"):
            record[name] = {host: ProcessIdentity(**value) for host, value in record[name].items()}
        owner, kinds = ProcessIdentity(**record.pop("owner")), tuple(record.pop("kinds"))
        return cls(**{**record, "folder": folder}, owner=owner, kinds=kinds)


def labs_folder() -> Path:
    """Return the folder of all labs of this user, which only this user can read."""
    return Path(tempfile.gettempdir()) / f"paceline-labs-{os.getuid()}"


def create_lab_record() -> LabRecord:
    """Create the folder and the record of a new lab, owned by this process."""
    name = LAB_PREFIX + secrets.token_hex(4)
    folder = labs_folder() / name
    while not folder.exists():
        labs_folder().mkdir(mode=0o700, exist_ok=True)
        with suppress(FileNotFoundError):  # the last other lab has just removed the folder of all labs
            folder.mkdir(mode=0o700)
    record = LabRecord(name, folder, ProcessIdentity.of(os.getpid()))
    record.save()
    return record


def find_lab_folders() -> Iterator[Path]:
    """Yield the folders of all labs of this user, oldest first."""
    modified: dict[Path, float] = {}
    if labs_folder().is_dir():
        for path in labs_folder().glob(f"{LAB_PREFIX}*"):
            with suppress(FileNotFoundError):  # its lab has just ended
                modified[path] = path.stat().st_mtime
    yield from sorted(modified, key=lambda path: modified[path])


def read_lab_records() -> Iterator[LabRecord]:
    """Yield the records of all labs of this user that can be read, oldest first."""
    for folder in find_lab_folders():
        try:
            yield LabRecord.load(folder)
        except (OSError, ValueError, KeyError, TypeError):
            continue  # its owner was killed while making it; `clean` removes it


def remove_lab_folder(folder: Path) -> None:
    """Remove the folder of a lab, and the folder of all labs if it is empty then."""
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
    """The result of `clean`: removed labs, killed processes, removed control groups, and running labs."""

    labs: tuple[str, ...]
    processes: tuple[int, ...]
    groups: tuple[str, ...]
    running: tuple[str, ...]


def clean(*, running: bool = False, groups_root: Path = Path("/sys/fs/cgroup")) -> CleanupResult:
    """Remove everything that labs of this user have left behind.

    Args:
        running: also end labs that are in use.
        groups_root: the folder where control groups are mounted.
    """
    if running:
        _kill_owners()
    # In this order: a group with processes cannot be removed, and the folder is what marks a lab.
    pids = _end_processes()
    groups = _remove_orphan_groups(groups_root)
    orphans = _orphans({folder: folder.name for folder in find_lab_folders()})
    for folder in orphans:
        remove_lab_folder(folder)
    names = {folder.name for folder in orphans} | {
        Path(group).name for group in groups if LAB_PREFIX in Path(group).name
    }
    return CleanupResult(tuple(sorted(names)), tuple(pids), tuple(groups), tuple(sorted(_running_labs())))


def find_lab_processes() -> dict[int, str]:
    """Return the processes of this user that hold labs, by number, with the name of their lab."""
    labs: dict[int, str] = {}
    for path in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):
            words = (path / "cmdline").read_bytes().decode(errors="replace").split("\0")
            names = [word for word in words[3:6] if word.startswith(LAB_PREFIX)]
            if names and "paceline/lab/inside/" in words[3] and path.stat().st_uid == os.getuid():
                labs[int(path.name)] = names[0]
    return labs


def _running_labs() -> set[str]:
    """Return the names of labs whose owner lives, and of those that are being made."""
    owned = {record.name for record in read_lab_records() if record.owner.alive}
    return owned | {folder.name for folder in find_lab_folders() if _is_being_made(folder)}


def _is_being_made(folder: Path) -> bool:
    """Return whether a folder is so new that its owner may not have written the record yet."""
    try:
        return not (folder / "lab.json").exists() and time.time() - folder.stat().st_mtime < _REMOVAL_SECONDS
    except FileNotFoundError:
        return False  # the lab has just ended


def _orphans(lab_of: Mapping[_Resource, str]) -> list[_Resource]:
    """Return the resources whose lab does not run."""
    # Running labs are listed after the resources were found, so that a lab that began in between is spared.
    running = _running_labs()
    return [resource for resource, lab in lab_of.items() if lab not in running]


def _kill_owners() -> None:
    owners = [record.owner for record in read_lab_records() if record.owner.alive]
    for owner in owners:
        with suppress(ProcessLookupError):
            os.kill(owner.pid, signal.SIGKILL)
    expires = time.monotonic() + _REMOVAL_SECONDS
    while any(owner.alive for owner in owners) and time.monotonic() < expires:
        time.sleep(0.01)


def _end_processes() -> list[int]:
    """Kill the processes that hold orphaned labs; the kernel then ends all others of their hosts."""
    ended: set[int] = set()
    expires = time.monotonic() + _REMOVAL_SECONDS
    while pids := _orphans(find_lab_processes()):
        for pid in pids:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        ended.update(pids)
        if time.monotonic() > expires:
            break
        time.sleep(0.02)
    return sorted(ended)


def _remove_orphan_groups(root: Path) -> list[str]:
    tops = [top for parent in _GROUP_PARENTS for top in sorted((root / parent).glob(f"{LAB_PREFIX}*"))]
    groups: list[str] = []
    for top in _orphans({top: top.name for top in tops}):
        with suppress(FileNotFoundError):  # its lab has just ended
            if top.stat().st_uid == os.getuid():
                groups += map(str, (top, *sorted(inner for inner in top.iterdir() if inner.is_dir())))
    return _remove_until_gone(groups)


def _remove_until_gone(groups: Sequence[str]) -> list[str]:
    """Remove control groups; return those that are gone."""
    # A group cannot be removed before its last process was reaped, which may take a moment.
    expires = time.monotonic() + _REMOVAL_SECONDS
    while any(Path(folder).exists() for folder in groups) and time.monotonic() < expires:
        remove_control_groups(groups)
        time.sleep(0.01)
    return [folder for folder in groups if not Path(folder).exists()]
