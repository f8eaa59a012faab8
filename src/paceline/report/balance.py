"""How even the ranks of a run were: seconds, memory and bytes, what limits, and what to do. Pure.

A quantity is uneven where a rank has more than a tenth above the mean. The axis of the mesh along which it is
says why: stages that were cut unevenly, replicas on slower machines, tensors that do not divide.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import product
from statistics import fmean
from typing import TYPE_CHECKING

from paceline.errors import StrategyError
from paceline.report.closed_form import sent
from paceline.report.facts import spell_bytes, spell_seconds
from paceline.report.read import Run
from paceline.report.shares import rank_times

if TYPE_CHECKING:
    from paceline.recipe import Strategy

UNEVEN = 1.1
"""A rank has this many times the mean: worth a sentence."""
_COMPUTE = ("forward", "backward", "optimizer")
_MESH = ("replica", "shard", "pipeline", "context", "tensor")  # from the slowest changing rank to the fastest
_CALLED = {"pipeline": "stage"}


@dataclass(frozen=True)
class Share:
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
        where = ", ".join(f"{_CALLED.get(axis, axis)} {number}" for axis, number in self.place.items())
        return f"rank {self.rank} ({where})" if where else f"rank {self.rank}"


@dataclass(frozen=True)
class Uneven:
    """A quantity of which one rank has more than the others.

    Args:
        what: it is.
        share: of the rank with most.
        times: the mean, how often that is.
        axis: of the mesh, along which ranks differ most.
    """

    what: str
    share: Share
    times: float
    axis: str


def balance(run: Run) -> list[Share]:
    """Every rank of the last start that made a step, ascending; empty if it ran alone."""
    times = rank_times(run)
    if len(times) < 2:
        return []
    by_rank = {one.rank: one.counted_bytes / one.rounds for one in sent(run)}
    places = _places(str(run.start.get("strategy", "")), len(times))
    return [
        Share(
            one.rank,
            places.get(one.rank, {}),
            sum(one.parts[part] for part in _COMPUTE) / one.rounds,
            one.parts["transfer"] / one.rounds,
            one.parts["waiting"] / one.rounds,
            by_rank.get(one.rank, 0.0),
            one.peak_bytes,
        )
        for one in times
    ]


def _places(strategy: str, ranks: int) -> dict[int, dict[str, int]]:
    """Coordinates by rank, on axes with several ranks; empty where the words are not known here."""
    from paceline.recipe import Strategy  # commands that only name a run folder do without
    from paceline.recipe.support import fill

    try:
        found: Strategy = fill(Strategy.parse(strategy), ranks)
    except StrategyError:
        return {}
    degrees = found.degrees
    every = product(*(range(degrees[axis]) for axis in _MESH))
    return {
        rank: {axis: n for axis, n in zip(_MESH, place, strict=True) if degrees[axis] > 1}
        for rank, place in enumerate(every)
    }


_QUANTITIES: Mapping[str, Callable[[Share], float]] = {
    "compute": lambda share: share.compute_seconds,
    "memory": lambda share: share.peak_bytes,
    "bytes sent": lambda share: share.sent_bytes,
}


def uneven(shares: Sequence[Share]) -> list[Uneven]:
    """What is more than a tenth above the mean on some rank, the farthest first."""
    found = []
    for what, of in _QUANTITIES.items():
        mean = fmean(map(of, shares)) if shares else 0.0
        most = max(shares, key=of, default=None)
        if most is not None and mean > 0 and of(most) > UNEVEN * mean:
            found.append(Uneven(what, most, of(most) / mean, _axis(shares, of)))
    return sorted(found, key=lambda one: -one.times)


def _axis(shares: Sequence[Share], of: Callable[[Share], float]) -> str:
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


def balance_words(shares: Sequence[Share]) -> Iterator[str]:
    """A sentence for each quantity that is uneven, and what to do about it; or that all are even."""
    if not shares:
        return
    found = uneven(shares)
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
        waits = spell_seconds(idlest.idle_seconds)
        yield f"The round waits for {limits.called}: {idlest.called} is idle for {waits} of it."


def balance_rows(shares: Sequence[Share]) -> list[list[str]]:
    """A row of text for each rank."""
    return [
        [
            share.called,
            spell_seconds(share.compute_seconds),
            spell_seconds(share.communication_seconds),
            spell_seconds(share.idle_seconds),
            spell_bytes(share.sent_bytes),
            spell_bytes(share.peak_bytes),
        ]
        for share in shares
    ]


HEAD = ("", "compute", "exposed communication", "idle", "sent", "peak memory")
