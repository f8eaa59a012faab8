"""What a test may leave behind, and how to find it.

Invariant: observing changes nothing, and what other programs on the machine do is no leak of this test.
"""

from __future__ import annotations

import gc
import os
import signal
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from paceline.job.cluster import change_environment, process_environment
from paceline.testing.rank_processes import rank_pool

_SETTLE_SECONDS = 30.0  # what ends by itself, also on a busy machine
_SHARED_MEMORY = Path("/dev/shm")
_IGNORED_VARIABLES = ("PYTEST_", "KMP_", "TORCHINDUCTOR_")  # pytest's own, and what imports set for good
_LASTING_SERVERS = (
    "multiprocessing.forkserver",
    "multiprocessing.resource_tracker",
    "torch/_inductor/compile_worker",
    "paceline.launch.fork_server",
)

ProcessKey = tuple[int, int]
"""A process by its number and the inode of its folder: a number comes again, both together do not."""


@dataclass(frozen=True)
class ResourceSnapshot:
    """What was there at one moment.

    Args:
        environment: the variables of this process, less those that pytest and imports set.
        threads: names of threads that are not daemons, by identity.
        processes: command lines of the descendants of this process, by number; servers that are meant to
            stay (fork servers, resource tracker, compile workers) are left out, what they start is not.
        shared_memory: this user's files in /dev/shm.
        group: torch has a default process group.
        strangers: numbers and inodes of processes that are no descendants, and never will be.
    """

    environment: Mapping[str, str]
    threads: Mapping[int, str]
    processes: Mapping[int, str]
    shared_memory: frozenset[str]
    group: bool
    strangers: frozenset[ProcessKey] = frozenset()


def take_snapshot(before: ResourceSnapshot | None = None) -> ResourceSnapshot:
    """Look around, within a millisecond or two; who was a stranger `before` is not looked at again."""
    family = _ProcessTree.look(os.getpid(), frozenset() if before is None else before.strangers)
    return ResourceSnapshot(
        environment={
            name: value
            for name, value in process_environment().items()
            if not name.startswith(_IGNORED_VARIABLES)
        },
        threads={thread.ident or 0: thread.name for thread in threading.enumerate() if not thread.daemon},
        processes=family.describe(),
        shared_memory=frozenset(_own_shared_memory()),
        group=_has_process_group(),
        strangers=family.strangers,
    )


def find_leaks(before: ResourceSnapshot) -> list[str]:
    """Compare with now; what may be on its way out gets half a minute to go.

    Returns:
        One line for each leak; empty if there is none.
    """
    expires = time.monotonic() + _SETTLE_SECONDS
    now = take_snapshot(before)
    lasting = _compare_state(before, now)
    passing = _compare_resources(before, now)
    if passing:
        gc.collect()
    while passing and time.monotonic() < expires:
        time.sleep(0.02)
        now = take_snapshot(now)
        passing = _compare_resources(before, now)
    return lasting + passing


def _compare_state(before: ResourceSnapshot, after: ResourceSnapshot) -> list[str]:
    names = before.environment.keys() | after.environment.keys()
    changed = sorted(name for name in names if before.environment.get(name) != after.environment.get(name))
    leaks = [f"environment variable {name}" for name in changed]
    if after.group and not before.group:
        leaks.append("the default process group of torch.distributed")
    return leaks


def _compare_resources(before: ResourceSnapshot, after: ResourceSnapshot) -> list[str]:
    threads = [name for ident, name in after.threads.items() if ident not in before.threads]
    processes = [f"{pid} {text}" for pid, text in after.processes.items() if pid not in before.processes]
    segments = sorted(after.shared_memory - before.shared_memory)
    return [
        *(f"thread {name!r}" for name in threads),
        *(f"process {text}" for text in processes),
        *(f"shared memory /dev/shm/{name}" for name in segments if not _used_elsewhere(name)),
    ]


def clean_up(before: ResourceSnapshot) -> None:
    """Undo what can be undone, so that only the test that leaked fails: all but threads."""
    now = take_snapshot()
    for name in now.shared_memory - before.shared_memory:
        if not _used_elsewhere(name):
            (_SHARED_MEMORY / name).unlink(missing_ok=True)
    gone = {name: None for name in now.environment if name not in before.environment}
    change_environment({**gone, **before.environment})
    for pid in now.processes.keys() - before.processes.keys():
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
    if now.group and not before.group:
        sys.modules["torch.distributed"].destroy_process_group()


def _has_process_group() -> bool:
    module = sys.modules.get("torch.distributed")
    return module is not None and bool(module.is_available() and module.is_initialized())


@dataclass(frozen=True)
class _ProcessTree:
    """The processes that come from one.

    Args:
        root: that one.
        children: by parent, of all that were read.
        strangers: those whose ancestors are all known, and `root` is none of them.
    """

    root: int
    children: Mapping[int, Sequence[int]]
    strangers: frozenset[ProcessKey]

    @classmethod
    def look(cls, root: int, known: frozenset[ProcessKey] = frozenset()) -> _ProcessTree:
        """Read the processes that are there and are not known to be strangers."""
        with os.scandir("/proc") as processes:
            there = {(int(one.name), one.inode()) for one in processes if one.name.isdecimal()}
        parents: dict[int, int] = {}
        children: dict[int, list[int]] = {}
        for pid, _ in there - known:
            with suppress(OSError):
                state, parent = _read_stat(str(pid)).rpartition(b")")[2].split(maxsplit=2)[:2]
                parents[pid] = int(parent)
                if state not in b"ZX":
                    children.setdefault(int(parent), []).append(pid)
        theirs = {0, *(pid for pid, _ in known & there)}
        while more := {pid for pid, parent in parents.items() if parent in theirs} - theirs - {root}:
            theirs |= more
        return cls(root, children, frozenset(entry for entry in there if entry[0] in theirs))

    def describe(self) -> dict[int, str]:
        """By number, the command lines; servers that are meant to stay, and what is ending, are left out."""
        found: dict[int, str] = {}
        own = self.children.get(self.root, ())
        todo = list(own)
        while todo:
            pid = todo.pop()
            todo += self.children.get(pid, ())
            with suppress(OSError):
                command = Path(f"/proc/{pid}/cmdline").read_text(errors="replace").replace("\0", " ").strip()
                if not command and not _has_memory(pid):
                    continue  # it is ending
                # Ranks have the command line of the server that forked them, but are its children, not ours.
                if pid not in own or not any(name in command for name in _LASTING_SERVERS):
                    found[pid] = command
        idle_ranks = rank_pool(os.getpid()).pids
        return {pid: command for pid, command in found.items() if pid not in idle_ranks}


def _has_memory(pid: int) -> bool:
    """Not once it ends; a program that has just begun has memory, and no words yet."""
    return "VmSize" in Path(f"/proc/{pid}/status").read_text(errors="replace")


def _read_stat(pid: str) -> bytes:
    """What the system says of a process, by two calls."""
    file = os.open(f"/proc/{pid}/stat", os.O_RDONLY)
    try:
        return os.read(file, 4096)
    finally:
        os.close(file)


def _own_shared_memory() -> list[str]:
    names: list[str] = []
    if _SHARED_MEMORY.is_dir():
        for path in _SHARED_MEMORY.iterdir():
            with suppress(OSError):
                if path.stat().st_uid == os.getuid():
                    names.append(path.name)
    return names


def _used_elsewhere(name: str) -> bool:
    """A process outside of this test run has it mapped: another program's segment.

    It is looked for by device and inode: what the system says of a semaphore's mapping is not its name.
    """
    try:
        there = (_SHARED_MEMORY / name).stat()
    except OSError:
        return True  # it is gone
    ours = {os.getpid(), *_ProcessTree.look(os.getpid()).describe()}
    needle = f" {os.major(there.st_dev):02x}:{os.minor(there.st_dev):02x} {there.st_ino} "
    for process in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):
            if int(process.name) not in ours and needle in (process / "maps").read_text(errors="replace"):
                return True
    return False
