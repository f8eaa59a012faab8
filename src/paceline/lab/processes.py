"""The processes of a host and its interfaces' counts, seen from outside.

Invariant: looking enters nothing and starts nothing.
"""

from __future__ import annotations

import os
import signal
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path


def members(first: int) -> list[int]:
    """The processes of a host but its first, as the machine numbers them; empty if the host is gone."""
    own = _process_namespace(str(first))
    if own is None:
        return []
    found = [int(path.name) for path in Path("/proc").glob("[0-9]*") if _process_namespace(path.name) == own]
    return sorted(pid for pid in found if pid != first)


def _process_namespace(pid: str) -> str | None:
    try:
        return os.readlink(f"/proc/{pid}/ns/pid")  # noqa: PTH115, called for every process of the machine
    except OSError:
        return None


def signal_all(pids: Sequence[int], number: signal.Signals) -> None:
    """Send a signal to each that is still there."""
    for pid in pids:
        with suppress(ProcessLookupError):
            os.kill(pid, number)


def interface_counts(first: int) -> Mapping[str, tuple[int, int]]:
    """Bytes received and sent by interface, in the network namespace of a process, from the kernel.

    Large segments that the kernel has not cut yet count with one header; see `counters` for bytes on the
    wire.
    """
    try:
        lines = Path(f"/proc/{first}/net/dev").read_text().splitlines()[2:]
    except OSError:
        return {}
    rows = {line.partition(":")[0].strip(): line.partition(":")[2].split() for line in lines}
    return {name: (int(row[0]), int(row[8])) for name, row in rows.items()}
