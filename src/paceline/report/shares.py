"""Where the time of each rank went in the steps of a run. Pure; from the records of the ranks.

The parts add up to the whole: what belongs to no phase is a part of its own.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from paceline.observe.phases import PHASES
from paceline.report.read import Run

PARTS = ("data", "forward", "backward", "transfer", "waiting", "optimizer", "other")
"""Transfer and waiting together are the communication that a rank saw; waiting is for slower ranks."""


@dataclass(frozen=True)
class RankTime:
    """One rank over some rounds.

    Args:
        rank: whose.
        rounds: how many.
        seconds: wall time in them.
        parts: seconds by part; their sum is `seconds`.
        hidden_seconds: communication that went on behind something else.
        cpu_seconds: processor time.
        peak_bytes: largest memory of the process.
        slowest_seconds: the longest round.
    """

    rank: int
    rounds: int
    seconds: float
    parts: Mapping[str, float]
    hidden_seconds: float
    cpu_seconds: float
    peak_bytes: float
    slowest_seconds: float

    def share(self, part: str) -> float:
        """A part of the time, 0 to 1."""
        return self.parts[part] / self.seconds if self.seconds > 0 else 0.0

    @property
    def communication(self) -> float:
        """Share of the time in which this rank did nothing but communicate or wait, 0 to 1."""
        return self.share("transfer") + self.share("waiting")

    @property
    def hidden_fraction(self) -> float:
        """Share of all communication that nobody had to wait for, 0 to 1."""
        seen = self.parts["transfer"] + self.parts["waiting"]
        whole = seen + self.hidden_seconds
        return self.hidden_seconds / whole if whole > 0 else 0.0


def rank_times(run: Run) -> list[RankTime]:
    """Every rank of the last start that made a step, ascending."""
    by_rank: dict[int, list[Mapping[str, Any]]] = {}
    for record in run.last_trained:
        if record.get("event") == "ranks":
            by_rank.setdefault(int(record["rank"]), []).append(record)
    return [_of(rank, records) for rank, records in sorted(by_rank.items())]


def _of(rank: int, records: Iterable[Mapping[str, Any]]) -> RankTime:
    records = list(records)
    seconds = _sum(records, "seconds")
    phases = {name: sum(r["phases"][name] for r in records) for name in PHASES}  # others may stand there
    waiting = min(_sum(records, "waiting_seconds"), phases["communication"])
    parts = {
        "data": phases["data"],
        "forward": phases["forward"],
        "backward": phases["backward"],
        "transfer": phases["communication"] - waiting,
        "waiting": waiting,
        "optimizer": phases["optimizer"],
    }
    return RankTime(
        rank=rank,
        rounds=int(_sum(records, "rounds")),
        seconds=seconds,
        parts={**parts, "other": max(0.0, seconds - sum(parts.values()))},
        hidden_seconds=_sum(records, "hidden_seconds"),
        cpu_seconds=_sum(records, "cpu_seconds"),
        peak_bytes=max(r["peak_bytes"] for r in records),
        slowest_seconds=max(r["slowest_seconds"] for r in records),
    )


def _sum(records: Iterable[Mapping[str, Any]], name: str) -> float:
    return float(sum(record[name] for record in records))
