"""The TCP connections of some processes: bytes, retransmits and round-trip times, as the kernel counts them.

Linux has no counters of network bytes by process, and TCP_INFO of a socket is read inside its process or by
the kernel's socket diagnostics, which `ss` of iproute2 prints. Invariant: without `ss` there are no rows, and
no error. Not counted: UDP, RDMA, shared memory, and what a connection sent between the last sample and its
end.
"""

from __future__ import annotations

import re
import shutil
import subprocess
from collections.abc import Iterator
from typing import NamedTuple

_COMMAND = ("ss", "--tcp", "--info", "--numeric", "--processes", "--no-header")
_SECONDS = 5.0
_PID = re.compile(r"\bpid=(\d+)")
_NUMBERS = {
    "bytes_sent": re.compile(r"\bbytes_sent:(\d+)"),
    "bytes_received": re.compile(r"\bbytes_received:(\d+)"),
    "retransmits": re.compile(r"\bretrans:\d+/(\d+)"),
    "rtt": re.compile(r"\brtt:([\d.]+)"),
}


class TcpConnection(NamedTuple):
    """A connection, seen from one of its ends.

    Args:
        pids: processes that hold this end.
        local, peer: addresses of both ends, as "HOST:PORT".
        sent_bytes: since it was opened; what was sent again counts again.
        received_bytes: since it was opened.
        retransmits: segments that were sent again.
        round_trip_seconds: the kernel's smoothed estimate; 0 if it has none yet.
    """

    pids: tuple[int, ...]
    local: str
    peer: str
    sent_bytes: int
    received_bytes: int
    retransmits: int
    round_trip_seconds: float

    @property
    def peer_host(self) -> str:
        """The address of the other end, without its port."""
        return self.peer.rpartition(":")[0].strip("[]").removeprefix("::ffff:")


def why_no_connections() -> str:
    """Return why `read_connections` returns nothing here; empty if it can return something."""
    return "" if shutil.which(_COMMAND[0]) else "ss of iproute2 is not installed"


def read_connections() -> list[TcpConnection]:
    """Return the connections of this network namespace whose processes this user may see."""
    try:
        result = subprocess.run(
            _COMMAND, capture_output=True, text=True, errors="replace", timeout=_SECONDS, check=False
        )
    except (OSError, subprocess.TimeoutExpired):
        return []
    return list(parse_connections(result.stdout))


def parse_connections(text: str) -> Iterator[TcpConnection]:
    """Yield the connections that `ss` has printed; lines that begin with a space continue the one before."""
    blocks: list[str] = []
    for line in text.splitlines():
        if line[:1].isspace() and blocks:
            blocks[-1] += line
        else:
            blocks.append(line)
    for block in blocks:
        words = block.split(maxsplit=5)
        if len(words) < 6 or ":" not in words[3] or ":" not in words[4]:
            continue
        found = {name: pattern.search(words[5]) for name, pattern in _NUMBERS.items()}
        number = {name: float(match[1]) if match else 0.0 for name, match in found.items()}
        yield TcpConnection(
            tuple(map(int, _PID.findall(words[5]))),
            words[3],
            words[4],
            int(number["bytes_sent"]),
            int(number["bytes_received"]),
            int(number["retransmits"]),
            number["rtt"] / 1000,
        )
