"""What a worker is doing outside of its steps, in a small file that its launcher reads.

A worker that is stuck in a C call, or that a signal has stopped, cannot keep a deadline itself; its launcher
can. Invariant: a phase that can be read is whole, and reading never fails.

The nodes of a job and how to ask their launchers whether they live, passed from workers to their launcher.

Invariant: the file of a node is complete or not there; it holds every node of the job once.
"""

from __future__ import annotations

import json
import socket
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from paceline.job.addresses import address_towards

CONNECTED = "running with the others"
TRAINING = "training"
TRAINING_FOR_SERVER = "training for a server"
"""The job may go on without a worker that is lost."""
LEAVING = "leaving"
NOTHING_TO_SAVE = "stopped before the first step: there was nothing to save"


@dataclass(frozen=True)
class WorkerPhase:
    """One phase of a worker.

    Args:
        what: in words, as in "rank 1 is building the task".
        until: when it has to be over, on this host's monotonic clock; None: it may take any time.
    """

    what: str
    until: float | None


def enter_phase(folder: Path | None, global_rank: int, what: str, seconds: float | None = None) -> None:
    """Say what this worker does from now on.

    Args:
        folder: of the launcher; None: nobody reads it.
        seconds: how long it may take; None: any time.
    """
    if folder is None:
        return
    until = None if seconds is None else time.monotonic() + seconds
    path = _phase_file(folder, global_rank)
    hidden = path.with_suffix(".writing")
    try:
        hidden.write_text(json.dumps(asdict(WorkerPhase(what, until))), encoding="utf-8")
        hidden.rename(path)
    except OSError:  # the disk is full: an old phase would be taken for the present one
        path.unlink(missing_ok=True)


def read_phase(folder: Path, global_rank: int) -> WorkerPhase | None:
    """What a worker said last; None if it has said nothing."""
    try:
        found = json.loads(_phase_file(folder, global_rank).read_text(encoding="utf-8"))
        return WorkerPhase(str(found["what"]), None if found["until"] is None else float(found["until"]))
    except (OSError, ValueError, KeyError, TypeError, OverflowError, RecursionError):
        return None


def clear_phase(folder: Path, global_rank: int) -> None:
    """Remove what an earlier job left."""
    _phase_file(folder, global_rank).unlink(missing_ok=True)


def _phase_file(folder: Path, global_rank: int) -> Path:
    return folder / f"rank-{global_rank}.phase"


_NODE_LIST_FILE = "roster.json"


@dataclass(frozen=True)
class LauncherAddress:
    """A node of a job: its rank, its name and address, and the port where its launcher answers."""

    rank: int
    host: str
    address: str
    port: int


def encode_launcher_address(node_rank: int, beacon_port: int, address: str, port: int) -> str:
    """What a process tells the others about its node, as text.

    Args:
        beacon_port: where its launcher answers; 0: nowhere.
        address, port: of the job's store.
    """
    own = address_towards(address, port) if beacon_port else ""
    return json.dumps(asdict(LauncherAddress(node_rank, socket.gethostname(), own, beacon_port)))


def decode_node_rank(announcement: str) -> int:
    """The rank of the node of a process that announced this."""
    return int(json.loads(announcement)["rank"])


def write_node_list(folder: Path, announcements: Sequence[str]) -> None:
    """Write down what all ranks have announced; nodes whose launcher does not answer are left out."""
    entries = map(json.loads, announcements)
    nodes = {entry["rank"]: entry for entry in entries if entry["port"]}
    hidden = folder / f"{_NODE_LIST_FILE}.writing"
    hidden.write_text(json.dumps(list(nodes.values())), encoding="utf-8")
    hidden.rename(folder / _NODE_LIST_FILE)


def read_node_list(folder: Path) -> list[LauncherAddress]:
    """What the workers wrote down; empty if they have not met, or it cannot be read."""
    try:
        entries = json.loads((folder / _NODE_LIST_FILE).read_text(encoding="utf-8"))
        return [
            LauncherAddress(int(entry["rank"]), str(entry["host"]), str(entry["address"]), int(entry["port"]))
            for entry in entries
        ]
    except (OSError, ValueError, TypeError, KeyError, OverflowError, RecursionError):
        return []


def clear_node_list(folder: Path) -> None:
    """Remove what an earlier job left."""
    (folder / _NODE_LIST_FILE).unlink(missing_ok=True)
