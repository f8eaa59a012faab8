"""What a job may leave behind on a machine: looked at before it and after it."""

from __future__ import annotations

import os
import time
from contextlib import suppress
from pathlib import Path

_NAMESPACES = ("net", "mnt", "ipc")


def things(folder: Path, server: int) -> dict[str, set[str]]:
    """All that a job may leave behind; `server` outlives it, and is to have let go of what it had for it."""
    own = os.getpid()
    running = [path for path in Path("/proc").glob("[0-9]*") if int(path.name) not in (own, server)]
    left = {path.name for path in (folder / "tmp").iterdir() if "inductor" not in path.name}
    return {
        "processes": {f"{path.name} {name}" for path in running if (name := name_of(path))},
        "descriptors": {f"{pid}: {_count(Path(f'/proc/{pid}/fd'))}" for pid in (own, server)},
        "shared memory": {path.name for path in Path("/dev/shm").iterdir()},
        "ports": _listening(),
        "namespaces": {f"{kind} {_link(path / 'ns' / kind)}" for path in running for kind in _NAMESPACES},
        "temporary folders": left,
    }


def name_of(process: Path) -> str:
    """The words that it was started by, empty for one without memory: a zombie, a thread of the kernel.

    Between the start of a program and its first instruction they are empty too, so they are waited for.
    """
    expires = time.monotonic() + 5.0
    while not (words := text_of(process / "cmdline")) and "VmSize" in text_of(process / "status"):
        if time.monotonic() > expires:
            return "without words"
        time.sleep(0.001)
    return words.replace("\0", " ")


def _count(folder: Path) -> int:
    return sum(1 for _ in folder.iterdir())


def _link(path: Path) -> str:
    with suppress(OSError):
        return str(path.readlink())
    return ""


def _listening() -> set[str]:
    tcp = [
        line.split()
        for name in ("tcp", "tcp6")
        for line in Path(f"/proc/net/{name}").read_text().splitlines()[1:]
    ]
    local = [line.split() for line in Path("/proc/net/unix").read_text().splitlines()[1:]]
    return {f[1] for f in tcp if f[3] == "0A"} | {f[-1] for f in local if f[3] == "00010000"}


def left_of(
    folder: Path, server: int, before: dict[str, set[str]], seconds: float = 60.0
) -> dict[str, list[str]]:
    """What is there and was not, once it has had some seconds to go."""
    expires = time.monotonic() + seconds
    while True:
        more = {kind: sorted(now - before[kind]) for kind, now in things(folder, server).items()}
        more = {kind: some for kind, some in more.items() if some}
        if not more or time.monotonic() > expires:
            return more
        time.sleep(0.05)


def text_of(path: Path) -> str:
    with suppress(OSError):
        return path.read_text(errors="replace").strip()
    return ""


def children_of(pid: int) -> list[int]:
    with suppress(OSError):
        tasks = Path(f"/proc/{pid}/task").iterdir()
        return [int(child) for task in tasks for child in (task / "children").read_text().split()]
    return []
