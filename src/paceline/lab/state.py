"""What is written down about a lab, so that another process can look into it and clean up after it.

Invariant: a lab's folder is there before anything of the lab is, and goes last. A process is known by its
number and the time it started, so a number that was given to another process is never mistaken for it.
"""

from __future__ import annotations

import json
import os
import secrets
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path

PREFIX = "paceline-lab-"


@dataclass(frozen=True)
class Process:
    """A process by number and start time (in clock ticks since the machine started)."""

    pid: int
    started: int

    @classmethod
    def of(cls, pid: int) -> Process:
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
class Record:
    """A lab.

    Args:
        name: unique on this machine, begins with `PREFIX`.
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
    owner: Process
    first: dict[str, Process] = field(default_factory=dict)
    holders: dict[str, Process] = field(default_factory=dict)
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
    def load(cls, folder: Path) -> Record:
        """Read what `save` wrote.

        Raises:
            OSError, ValueError, KeyError, TypeError: there is none, or it was not written by this version.
        """
        found = json.loads((folder / "lab.json").read_text(encoding="utf-8"))
        for name in ("first", "holders"):
            found[name] = {host: Process(**value) for host, value in found[name].items()}
        owner, kinds = Process(**found.pop("owner")), tuple(found.pop("kinds"))
        return cls(**{**found, "folder": folder}, owner=owner, kinds=kinds)


def root_folder() -> Path:
    """Where the labs of this user write; private to the user."""
    return Path(tempfile.gettempdir()) / f"paceline-labs-{os.getuid()}"


def new_record() -> Record:
    """Make the folder of a new lab that this process owns."""
    name = PREFIX + secrets.token_hex(4)
    folder = root_folder() / name
    while not folder.exists():
        root_folder().mkdir(mode=0o700, exist_ok=True)
        with suppress(FileNotFoundError):  # another lab was the last one, and took the folder of all with it
            folder.mkdir(mode=0o700)
    record = Record(name, folder, Process.of(os.getpid()))
    record.save()
    return record


def folders() -> Iterator[Path]:
    """The folders of all labs of this user, oldest first."""
    found: dict[Path, float] = {}
    if root_folder().is_dir():
        for path in root_folder().glob(f"{PREFIX}*"):
            with suppress(FileNotFoundError):  # its lab has just ended
                found[path] = path.stat().st_mtime
    yield from sorted(found, key=lambda path: found[path])


def records() -> Iterator[Record]:
    """All labs of this user that can be read, oldest first."""
    for folder in folders():
        try:
            yield Record.load(folder)
        except (OSError, ValueError, KeyError, TypeError):
            continue  # half made when its owner was killed; `clean` removes it


def remove_folder(folder: Path) -> None:
    """Remove a lab's folder, and the folder of all labs when it was the last one."""
    shutil.rmtree(folder, ignore_errors=True)
    try:
        root_folder().rmdir()
    except OSError:
        return  # other labs
