"""Run a recipe as one of several ranks, or on the oracle, and compare where the two end.

Unlike verification, which checks every step from equal bits, these run freely from the same seed: what is
compared is where many steps lead, errors of all steps together.

Interrupt a session in the middle of a backward pass, on every rank at the same place.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from paceline.comm.reduction.gradients import GradientSink
from paceline.data.work import LoadedBatch
from paceline.job.cluster import Cluster
from paceline.parallel.model_runner import LossSums, ModelRunner
from paceline.parallel.pipeline.pipeline_runner import PipelineRunner
from paceline.parallel.session_context import Components
from paceline.recipe.recipe import Recipe
from paceline.session.build import build_session
from paceline.session.joining import build_task
from paceline.session.session import Session
from paceline.state.slot import TensorSlot
from paceline.task import Task
from paceline.verification.oracle import Oracle
from paceline.verification.verify_on_rank import build_oracle

CPU = torch.device("cpu")
TaskFactory = Callable[[], Task]


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
    return build_task(recipe, None, None)


def build_test_session(
    cluster: Cluster, recipe: Recipe, task: TaskFactory | None = None, pieces: Components | None = None
) -> Session:
    """This rank's session on the processor."""
    built = task() if task is not None else make_task(recipe)
    return build_session(recipe, built, cluster, CPU, pieces=pieces)


def run_strategy(
    cluster: Cluster, recipe: Recipe, task: TaskFactory | None = None, pieces: Components | None = None
) -> Trajectory:
    """Train to the end as one rank."""
    session = build_test_session(cluster, recipe, task, pieces)
    losses = [stats.loss for stats in session.rounds()]
    return trajectory_of(losses, session)


def trajectory_of(losses: list[float], session: Session) -> Trajectory:
    """Where a session stands."""
    tensors = {name: t.detach().clone() for name, t in session.state.tensors().items()}
    return Trajectory(losses, _strip_prefix("model/", tensors), _strip_prefix("optimizer/", tensors))


def run_oracle(
    recipe: Recipe, steps: int, task: TaskFactory | None = None, shards: int | None = None
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


def _strip_prefix(prefix: str, tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    return {n.removeprefix(prefix): t for n, t in tensors.items() if n.startswith(prefix)}


class StepInterrupt(Exception):
    """Raised in the middle of a step."""


class InterruptedRunner:
    """A layout that raises `StepInterrupt` once.

    In a stage the rest of the gradients is withheld instead, and it raises at the end: its neighbours wait
    for what its backward sends.

    Args:
        inner: the layout.
        at_run: in which call of `run`, from 0.
        after: how many gradients are handed on before it.
    """

    def __init__(self, inner: ModelRunner, at_run: int, after: int) -> None:
        self._inner, self._at_run, self._after = inner, at_run, after
        self.runs = 0

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)

    def run(
        self, micro_batches: Iterable[LoadedBatch], count: int, sink: GradientSink, scale: float
    ) -> LossSums:
        """As the inner layout, but for the one call."""
        interrupts = self.runs == self._at_run
        self.runs += 1
        waits = isinstance(self._inner, PipelineRunner)
        fused = _InterruptingSink(sink, self._after, withholds=waits) if interrupts else sink
        sums = self._inner.run(micro_batches, count, fused, scale)
        if interrupts and waits:
            raise StepInterrupt
        return sums


class _InterruptingSink:
    def __init__(self, sink: GradientSink, after: int, *, withholds: bool) -> None:
        self._sink, self._left, self._withholds = sink, after, withholds

    def __getattr__(self, name: str) -> Any:
        return getattr(self._sink, name)

    def micro_batch(self, shards: range, is_last: bool) -> None:
        if self._left or not self._withholds:
            self._sink.micro_batch(shards, is_last)

    def ready(self, slot: TensorSlot, grad: Tensor | None) -> None:
        if self._left == 0:
            if self._withholds:
                return
            raise StepInterrupt
        self._left -= 1
        self._sink.ready(slot, grad)


def train_interrupted(session: Session, at_run: int, after: int) -> list[float]:
    """Train to the end; abort where it is interrupted, and go on. Returns the loss of every round.

    Raises:
        AssertionError: nothing was interrupted, though this rank does run micro-batches.
    """
    session.runner = layout = InterruptedRunner(session.runner, at_run, after)
    losses: list[float] = []
    aborts = 0
    while session.state.step < session.num_steps:
        try:
            for stats in session.rounds():
                losses.append(stats.loss)
        except StepInterrupt:
            session.abort()
            aborts += 1
    assert aborts == (layout.runs > 0), "the run ended before it was interrupted"
    return losses
