"""A probe that finds out which other nodes can be reached, once, after a rank of this node has failed.

Every launcher of a multi-node job listens on a port, on which the kernel accepts connections as long as the
launcher lives. Workers exchange these addresses when they join and write them to a file for their launcher.
Invariant: a probe takes at most `_ANSWER_SECONDS`, and a launcher that saw a failure can be probed for
`_LINGER_SECONDS`, so nodes that end because of the same failure do not blame each other.
"""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Self

from paceline.job.addresses import address_towards, listen_at, loopback_address
from paceline.job.launcher_reports import LauncherAddress, read_node_list

_ANSWER_SECONDS = 1.0
_LINGER_SECONDS = 2.5
_BACKLOG = 1024


def probe_node(node: LauncherAddress) -> str:
    """Return a line that says what is wrong with a node; empty if its launcher runs."""
    name = f"node {node.rank} ({node.host}, {node.address})"
    try:
        socket.create_connection((node.address, node.port), timeout=_ANSWER_SECONDS).close()
    except ConnectionRefusedError:
        return f"{name} is gone: its launcher no longer runs"
    except OSError:
        return f"{name} does not respond: the node or its network is down"
    return ""


def _listen(towards: tuple[str, int]) -> socket.socket:
    # only on the address through which the others know this node; without a route, on the loopback
    return listen_at(address_towards(*towards) or loopback_address(), 0, _BACKLOG)


@dataclass
class _LivenessQuery:
    thread: threading.Thread
    answers: list[str]
    started_at: float


class NodeLivenessProbe:
    """The probe of one launcher, and the port on which other launchers probe it.

    Args:
        nodes, node_rank: number of nodes of the job, and this one's rank; with one node this does nothing.
        folder: folder in which this node's workers write the list of nodes.
        towards: host and port of the rendezvous; the probe listens on the address that leads there.
    """

    def __init__(self, nodes: int, node_rank: int, folder: Path, towards: tuple[str, int]) -> None:
        self._node_rank, self._folder = node_rank, folder
        self._listener = _listen(towards) if nodes > 1 else None
        self._query: _LivenessQuery | None = None

    @property
    def port(self) -> int:
        """The port on which this launcher can be probed; 0: none."""
        return 0 if self._listener is None else int(self._listener.getsockname()[1])

    def start_query(self) -> None:
        """Probe all other nodes in the background; only the first call does something."""
        if self._listener is None or self._query is not None:
            return
        answers: list[str] = []
        # A daemon: a node that does not answer must not keep the launcher from exiting.
        thread = threading.Thread(target=self._collect, args=(answers,), name="paceline-peers", daemon=True)
        self._query = _LivenessQuery(thread, answers, time.monotonic())
        thread.start()

    def _collect(self, answers: list[str]) -> None:
        others = [node for node in read_node_list(self._folder) if node.rank != self._node_rank]
        if others:
            with ThreadPoolExecutor(min(64, len(others))) as pool:
                answers += pool.map(probe_node, others)

    def lost(self) -> Sequence[str]:
        """Return one line for each node that did not respond."""
        if self._query is None:
            return ()
        self._query.thread.join(10 * _ANSWER_SECONDS)
        return [answer for answer in self._query.answers if answer]

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: object, traceback: TracebackType | None
    ) -> None:
        if self._query is not None:
            time.sleep(max(0.0, self._query.started_at + _LINGER_SECONDS - time.monotonic()))
        if self._listener is not None:
            self._listener.close()
