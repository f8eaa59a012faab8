"""A memory plan: bytes of every rank by kind and moment of a run, as values, tables and JSON; pure."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from typing import Any

from paceline.recipe.recipe import Recipe
from paceline.report.number_format import format_bytes


@dataclass(frozen=True)
class MemoryByKind:
    """The bytes of a rank by kind, at one moment.

    Args:
        parameters: parameters that stay, and buffers of the model.
        gathered: whole parameters of which the rank keeps a part (ZeRO 3).
        gradients: gradients, and the sums that the update reads.
        moments: state of the optimizer, and the average of the weights.
        activations: tensors that forward keeps for backward, and temporary tensors of forward, backward and
            update.
        wire: communication buffers.
        snapshot: copy from which a checkpoint is written in the background.
        copies: of this rank's part of the state: three on one host, four between hosts, for its neighbour too
            (`elastic.redundancy`).
    """

    parameters: int = 0
    gathered: int = 0
    gradients: int = 0
    moments: int = 0
    activations: int = 0
    wire: int = 0
    snapshot: int = 0
    copies: int = 0

    @property
    def total(self) -> int:
        return sum(asdict(self).values())


@dataclass(frozen=True)
class LayerMemory:
    """The bytes of one layer on one rank.

    Args:
        layer: name of the layer in the model.
        parameters, gradients, moments: bytes that stay from step to step; gradients after a backward.
        activations: bytes that a micro-batch keeps from its forward to its backward.
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
    """The memory of one rank.

    Args:
        rank: global rank.
        stage: stage of the pipeline; 0 without one.
        moments: bytes at each moment of a run, by the name of the moment.
        layers: bytes of each layer.
    """

    rank: int
    stage: int
    moments: Mapping[str, MemoryByKind]
    layers: Sequence[LayerMemory] = ()

    @property
    def when(self) -> str:
        """Return the name of the moment at which most memory is used."""
        return max(self.moments, key=lambda name: self.moments[name].total)

    @property
    def peak(self) -> MemoryByKind:
        return self.moments[self.when]


@dataclass(frozen=True)
class MemoryPlan:
    """The memory of a job.

    Args:
        recipe: its strategy has its replicas filled in.
        processes: number of processes of the job.
        ranks: ranks of the first replica; those of other replicas are alike.
    """

    recipe: Recipe
    processes: int
    ranks: Sequence[RankMemory]

    @property
    def largest(self) -> RankMemory:
        """Return the rank with the largest peak."""
        return max(self.ranks, key=lambda rank: rank.peak.total)

    @property
    def peak(self) -> int:
        """Return the largest peak of any rank, in bytes."""
        return self.largest.peak.total

    def record(self) -> dict[str, Any]:
        """Return the plan as JSON values."""
        ranks = [
            {
                "rank": rank.rank,
                "stage": rank.stage,
                "peak_bytes": rank.peak.total,
                "when": rank.when,
                "moments": {name: asdict(parts) for name, parts in rank.moments.items()},
                "layers": [asdict(layer) for layer in rank.layers],
            }
            for rank in self.ranks
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


_HEAD = ("rank", "stage", *(kind.name for kind in fields(MemoryByKind)), "peak", "in")


def describe_peak(plan: MemoryPlan) -> str:
    """Describe which rank needs most, at which moment, and for what."""
    largest = plan.largest
    kinds = sorted(asdict(largest.peak).items(), key=lambda kind: -kind[1])
    words = ", ".join(f"{name} {format_bytes(size)}" for name, size in kinds[:3] if size)
    return f"rank {largest.rank} needs {format_bytes(plan.peak)} in {_with_article(largest.when)} ({words})"


def _with_article(when: str) -> str:
    return when if when.startswith("building") else f"the {when}"


def render_rank_table(plan: MemoryPlan) -> Iterator[str]:
    """Yield a table with a row for each rank: bytes by kind at its peak, without kinds that no rank has."""
    rows = [_HEAD, *(_rank_row(rank) for rank in plan.ranks)]
    columns = [c for c in zip(*rows, strict=True) if any(cell != "0 B" for cell in c[1:])]
    if all(rank.stage == 0 for rank in plan.ranks):
        columns = [c for c in columns if c[0] != "stage"]
    yield from _align_columns(list(zip(*columns, strict=True)))


def _rank_row(rank: RankMemory) -> tuple[str, ...]:
    sizes = [format_bytes(size) for size in asdict(rank.peak).values()]
    return (str(rank.rank), str(rank.stage), *sizes, format_bytes(rank.peak.total), rank.when)


def render_layer_table(plan: MemoryPlan) -> Iterator[str]:
    """Yield a table with a row for each layer of each rank."""
    kinds = [kind.name for kind in fields(LayerMemory)][1:]
    rows = [("rank", "layer", *kinds)]
    for rank in plan.ranks:
        for layer in rank.layers:
            sizes = (format_bytes(getattr(layer, kind)) for kind in kinds)
            rows.append((str(rank.rank), layer.layer, *sizes))
    yield from _align_columns(rows)


def _align_columns(rows: Sequence[tuple[str, ...]]) -> Iterator[str]:
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    for row in rows:
        yield "  ".join(f"{cell:>{width}}" for cell, width in zip(row, widths, strict=True)).rstrip()


def describe_imbalance(plan: MemoryPlan) -> str:
    """Describe the imbalance of the ranks if the largest is more than 10 % above the mean; else empty."""
    peaks = [rank.peak.total for rank in plan.ranks]
    mean = sum(peaks) / len(peaks)
    if max(peaks) <= 1.1 * mean:
        return ""
    return f"rank {plan.largest.rank} needs {max(peaks) / mean:.2f} times the mean of the ranks"
