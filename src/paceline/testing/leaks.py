"""Leaks of a test: snapshots of its resources, and the differences between two of them.

Invariant: taking a snapshot changes nothing, and what other programs on the machine do is never a leak.
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

_SETTLE_SECONDS = 30.0  # for resources that are still ending, on a busy machine
_SHARED_MEMORY = Path("/dev/shm")
_IGNORED_VARIABLES = ("PYTEST_", "KMP_", "TORCHINDUCTOR_")  # pytest's own, and what imports set for good
_LASTING_SERVERS = (
    "multiprocessing.forkserver",
    "multiprocessing.resource_tracker",
    "torch/_inductor/compile_worker",
    "paceline.launch.fork_server",
)

ProcessKey = tuple[int, int]
"""The number of a process and the inode of its folder in /proc: a number is reused, the pair is not."""


@dataclass(frozen=True)
class ResourceSnapshot:
    """The resources of a test process at one moment.

    Args:
        environment: variables of this process, without those that pytest and imports set.
        threads: names of threads that are not daemons, by identity.
        processes: command lines of the descendants of this process, by number. Servers that are meant to stay
            (fork servers, resource tracker, compile workers) are left out, but not the processes they start.
        shared_memory: files of this user in /dev/shm.
        group: whether torch has a default process group.
        strangers: processes that are no descendants, and never will be.
    """

    environment: Mapping[str, str]
    threads: Mapping[int, str]
    processes: Mapping[int, str]
    shared_memory: frozenset[str]
    group: bool
    strangers: frozenset[ProcessKey] = frozenset()


def take_snapshot(before: ResourceSnapshot | None = None) -> ResourceSnapshot:
    """Return the present resources, in a millisecond or two; strangers of `before` are not read again."""
    tree = _ProcessTree.look(os.getpid(), frozenset() if before is None else before.strangers)
    return ResourceSnapshot(
        environment={
            name: value
            for name, value in process_environment().items()
            if not name.startswith(_IGNORED_VARIABLES)
        },
        threads={thread.ident or 0: thread.name for thread in threading.enumerate() if not thread.daemon},
        processes=tree.describe(),
        shared_memory=frozenset(_own_shared_memory()),
        group=_has_process_group(),
        strangers=tree.strangers,
    )


def find_leaks(before: ResourceSnapshot) -> list[str]:
    """Compare an earlier snapshot with the present; resources that are still ending get half a minute.

    Returns:
        One line for each leak.
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
    """Remove all leaks but threads, so that only the test that leaked fails."""
    now = take_snapshot()
    for name in now.shared_memory - before.shared_memory:
        if not _used_elsewhere(name):
            (_SHARED_MEMORY / name).unlink(missing_ok=True)
    added = {name: None for name in now.environment if name not in before.environment}
    change_environment({**added, **before.environment})
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
    """The descendants of a process.

    Args:
        root: the number of the process.
        children: children of every process that was read.
        strangers: processes whose ancestors are all known, without `root` among them.
    """

    root: int
    children: Mapping[int, Sequence[int]]
    strangers: frozenset[ProcessKey]

    @classmethod
    def look(cls, root: int, known: frozenset[ProcessKey] = frozenset()) -> _ProcessTree:
        """Read the processes that exist and are not known to be strangers."""
        with os.scandir("/proc") as entries:
            existing = {(int(entry.name), entry.inode()) for entry in entries if entry.name.isdecimal()}
        parents: dict[int, int] = {}
        children: dict[int, list[int]] = {}
        for pid, _ in existing - known:
            with suppress(OSError):
                state, parent = _read_stat(str(pid)).rpartition(b")")[2].split(maxsplit=2)[:2]
                parents[pid] = int(parent)
                if state not in b"ZX":
                    children.setdefault(int(parent), []).append(pid)
        strangers = {0, *(pid for pid, _ in known & existing)}
        while new := {pid for pid, parent in parents.items() if parent in strangers} - strangers - {root}:
            strangers |= new
        return cls(root, children, frozenset(process for process in existing if process[0] in strangers))

    def describe(self) -> dict[int, str]:
        """Return command lines by process id, without lasting servers, idle ranks and ending processes."""
        commands: dict[int, str] = {}
        children = self.children.get(self.root, ())
        pending = list(children)
        while pending:
            pid = pending.pop()
            pending += self.children.get(pid, ())
            with suppress(OSError):
                command = Path(f"/proc/{pid}/cmdline").read_text(errors="replace").replace("\0", " ").strip()
                if not command and not _has_memory(pid):
                    continue  # it is ending
                # Ranks have the command line of the server that forked them, but they are its children.
                if pid not in children or not any(name in command for name in _LASTING_SERVERS):
                    commands[pid] = command
        idle_ranks = rank_pool(os.getpid()).pids
        return {pid: command for pid, command in commands.items() if pid not in idle_ranks}


def _has_memory(pid: int) -> bool:
    """Return whether a process has memory."""
    # A new process has memory before it has a command line; a process that ends has none.
    return "VmSize" in Path(f"/proc/{pid}/status").read_text(errors="replace")


def _read_stat(pid: str) -> bytes:
    """Read the status line of a process with two system calls."""
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
    """Return whether a process outside of this test run has a segment mapped."""
    # By device and inode: the mapping of a semaphore does not show its name.
    try:
        status = (_SHARED_MEMORY / name).stat()
    except OSError:
        return True  # it is gone by now
    test_pids = {os.getpid(), *_ProcessTree.look(os.getpid()).describe()}
    needle = f" {os.major(status.st_dev):02x}:{os.minor(status.st_dev):02x} {status.st_ino} "
    for process in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):
            if int(process.name) not in test_pids and needle in (process / "maps").read_text(
                errors="replace"
            ):
                return True
    return False
