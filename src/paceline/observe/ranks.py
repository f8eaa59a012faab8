"""Where the time of every rank went: from the numbers of single rounds to one record a rank and window. Pure.

Communication is split in two: what a rank waited for ranks slower than itself, and the rest. In a round the
rank that waited least was the last to come, so what others waited beyond that is waiting for it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from paceline.observe.phases import PHASES

COLUMNS = ("seconds", *PHASES, "busy_seconds", "exposed_seconds", "sent_bytes", "cpu_seconds", "peak_bytes")
"""What a rank measures in a round. Busy and exposed are of its communication; the peak is of its life."""

_COMMUNICATION = 1 + PHASES.index("communication")


def rank_records(step: int, windows: Mapping[int, Sequence[Sequence[float]]]) -> list[dict[str, Any]]:
    """One record a rank.

    Args:
        step: last step of the window.
        windows: by rank, by round, the columns.
    """
    waits = {rank: [row[_COMMUNICATION] for row in rounds] for rank, rounds in windows.items()}
    least = [min(column) for column in zip(*waits.values(), strict=True)]
    return [
        {
            "step": step,
            "rank": rank,
            "rounds": len(rounds),
            **_sums(rounds),
            "waiting_seconds": sum(wait - low for wait, low in zip(waits[rank], least, strict=True)),
        }
        for rank, rounds in windows.items()
    ]


def _sums(rounds: Sequence[Sequence[float]]) -> Mapping[str, Any]:
    columns = dict(zip(COLUMNS, zip(*rounds, strict=True), strict=True))
    total = {name: sum(values) for name, values in columns.items()}
    hidden = [
        max(0.0, busy - seen)
        for busy, seen in zip(columns["busy_seconds"], columns["exposed_seconds"], strict=True)
    ]
    return {
        "seconds": total["seconds"],
        "slowest_seconds": max(columns["seconds"]),
        "phases": {phase: total[phase] for phase in PHASES},
        "hidden_seconds": sum(hidden),
        "sent_bytes": total["sent_bytes"],
        "cpu_seconds": total["cpu_seconds"],
        "peak_bytes": max(columns["peak_bytes"]),
    }
