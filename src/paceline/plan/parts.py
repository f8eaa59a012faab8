"""Bytes of one rank by kind, and what a plan of all ranks says."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from paceline.recipe import Recipe


@dataclass(frozen=True)
class Parts:
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
        messages: of channels, the most that wait to be taken, come, or have come before their time.
    """

    parameters: int = 0
    gathered: int = 0
    gradients: int = 0
    moments: int = 0
    activations: int = 0
    wire: int = 0
    snapshot: int = 0
    messages: int = 0

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
        stays: what it has between two steps.
    """

    rank: int
    stage: int
    moments: Mapping[str, Parts]
    layers: Sequence[LayerMemory] = ()
    stays: Parts = Parts()

    @property
    def when(self) -> str:
        """The moment of its peak."""
        return max(self.moments, key=lambda name: self.moments[name].total)

    @property
    def peak(self) -> Parts:
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
