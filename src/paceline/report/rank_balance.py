"""Where the time of each rank went in the steps of a run. Pure; from the records of the ranks.

The parts add up to the whole: what belongs to no phase is a part of its own.

How even the ranks of a run were: seconds, memory and bytes, what limits, and what to do. Pure.

A quantity is uneven where a rank has more than a tenth above the mean. The axis of the mesh along which it is
says why: stages that were cut unevenly, replicas on slower machines, tensors that do not divide.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import product
from statistics import fmean
from typing import TYPE_CHECKING, Any

from paceline.errors import StrategyError
from paceline.observe.step_stats import PHASES
from paceline.report.run_facts import format_bytes, format_duration
from paceline.report.run_reader import RecordedRun
from paceline.report.sent_bytes import compare_sent_bytes

if TYPE_CHECKING:
    from paceline.recipe.strategy import Strategy

TIME_PARTS = ("data", "forward", "backward", "transfer", "waiting", "optimizer", "other")
"""Transfer and waiting together are the communication that a rank saw; waiting is for slower ranks."""


@dataclass(frozen=True)
class RankTimes:
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


def rank_times(run: RecordedRun) -> list[RankTimes]:
    """Every rank of the last start that made a step, ascending."""
    by_rank: dict[int, list[Mapping[str, Any]]] = {}
    for record in run.last_training_records:
        if record.get("event") == "ranks":
            by_rank.setdefault(int(record["rank"]), []).append(record)
    return [_rank_times_of(rank, records) for rank, records in sorted(by_rank.items())]


def _rank_times_of(rank: int, records: Iterable[Mapping[str, Any]]) -> RankTimes:
    records = list(records)
    seconds = _sum_field(records, "seconds")
    phases = {name: sum(r["phases"][name] for r in records) for name in PHASES}  # others may stand there
    waiting = min(_sum_field(records, "waiting_seconds"), phases["communication"])
    parts = {
        "data": phases["data"],
        "forward": phases["forward"],
        "backward": phases["backward"],
        "transfer": phases["communication"] - waiting,
        "waiting": waiting,
        "optimizer": phases["optimizer"],
    }
    return RankTimes(
        rank=rank,
        rounds=int(_sum_field(records, "rounds")),
        seconds=seconds,
        parts={**parts, "other": max(0.0, seconds - sum(parts.values()))},
        hidden_seconds=_sum_field(records, "hidden_seconds"),
        cpu_seconds=_sum_field(records, "cpu_seconds"),
        peak_bytes=max(r["peak_bytes"] for r in records),
        slowest_seconds=max(r["slowest_seconds"] for r in records),
    )


def _sum_field(records: Iterable[Mapping[str, Any]], name: str) -> float:
    return float(sum(record[name] for record in records))


IMBALANCE_THRESHOLD = 1.1
"""A rank has this many times the mean: worth a sentence."""
_COMPUTE_PARTS = ("forward", "backward", "optimizer")
_MESH_AXES = (
    "replica",
    "shard",
    "pipeline",
    "context",
    "tensor",
)  # from the slowest changing rank to the fastest
_AXIS_LABELS = {"pipeline": "stage"}


@dataclass(frozen=True)
class RankLoad:
    """One rank; seconds and bytes of a round.

    Args:
        rank: whose.
        place: its coordinate on every axis of the mesh that has more than one rank.
        compute_seconds: in forward, backward and update.
        communication_seconds: in which it did nothing but communicate, waiting left out.
        idle_seconds: in which it waited for slower ranks.
        sent_bytes: that it put on the wire.
        peak_bytes: largest memory of its process.
    """

    rank: int
    place: Mapping[str, int]
    compute_seconds: float
    communication_seconds: float
    idle_seconds: float
    sent_bytes: float
    peak_bytes: float

    @property
    def called(self) -> str:
        """Its rank, and where it stands in the mesh."""
        where = ", ".join(f"{_AXIS_LABELS.get(axis, axis)} {number}" for axis, number in self.place.items())
        return f"rank {self.rank} ({where})" if where else f"rank {self.rank}"


@dataclass(frozen=True)
class LoadImbalance:
    """A quantity of which one rank has more than the others.

    Args:
        what: it is.
        share: of the rank with most.
        times: the mean, how often that is.
        axis: of the mesh, along which ranks differ most.
    """

    what: str
    share: RankLoad
    times: float
    axis: str


def rank_loads(run: RecordedRun) -> list[RankLoad]:
    """Every rank of the last start that made a step, ascending; empty if it ran alone."""
    times = rank_times(run)
    if len(times) < 2:
        return []
    by_rank = {one.rank: one.counted_bytes / one.rounds for one in compare_sent_bytes(run)}
    places = _mesh_coordinates(str(run.start.get("strategy", "")), len(times))
    return [
        RankLoad(
            one.rank,
            places.get(one.rank, {}),
            sum(one.parts[part] for part in _COMPUTE_PARTS) / one.rounds,
            one.parts["transfer"] / one.rounds,
            one.parts["waiting"] / one.rounds,
            by_rank.get(one.rank, 0.0),
            one.peak_bytes,
        )
        for one in times
    ]


def _mesh_coordinates(strategy: str, ranks: int) -> dict[int, dict[str, int]]:
    """Coordinates by rank, on axes with several ranks; empty where the words are not known here."""
    from paceline.recipe.strategy import Strategy  # commands that only name a run folder do without
    from paceline.recipe.support import fill_replicas

    try:
        found: Strategy = fill_replicas(Strategy.parse(strategy), ranks)
    except StrategyError:
        return {}
    degrees = found.degrees
    every = product(*(range(degrees[axis]) for axis in _MESH_AXES))
    return {
        rank: {axis: n for axis, n in zip(_MESH_AXES, place, strict=True) if degrees[axis] > 1}
        for rank, place in enumerate(every)
    }


_QUANTITIES: Mapping[str, Callable[[RankLoad], float]] = {
    "compute": lambda share: share.compute_seconds,
    "memory": lambda share: share.peak_bytes,
    "bytes sent": lambda share: share.sent_bytes,
}


def find_imbalances(shares: Sequence[RankLoad]) -> list[LoadImbalance]:
    """What is more than a tenth above the mean on some rank, the farthest first."""
    found = []
    for what, of in _QUANTITIES.items():
        mean = fmean(map(of, shares)) if shares else 0.0
        most = max(shares, key=of, default=None)
        if most is not None and mean > 0 and of(most) > IMBALANCE_THRESHOLD * mean:
            found.append(LoadImbalance(what, most, of(most) / mean, _most_uneven_axis(shares, of)))
    return sorted(found, key=lambda one: -one.times)


def _most_uneven_axis(shares: Sequence[RankLoad], of: Callable[[RankLoad], float]) -> str:
    """Along which axis the means of the ranks with one coordinate differ most."""
    spread: dict[str, float] = {}
    for axis in shares[0].place:
        by_place: dict[int, list[float]] = {}
        for share in shares:
            by_place.setdefault(share.place[axis], []).append(of(share))
        means = [fmean(values) for values in by_place.values()]
        spread[axis] = max(means) - min(means)
    return max(spread, key=lambda axis: spread[axis]) if spread else ""


_ADVICE = {
    ("compute", "pipeline"): 'cut by what layers take here: strategy.stages = "time"',
    (
        "compute",
        "replica",
    ): 'look at what else runs on its host, or deal by speed: strategy.balance = "speed"',
    ("compute", "shard"): "look at what else runs on its host; shards of the batch are dealt evenly",
    ("compute", "tensor"): "its parts of the layers are larger: choose a degree that divides them",
    ("compute", "context"): "its positions cost more: choose a degree that divides the sequence",
    (
        "memory",
        "pipeline",
    ): "schedule=1f1b keeps fewer micro-batches, rechunk runs them in parts, zero cuts the state in a stage",
    ("memory", "tensor"): "its parts of the layers are larger: choose a degree that divides them",
    (
        "memory",
        "replica",
    ): "the first rank writes and evaluates; `paceline plan memory` says what a rank needs",
    ("bytes sent", "pipeline"): "cut the stages where less passes between them",
}


def describe_balance(shares: Sequence[RankLoad]) -> Iterator[str]:
    """A sentence for each quantity that is uneven, and what to do about it; or that all are even."""
    if not shares:
        return
    found = find_imbalances(shares)
    if not found:
        yield "Ranks are even: compute, memory and bytes sent are within 10 % of their means."
        return
    for one in found:
        advice = _ADVICE.get((one.what, one.axis), "")
        text = f"{one.what.capitalize()} is uneven: {one.share.called} has {one.times:.2f} times the mean"
        yield f"{text}; {advice}." if advice else f"{text}."
    limits = max(shares, key=lambda share: share.compute_seconds)
    idlest = max(shares, key=lambda share: share.idle_seconds)
    if found[0].what == "compute" and idlest.idle_seconds > 0:
        waits = format_duration(idlest.idle_seconds)
        yield f"The round waits for {limits.called}: {idlest.called} is idle for {waits} of it."


def render_balance_rows(shares: Sequence[RankLoad]) -> list[list[str]]:
    """A row of text for each rank."""
    return [
        [
            share.called,
            format_duration(share.compute_seconds),
            format_duration(share.communication_seconds),
            format_duration(share.idle_seconds),
            format_bytes(share.sent_bytes),
            format_bytes(share.peak_bytes),
        ]
        for share in shares
    ]


BALANCE_HEADER = ("", "compute", "exposed communication", "idle", "sent", "peak memory")
