"""Small files between workers and their launcher: the phase of each worker, and the nodes of the job.

A worker that is stuck in a C call, or that a signal has stopped, cannot keep a deadline itself; its launcher
can, if it knows the phase. The list of nodes tells it which other launchers to probe. Invariants: a file is
complete or missing, and reading never fails. The list holds every node of the job once.
"""

from __future__ import annotations

import json
import os
import socket
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass
from pathlib import Path

from paceline.errors import PacelineError
from paceline.job.addresses import address_towards

CONNECTED = "running with the others"
TRAINING = "training"
TRAINING_FOR_SERVER = "training for a server"
"""The phase in which the job can continue without a worker that is lost."""
TRAINING_ELASTIC = "training as one of several replicas"
"""The phase in which the other ranks continue without one that is lost."""
LEAVING = "leaving"
_ABORT_FILE, _ABORT_SECONDS = "abort", 0.5
NOTHING_TO_SAVE = "stopped before the first step: there was nothing to save"


@dataclass(frozen=True)
class WorkerPhase:
    """One phase of a worker.

    Args:
        what: in words, as in "rank 1 is building the task".
        until: when it must be over, on this host's monotonic clock; None: it can take any time.
    """

    what: str
    until: float | None


def enter_phase(folder: Path | None, global_rank: int, what: str, seconds: float | None = None) -> None:
    """Report what this worker does from now on.

    Args:
        folder: folder of the launcher; None: there is no launcher.
        seconds: how long it can take; None: any time.
    """
    if folder is None:
        return
    until = None if seconds is None else time.monotonic() + seconds
    path = _phase_file(folder, global_rank)
    draft = path.with_suffix(".writing")
    try:
        draft.write_text(json.dumps(asdict(WorkerPhase(what, until))), encoding="utf-8")
        draft.rename(path)
    except OSError:  # the disk is full: the old phase would be taken for the present one
        path.unlink(missing_ok=True)


def read_phase(folder: Path, global_rank: int) -> WorkerPhase | None:
    """Return the phase that a worker reported last; None if it has reported none."""
    try:
        phase = json.loads(_phase_file(folder, global_rank).read_text(encoding="utf-8"))
        return WorkerPhase(str(phase["what"]), None if phase["until"] is None else float(phase["until"]))
    except (OSError, ValueError, KeyError, TypeError, OverflowError, RecursionError):
        return None


def stack_file(folder: Path, global_rank: int) -> Path:
    """Return the file to which a worker writes its stack when the launcher requests it."""
    return folder / f"rank-{global_rank}.stack"


_RUN_FOLDER_FILE = "run-folder"


def write_run_folder(folder: Path | None, run_dir: Path) -> None:
    """Report where the ranks show their current operations; all workers write the same.

    Args:
        folder: folder of the launcher; None: there is no launcher.
    """
    if folder is None:
        return
    draft = folder / f"{_RUN_FOLDER_FILE}.{os.getpid()}"
    with suppress(OSError):  # without it the launcher cannot explain a hang, and all else works
        draft.write_text(str(run_dir.resolve()), encoding="utf-8")
        draft.rename(folder / _RUN_FOLDER_FILE)


def read_run_folder(folder: Path) -> Path | None:
    """Return the run folder that the workers reported; None if they have reported none."""
    try:
        return Path((folder / _RUN_FOLDER_FILE).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None


def clear_run_folder(folder: Path) -> None:
    """Remove what an earlier job left."""
    (folder / _RUN_FOLDER_FILE).unlink(missing_ok=True)


def error_file(folder: Path, global_rank: int) -> Path:
    """Return the file in which a worker reports its exception."""
    return folder / f"rank-{global_rank}.json"


def has_raised(folder: Path | None, global_rank: int) -> bool:
    """Return whether a worker of this node has reported an exception that is not about a lost rank."""
    if folder is None:
        return False
    try:
        return not json.loads(error_file(folder, global_rank).read_text(encoding="utf-8"))["connection"]
    except (OSError, ValueError, KeyError, TypeError, RecursionError):
        return False


def clear_phase(folder: Path, global_rank: int) -> None:
    """Remove the phase that an earlier job left."""
    _phase_file(folder, global_rank).unlink(missing_ok=True)


def _phase_file(folder: Path, global_rank: int) -> Path:
    return folder / f"rank-{global_rank}.phase"


_NODE_LIST_FILE = "roster.json"


@dataclass(frozen=True)
class LauncherAddress:
    """The rank, host name and address of a node, and the ports of its launcher.

    Args:
        port: on which the launcher can be probed.
        store_port: on which it serves a store, in case that of the job is lost; 0: none.
    """

    rank: int
    host: str
    address: str
    port: int
    store_port: int = 0


def encode_launcher_address(
    node_rank: int, beacon_port: int, address: str, port: int, store_port: int = 0
) -> str:
    """Return the text with which a process tells the others about its node.

    Args:
        beacon_port: port on which its launcher can be probed; 0: none.
        address, port: address of the job's store.
        store_port: see `LauncherAddress`.
    """
    local_address = address_towards(address, port) if beacon_port else ""
    launcher = LauncherAddress(node_rank, socket.gethostname(), local_address, beacon_port, store_port)
    return json.dumps(asdict(launcher))


def decode_launcher_address(announcement: str) -> LauncherAddress | None:
    """Return what such a text says; None for an empty one."""
    return LauncherAddress(**json.loads(announcement)) if announcement else None


def decode_node_rank(announcement: str) -> int:
    """Return the rank of the node in such a text."""
    return int(json.loads(announcement)["rank"])


def write_node_list(folder: Path, announcements: Sequence[str]) -> None:
    """Write the nodes that all ranks have announced, without those whose launcher cannot be probed."""
    entries = map(json.loads, announcements)
    nodes = {entry["rank"]: entry for entry in entries if entry["port"]}
    draft = folder / f"{_NODE_LIST_FILE}.writing"
    draft.write_text(json.dumps(list(nodes.values())), encoding="utf-8")
    draft.rename(folder / _NODE_LIST_FILE)


def read_node_list(folder: Path) -> list[LauncherAddress]:
    """Return the nodes that the workers wrote; empty if they have not connected, or it cannot be read."""
    try:
        entries = json.loads((folder / _NODE_LIST_FILE).read_text(encoding="utf-8"))
        return [
            LauncherAddress(
                int(entry["rank"]),
                str(entry["host"]),
                str(entry["address"]),
                int(entry["port"]),
                int(entry["store_port"]),
            )
            for entry in entries
        ]
    except (OSError, ValueError, TypeError, KeyError, OverflowError, RecursionError):
        return []


def clear_node_list(folder: Path) -> None:
    """Remove the list that an earlier job left."""
    (folder / _NODE_LIST_FILE).unlink(missing_ok=True)


def request_abort(folder: Path) -> None:
    """Ask the workers of this node to end the collectives in which they wait, since some ranks are lost."""
    with suppress(OSError):  # then they wait until their deadline
        (folder / _ABORT_FILE).write_text(str(time.monotonic_ns()), encoding="ascii")


@contextmanager
def following_abort_requests(folder: Path | None, abort: Callable[[], object]) -> Iterator[None]:
    """Return a context manager in which a thread calls `abort` at each request of the launcher.

    Args:
        folder: folder of the launcher; None: there is no launcher.
        abort: is called in a thread of its own, since the main thread waits in a collective.
    """
    if folder is None:
        yield
        return
    path, over = folder / _ABORT_FILE, threading.Event()
    seen = _read_or_empty(path)

    def follow() -> None:
        nonlocal seen
        while not over.wait(_ABORT_SECONDS):
            text = _read_or_empty(path)
            if text != seen:
                seen = text
                with suppress(PacelineError):  # the store is gone as well, which the main thread will find
                    abort()

    threading.Thread(target=follow, daemon=True, name="abort-requests").start()
    try:
        yield
    finally:
        over.set()


def _read_or_empty(path: Path) -> str:
    try:
        return path.read_text(encoding="ascii")
    except OSError:
        return ""
