"""Run a recipe as one of several ranks, or on the oracle, and compare where the two end.

Unlike verification, which checks every step from equal bits, these run freely from the same seed: what is
compared is where many steps lead, errors of all steps together.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from paceline.cluster import Cluster
from paceline.recipe import Recipe
from paceline.task import Task
from paceline.training import Pieces, Session, build_session
from paceline.training.joining import obtain_task
from paceline.verification import Oracle, build_oracle

CPU = torch.device("cpu")
MakeTask = Callable[[], Task]


@dataclass(frozen=True)
class Trajectory:
    """Where a run ended.

    Args:
        losses: mean loss of every step.
        parameters: by name; buffers too.
        optimizer: optimizer tensors by name.
    """

    losses: list[float]
    parameters: dict[str, Tensor]
    optimizer: dict[str, Tensor]

    def distance(self, other: Trajectory) -> float:
        """Largest absolute difference over all parameters and buffers."""
        if self.parameters.keys() != other.parameters.keys():
            return float("inf")
        return max(
            (
                float((a.double() - other.parameters[n].double()).abs().max())
                for n, a in self.parameters.items()
            ),
            default=0.0,
        )


def make_task(recipe: Recipe) -> Task:
    """The task that the recipe names."""
    return obtain_task(recipe, None, None)


def session_of(
    cluster: Cluster, recipe: Recipe, task: MakeTask | None = None, pieces: Pieces | None = None
) -> Session:
    """This rank's session on the processor."""
    built = task() if task is not None else make_task(recipe)
    return build_session(recipe, built, cluster, CPU, pieces=pieces)


def run_strategy(
    cluster: Cluster, recipe: Recipe, task: MakeTask | None = None, pieces: Pieces | None = None
) -> Trajectory:
    """Train to the end as one rank."""
    session = session_of(cluster, recipe, task, pieces)
    losses = [stats.loss for stats in session.rounds()]
    return ended(losses, session)


def ended(losses: list[float], session: Session) -> Trajectory:
    """Where a session stands."""
    tensors = {name: t.detach().clone() for name, t in session.state.tensors().items()}
    return Trajectory(losses, _under("model/", tensors), _under("optimizer/", tensors))


def run_oracle(
    recipe: Recipe, steps: int, task: MakeTask | None = None, shards: int | None = None
) -> Trajectory:
    """Train the oracle for some steps.

    Args:
        shards: the recipe's if None; 1 for the full batch in one forward.
    """
    oracle = build_oracle(recipe, task() if task is not None else make_task(recipe), CPU, shards)
    losses = [oracle.step(step, step) for step in range(steps)]
    return Trajectory(losses, _model_tensors(oracle), {})


def _model_tensors(oracle: Oracle) -> dict[str, Tensor]:
    parameters = {n: p.detach().clone() for n, p in oracle.model.named_parameters()}
    return parameters | oracle.buffers()


def _under(prefix: str, tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    return {n.removeprefix(prefix): t for n, t in tensors.items() if n.startswith(prefix)}
