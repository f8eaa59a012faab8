"""The nodes of a job and how to ask their launchers whether they live, passed from workers to their launcher.

Invariant: the file of a node is complete or not there; it holds every node of the job once.
"""

from __future__ import annotations

import json
import socket
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from paceline.addresses import address_towards

_FILE = "roster.json"


@dataclass(frozen=True)
class Node:
    """A node of a job: its rank, its name and address, and the port where its launcher answers."""

    rank: int
    host: str
    address: str
    port: int


def announce(node_rank: int, beacon_port: int, address: str, port: int) -> str:
    """What a process tells the others about its node, as text.

    Args:
        beacon_port: where its launcher answers; 0: nowhere.
        address, port: of the job's store.
    """
    own = address_towards(address, port) if beacon_port else ""
    return json.dumps(asdict(Node(node_rank, socket.gethostname(), own, beacon_port)))


def node_of(announcement: str) -> int:
    """The rank of the node of a process that announced this."""
    return int(json.loads(announcement)["rank"])


def write_roster(folder: Path, announcements: Sequence[str]) -> None:
    """Write down what all ranks have announced; nodes whose launcher does not answer are left out."""
    entries = map(json.loads, announcements)
    nodes = {entry["rank"]: entry for entry in entries if entry["port"]}
    hidden = folder / f"{_FILE}.writing"
    hidden.write_text(json.dumps(list(nodes.values())), encoding="utf-8")
    hidden.rename(folder / _FILE)


def read_roster(folder: Path) -> list[Node]:
    """What the workers wrote down; empty if they have not met, or it cannot be read."""
    try:
        entries = json.loads((folder / _FILE).read_text(encoding="utf-8"))
        return [
            Node(int(entry["rank"]), str(entry["host"]), str(entry["address"]), int(entry["port"]))
            for entry in entries
        ]
    except (OSError, ValueError, TypeError, KeyError, OverflowError, RecursionError):
        return []


def clear_roster(folder: Path) -> None:
    """Remove what an earlier job left."""
    (folder / _FILE).unlink(missing_ok=True)
