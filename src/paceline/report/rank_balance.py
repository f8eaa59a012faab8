"""The time of each rank in the steps of a run, and how evenly time, memory and bytes are spread. Pure.

The parts of a rank's time add up to the whole: time that belongs to no phase is the part "other". A quantity
is uneven if one rank has more than 1.1 times the mean. The mesh axis along which ranks differ most shows the
cause: stages that were cut unevenly, replicas on slower machines, tensors that do not divide evenly.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import product
from statistics import fmean
from typing import TYPE_CHECKING, Any

from paceline.errors import StrategyError
from paceline.observe.step_stats import PHASES
from paceline.report.number_format import format_duration
from paceline.report.run_reader import RecordedRun
from paceline.report.sent_bytes import compare_sent_bytes

if TYPE_CHECKING:
    from paceline.recipe.strategy import Strategy

TIME_PARTS = ("data", "forward", "backward", "transfer", "waiting", "optimizer", "other")
"""Transfer and waiting are exposed communication; waiting is the part spent on slower ranks."""


@dataclass(frozen=True)
class RankTimes:
    """The time of one rank over a number of rounds.

    Args:
        rank: global rank.
        rounds: number of rounds.
        seconds: their wall time.
        parts: seconds by part of `TIME_PARTS`; their sum is `seconds`.
        hidden_seconds: communication that overlapped with other work.
        cpu_seconds: CPU time of the process.
        peak_bytes: peak memory of the process.
        slowest_seconds: wall time of the longest round.
    """

    rank: int
    rounds: int
    seconds: float
    parts: Mapping[str, float]
    hidden_seconds: float
    cpu_seconds: float
    peak_bytes: float
    slowest_seconds: float

    def share(self, phase: str) -> float:
        """Return the fraction of the time that a part took, 0 to 1."""
        return self.parts[phase] / self.seconds if self.seconds > 0 else 0.0

    @property
    def communication(self) -> float:
        """Fraction of the time in exposed communication, with waiting, 0 to 1."""
        return self.share("transfer") + self.share("waiting")

    @property
    def hidden_fraction(self) -> float:
        """Fraction of all communication that was hidden behind other work, 0 to 1."""
        exposed = self.parts["transfer"] + self.parts["waiting"]
        total = exposed + self.hidden_seconds
        return self.hidden_seconds / total if total > 0 else 0.0


def rank_times(run: RecordedRun) -> list[RankTimes]:
    """Return the times of every rank in the last start that took a step, ascending by rank."""
    by_rank: dict[int, list[Mapping[str, Any]]] = {}
    for record in run.last_training_records:
        if record.get("event") == "ranks":
            by_rank.setdefault(int(record["rank"]), []).append(record)
    return [rank_times_of_records(rank, records) for rank, records in sorted(by_rank.items())]


def rank_times_of_records(rank: int, records: Iterable[Mapping[str, Any]]) -> RankTimes:
    """Return the time of one rank over all rounds of some of its `ranks` records, at least one."""
    records = list(records)
    seconds = _sum_field(records, "seconds")
    phases = {
        name: sum(r["phases"][name] for r in records) for name in PHASES
    }  # a newer version may add phases
    waiting = min(_sum_field(records, "waiting_seconds"), phases["communication"])
    seconds_by_phase = {
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
        parts={**seconds_by_phase, "other": max(0.0, seconds - sum(seconds_by_phase.values()))},
        hidden_seconds=_sum_field(records, "hidden_seconds"),
        cpu_seconds=_sum_field(records, "cpu_seconds"),
        peak_bytes=max(r["peak_bytes"] for r in records),
        slowest_seconds=max(r["slowest_seconds"] for r in records),
    )


def _sum_field(records: Iterable[Mapping[str, Any]], name: str) -> float:
    return float(sum(record[name] for record in records))


IMBALANCE_THRESHOLD = 1.1
"""The ratio to the mean above which a rank is reported as uneven."""
COMPUTE_PARTS = ("forward", "backward", "optimizer")
_MESH_AXES = (
    "replica",
    "shard",
    "pipeline",
    "context",
    "tensor",
)  # the last one changes fastest with the rank
_AXIS_LABELS = {"pipeline": "stage"}


@dataclass(frozen=True)
class RankLoad:
    """The load of one rank; seconds and sent bytes are per round.

    Args:
        rank: global rank.
        coordinates: position on every mesh axis that has more than one rank.
        compute_seconds: in forward, backward and update.
        communication_seconds: in exposed communication, without waiting.
        idle_seconds: waiting for slower ranks.
        sent_bytes: bytes that this rank sent.
        peak_bytes: peak memory of the process.
    """

    rank: int
    coordinates: Mapping[str, int]
    compute_seconds: float
    communication_seconds: float
    idle_seconds: float
    sent_bytes: float
    peak_bytes: float

    @property
    def label(self) -> str:
        """The rank with its coordinates, such as "rank 3 (replica 1, stage 1)"."""
        names = (f"{_AXIS_LABELS.get(axis, axis)} {index}" for axis, index in self.coordinates.items())
        text = ", ".join(names)
        return f"rank {self.rank} ({text})" if text else f"rank {self.rank}"


@dataclass(frozen=True)
class LoadImbalance:
    """A quantity of which one rank has more than the others.

    Args:
        quantity: "compute", "memory" or "bytes sent".
        load: the rank with the most.
        ratio: its value divided by the mean.
        axis: the mesh axis along which ranks differ most; empty if they have no coordinates.
    """

    quantity: str
    load: RankLoad
    ratio: float
    axis: str


def rank_loads(run: RecordedRun) -> list[RankLoad]:
    """Return the load of every rank in the last start that took a step, by rank; empty for one process."""
    times = rank_times(run)
    if len(times) < 2:
        return []
    sent_bytes = {sent.rank: sent.counted_bytes / sent.rounds for sent in compare_sent_bytes(run)}
    # After a change of members not all ranks need to have records.
    num_ranks = 1 + max(time.rank for time in times)
    coordinates = _mesh_coordinates(str(run.start.get("strategy", "")), num_ranks)
    return [
        RankLoad(
            time.rank,
            coordinates.get(time.rank, {}),
            sum(time.parts[phase] for phase in COMPUTE_PARTS) / time.rounds,
            time.parts["transfer"] / time.rounds,
            time.parts["waiting"] / time.rounds,
            sent_bytes.get(time.rank, 0.0),
            time.peak_bytes,
        )
        for time in times
    ]


def _mesh_coordinates(strategy: str, num_ranks: int) -> dict[int, dict[str, int]]:
    """Return the coordinates of each rank; empty if the strategy has words that are not installed here."""
    # pydantic takes long to import, and commands that only name a run folder do without it.
    from paceline.recipe.strategy import Strategy
    from paceline.recipe.support import fill_replicas

    try:
        parsed: Strategy = fill_replicas(Strategy.parse(strategy), num_ranks)
    except StrategyError:
        return {}
    degrees = parsed.degrees
    grid = product(*(range(degrees[axis]) for axis in _MESH_AXES))
    return {
        rank: {axis: index for axis, index in zip(_MESH_AXES, indices, strict=True) if degrees[axis] > 1}
        for rank, indices in enumerate(grid)
    }


_QUANTITIES: Mapping[str, Callable[[RankLoad], float]] = {
    "compute": lambda load: load.compute_seconds,
    "memory": lambda load: load.peak_bytes,
    "bytes sent": lambda load: load.sent_bytes,
}


def find_imbalances(loads: Sequence[RankLoad]) -> list[LoadImbalance]:
    """Return the quantities that are uneven, the largest ratio first."""
    imbalances = []
    for quantity, value_of in _QUANTITIES.items():
        mean = fmean(map(value_of, loads)) if loads else 0.0
        largest = max(loads, key=value_of, default=None)
        if largest is not None and mean > 0 and value_of(largest) > IMBALANCE_THRESHOLD * mean:
            axis = _most_uneven_axis(loads, value_of)
            imbalances.append(LoadImbalance(quantity, largest, value_of(largest) / mean, axis))
    return sorted(imbalances, key=lambda imbalance: -imbalance.ratio)


def _most_uneven_axis(loads: Sequence[RankLoad], value_of: Callable[[RankLoad], float]) -> str:
    """Return the axis along which the means over ranks with equal coordinates differ most."""
    spread: dict[str, float] = {}
    # A rank that has joined may be outside of the mesh of the strategy.
    for axis in (axis for axis in loads[0].coordinates if all(axis in load.coordinates for load in loads)):
        values: dict[int, list[float]] = {}
        for load in loads:
            values.setdefault(load.coordinates[axis], []).append(value_of(load))
        means = [fmean(group) for group in values.values()]
        spread[axis] = max(means) - min(means)
    return max(spread, key=lambda axis: spread[axis]) if spread else ""


_ADVICE = {
    ("compute", "pipeline"): 'cut the stages by measured time: strategy.stages = "time"',
    ("compute", "replica"): "check what else runs on its host, or give faster replicas more work:"
    ' strategy.balance = "speed"',
    ("compute", "shard"): "check what else runs on its host; the batch is divided evenly among shards",
    ("compute", "tensor"): "its parts of the layers are larger: choose a degree that divides them",
    ("compute", "context"): "its positions cost more: choose a degree that divides the sequence",
    (
        "memory",
        "pipeline",
    ): "schedule=1f1b keeps fewer micro-batches, rechunk runs them in parts, and zero shards"
    " the state of a stage",
    ("memory", "tensor"): "its parts of the layers are larger: choose a degree that divides them",
    ("memory", "replica"): "the first rank also saves and evaluates; `paceline plan memory` shows what a rank"
    " needs",
    ("bytes sent", "pipeline"): "cut the stages where activations are smaller",
}


def describe_balance(loads: Sequence[RankLoad]) -> Iterator[str]:
    """Yield a sentence with advice for each uneven quantity, or one sentence if all are even."""
    if not loads:
        return
    imbalances = find_imbalances(loads)
    if not imbalances:
        yield "The ranks are even: compute, memory and bytes sent are within 10 % of their means."
        return
    for imbalance in imbalances:
        advice = _ADVICE.get((imbalance.quantity, imbalance.axis), "")
        verb = "are" if imbalance.quantity == "bytes sent" else "is"
        text = (
            f"{imbalance.quantity.capitalize()} {verb} uneven: {imbalance.load.label} has"
            f" {imbalance.ratio:.2f} times the mean"
        )
        yield f"{text}; {advice}." if advice else f"{text}."
    slowest = max(loads, key=lambda load: load.compute_seconds)
    idlest = max(loads, key=lambda load: load.idle_seconds)
    if imbalances[0].quantity == "compute" and idlest.idle_seconds > 0:
        idle = format_duration(idlest.idle_seconds)
        yield f"Each round waits for {slowest.label}; {idlest.label} is idle for {idle} of it."
