"""The session: everything one rank needs to train, put together, and the iteration over its steps."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch

from paceline.cluster import Cluster
from paceline.comm import Net
from paceline.data import Loader, LockstepWork, Unit
from paceline.layout import Replicate
from paceline.mesh import Mesh
from paceline.observe import Stats
from paceline.recipe import Recipe
from paceline.state import TrainState
from paceline.sync import EveryStep, Tail
from paceline.task import Task


@dataclass
class Session:
    """One rank of a training job. Build it with `build_session`.

    Args:
        num_steps: length of the run; `state.step` says how far it is.
    """

    recipe: Recipe
    cluster: Cluster
    mesh: Mesh
    net: Net
    task: Task
    state: TrainState
    placed: Replicate
    work: LockstepWork
    loader: Loader
    tail: Tail
    rule: EveryStep
    num_steps: int

    @property
    def num_replicas(self) -> int:
        """Replicas that train in sync; the global batch is shared among them."""
        return self.mesh.replica.size

    @property
    def is_first(self) -> bool:
        """Whether this rank writes files and talks to the user."""
        return self.cluster.global_rank == 0

    def rounds(self) -> Iterator[Stats]:
        """Train from the state's step to the end of the run, yielding after every step.

        Between two steps the state is consistent: it may be saved, evaluated or left there.
        """
        if self.state.step >= self.num_steps:
            return
        stream = self.loader.open(self.units())
        try:
            for stats in self.rule.rounds(self.work, stream, self.placed, self.tail):
                yield stats
                if self.state.step >= self.num_steps or stats.stops:
                    return
        finally:
            stream.close()

    def sum(self, value: float) -> float:
        """Add up a number of every replica; collective, equal on all. Wire: one all_reduce of 8 bytes."""
        mine = torch.tensor(value, dtype=torch.float64, device=self.placed.device)
        return float(self.net.all_reduce(mine, self.mesh.replica).wait())

    def units(self) -> Iterator[Unit]:
        """This rank's units from the state's step to the end of the run."""
        for step in range(self.state.step, self.num_steps):
            yield from self.work.units(step)
