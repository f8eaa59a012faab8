"""Bytes of one rank by kind, and what a plan of all ranks says.

A plan in words and as a table. Pure.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from typing import Any

from paceline.recipe.recipe import Recipe
from paceline.report.number_format import format_bytes


@dataclass(frozen=True)
class MemoryByKind:
    """Bytes by kind, at one moment.

    Args:
        parameters: what stays of them, and buffers of the model.
        gathered: whole parameters of which the rank keeps a part.
        gradients: of parameters, and the sums that the update reads.
        moments: of the optimizer, and the average of the weights.
        activations: what forward keeps for backward, and what both take for themselves; in an update what it
            takes for itself.
        wire: buffers through which gradients are summed.
        snapshot: the copy from which a checkpoint is written in the background.
    """

    parameters: int = 0
    gathered: int = 0
    gradients: int = 0
    moments: int = 0
    activations: int = 0
    wire: int = 0
    snapshot: int = 0

    @property
    def total(self) -> int:
        return sum(asdict(self).values())


@dataclass(frozen=True)
class LayerMemory:
    """Bytes of one layer on one rank.

    Args:
        layer: its name in the model.
        parameters, gradients, moments: that stay from step to step; gradients from the end of a backward.
        activations: that a micro-batch keeps from its forward to its backward.
    """

    layer: str
    parameters: int
    gradients: int
    moments: int
    activations: int

    @property
    def total(self) -> int:
        return self.parameters + self.gradients + self.moments + self.activations


@dataclass(frozen=True)
class RankMemory:
    """One rank.

    Args:
        rank: its number.
        stage: of a pipeline.
        moments: what it has at each moment of a run.
        layers: what it has of each of them.
    """

    rank: int
    stage: int
    moments: Mapping[str, MemoryByKind]
    layers: Sequence[LayerMemory] = ()

    @property
    def when(self) -> str:
        """The moment of its peak."""
        return max(self.moments, key=lambda name: self.moments[name].total)

    @property
    def peak(self) -> MemoryByKind:
        return self.moments[self.when]


@dataclass(frozen=True)
class MemoryPlan:
    """A job.

    Args:
        recipe: with the strategy that is planned, its replicas filled in.
        processes: in the job.
        ranks: of the first replica; those of the others are alike.
    """

    recipe: Recipe
    processes: int
    ranks: Sequence[RankMemory]

    @property
    def largest(self) -> RankMemory:
        """The rank with most."""
        return max(self.ranks, key=lambda one: one.peak.total)

    @property
    def peak(self) -> int:
        """The most bytes of any rank."""
        return self.largest.peak.total

    def record(self) -> dict[str, Any]:
        """As JSON values."""
        ranks = [
            {
                "rank": one.rank,
                "stage": one.stage,
                "peak_bytes": one.peak.total,
                "when": one.when,
                "moments": {name: asdict(parts) for name, parts in one.moments.items()},
                "layers": [asdict(layer) for layer in one.layers],
            }
            for one in self.ranks
        ]
        strategy, memory = str(self.recipe.strategy), self.recipe.memory
        return {
            "strategy": strategy,
            "processes": self.processes,
            "recompute": memory.recompute,
            "peak_bytes": self.peak,
            "budget_bytes": memory.budget,
            "ranks": ranks,
        }


_HEAD = ("rank", "stage", *(one.name for one in fields(MemoryByKind)), "peak", "in")


def describe_peak(plan: MemoryPlan) -> str:
    """Which rank needs most, when, and for what."""
    largest = plan.largest
    kinds = sorted(asdict(largest.peak).items(), key=lambda kind: -kind[1])
    told = ", ".join(f"{name} {format_bytes(size)}" for name, size in kinds[:3] if size)
    return f"rank {largest.rank} needs {format_bytes(plan.peak)} in {_with_article(largest.when)} ({told})"


def _with_article(when: str) -> str:
    return when if when.startswith("building") else f"the {when}"


def render_rank_table(plan: MemoryPlan) -> Iterator[str]:
    """A row for each rank: bytes by kind at the moment of its peak; what no rank has is left out."""
    rows = [_HEAD, *(_rank_row(one) for one in plan.ranks)]
    columns = [c for c in zip(*rows, strict=True) if any(cell != "0 B" for cell in c[1:])]
    if all(one.stage == 0 for one in plan.ranks):
        columns = [c for c in columns if c[0] != "stage"]
    yield from _align_columns(list(zip(*columns, strict=True)))


def _rank_row(one: RankMemory) -> tuple[str, ...]:
    sizes = [format_bytes(size) for size in asdict(one.peak).values()]
    return (str(one.rank), str(one.stage), *sizes, format_bytes(one.peak.total), one.when)


def render_layer_table(plan: MemoryPlan) -> Iterator[str]:
    """A row for each layer of each rank: what stays of it, and what a micro-batch keeps."""
    kinds = [one.name for one in fields(LayerMemory)][1:]
    rows = [("rank", "layer", *kinds)]
    for one in plan.ranks:
        for layer in one.layers:
            sizes = (format_bytes(getattr(layer, kind)) for kind in kinds)
            rows.append((str(one.rank), layer.layer, *sizes))
    yield from _align_columns(rows)


def _align_columns(rows: Sequence[tuple[str, ...]]) -> Iterator[str]:
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    for row in rows:
        yield "  ".join(f"{cell:>{width}}" for cell, width in zip(row, widths, strict=True)).rstrip()


def describe_imbalance(plan: MemoryPlan) -> str:
    """How far the ranks are apart, where it is more than a tenth; else empty."""
    peaks = [one.peak.total for one in plan.ranks]
    mean = sum(peaks) / len(peaks)
    if max(peaks) <= 1.1 * mean:
        return ""
    return f"rank {plan.largest.rank} needs {max(peaks) / mean:.2f} times the mean of the ranks"
