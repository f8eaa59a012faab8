"""Which other nodes can still be reached: asked once, when a rank of this node has lost a connection.

Every launcher of a job of several nodes listens on a port where nobody answers but the kernel, as long as
the launcher lives. Workers tell each other these addresses when they join, and note them for their launcher.
Invariant: asking takes at most `_ANSWER_SECONDS`, and a launcher that saw a failure can be asked for
`_LINGER_SECONDS`, so nodes that end because of the same failure do not accuse each other.
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
    """What is wrong with a node, or the empty text."""
    name = f"node {node.rank} ({node.host}, {node.address})"
    try:
        socket.create_connection((node.address, node.port), timeout=_ANSWER_SECONDS).close()
    except ConnectionRefusedError:
        return f"{name} is gone: its launcher no longer runs"
    except OSError:
        return f"{name} does not answer: it, or the network to it, is down"
    return ""


def _listen(towards: tuple[str, int]) -> socket.socket:
    """A port of the address by which the other nodes know this one; without a route to them, of none."""
    return listen_at(address_towards(*towards) or loopback_address(), 0, _BACKLOG)


@dataclass
class _LivenessQuery:
    thread: threading.Thread
    answers: list[str]
    asked_at: float


class NodeLivenessProbe:
    """The other nodes of a job, from this node's launcher.

    Args:
        nodes, node_rank: of the job; with one node this does nothing.
        folder: where this node's workers write the roster.
        towards: host and port of the rendezvous; only the address from which it is reached is listened on.
    """

    def __init__(self, nodes: int, node_rank: int, folder: Path, towards: tuple[str, int]) -> None:
        self._node_rank, self._folder = node_rank, folder
        self._listener = _listen(towards) if nodes > 1 else None
        self._query: _LivenessQuery | None = None

    @property
    def port(self) -> int:
        """Where this launcher answers; 0: nowhere."""
        return 0 if self._listener is None else int(self._listener.getsockname()[1])

    def ask(self) -> None:
        """Ask all nodes now, in the background; only the first time."""
        if self._listener is None or self._query is not None:
            return
        answers: list[str] = []
        thread = threading.Thread(target=self._collect, args=(answers,), name="paceline-peers", daemon=True)
        self._query = _LivenessQuery(thread, answers, time.monotonic())
        thread.start()

    def _collect(self, answers: list[str]) -> None:
        others = [node for node in read_node_list(self._folder) if node.rank != self._node_rank]
        if others:
            with ThreadPoolExecutor(min(64, len(others))) as pool:
                answers += pool.map(probe_node, others)

    def lost(self) -> Sequence[str]:
        """One line for each node that did not answer."""
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
            time.sleep(max(0.0, self._query.asked_at + _LINGER_SECONDS - time.monotonic()))
        if self._listener is not None:
            self._listener.close()
