"""Parity of runs: train a recipe as one of several ranks or on the oracle, and compare the final states.

Unlike verification, which compares every step from equal bits, the runs are independent from the same seed,
so differences are the errors of all steps together. A run can also be interrupted in the middle of a backward
pass, on every rank at the same gradient.
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
from paceline.session.session import Session
from paceline.session.start_rank import build_task
from paceline.state.slot import TensorSlot
from paceline.task import Task
from paceline.verification.oracle import Oracle
from paceline.verification.verify_on_rank import build_oracle

CPU = torch.device("cpu")
TaskFactory = Callable[[], Task]


@dataclass(frozen=True)
class Trajectory:
    """The losses and the final state of a run.

    Args:
        losses: mean loss of every step.
        parameters: parameters and buffers by name.
        optimizer: optimizer tensors by name.
    """

    losses: list[float]
    parameters: dict[str, Tensor]
    optimizer: dict[str, Tensor]

    def distance(self, other: Trajectory) -> float:
        """Return the largest absolute difference over all parameters and buffers."""
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
    """Build the task of a recipe."""
    return build_task(recipe, None, None)


def build_test_session(
    cluster: Cluster, recipe: Recipe, task: TaskFactory | None = None, components: Components | None = None
) -> Session:
    """Build the session of this rank on the CPU."""
    task_object = task() if task is not None else make_task(recipe)
    return build_session(recipe, task_object, cluster, CPU, components=components)


def run_strategy(
    cluster: Cluster, recipe: Recipe, task: TaskFactory | None = None, components: Components | None = None
) -> Trajectory:
    """Train to the end as one rank, and return its part of the final state."""
    session = build_test_session(cluster, recipe, task, components)
    losses = [stats.loss for stats in session.rounds()]
    return trajectory_of(losses, session)


def trajectory_of(losses: list[float], session: Session) -> Trajectory:
    """Return the state of a session on this rank."""
    tensors = {name: t.detach().clone() for name, t in session.state.tensors().items()}
    return Trajectory(losses, _strip_prefix("model/", tensors), _strip_prefix("optimizer/", tensors))


def whole_trajectory(losses: list[float], session: Session) -> Trajectory:
    """Return the state of a session with the parts of all ranks; collective."""
    tensors = {name: t.detach().clone() for name, t in session.snapshot().tensors().items()}
    optimizer = {name: t for name, t in tensors.items() if name.startswith("optimizer/")}
    return Trajectory(losses, _strip_prefix("model/", tensors), optimizer)


def run_oracle(
    recipe: Recipe, steps: int, task: TaskFactory | None = None, shards: int | None = None
) -> Trajectory:
    """Train the oracle for a number of steps.

    Args:
        shards: micro-batches per step; None for those of the recipe, 1 for the full batch in one forward.
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
    """An interrupt in the middle of a step."""


class InterruptedRunner:
    """A model runner that raises `StepInterrupt` once.

    A pipeline stage withholds further gradients instead and raises at the end of the run, because its
    neighbours wait for the messages of its backward.

    Args:
        inner: the model runner that is interrupted.
        at_run: the call of `run` that is interrupted, from 0.
        after: number of gradients that are reduced before.
    """

    def __init__(self, inner: ModelRunner, at_run: int, after: int) -> None:
        self._inner, self._at_run, self._after = inner, at_run, after
        self.runs = 0

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)

    def run(
        self, micro_batches: Iterable[LoadedBatch], num_micro_batches: int, sink: GradientSink, scale: float
    ) -> LossSums:
        """Run like the inner runner, except for the interrupted call."""
        interrupts = self.runs == self._at_run
        self.runs += 1
        withholds = isinstance(self._inner, PipelineRunner)
        interrupting = _InterruptingSink(sink, self._after, withholds=withholds) if interrupts else sink
        sums = self._inner.run(micro_batches, num_micro_batches, interrupting, scale)
        if interrupts and withholds:
            raise StepInterrupt
        return sums


class _InterruptingSink:
    def __init__(self, sink: GradientSink, after: int, *, withholds: bool) -> None:
        self._sink, self._num_left, self._withholds = sink, after, withholds

    def __getattr__(self, name: str) -> Any:
        return getattr(self._sink, name)

    def micro_batch(self, shards: range, is_last: bool) -> None:
        if self._num_left or not self._withholds:
            self._sink.micro_batch(shards, is_last)

    def ready(self, slot: TensorSlot, grad: Tensor | None) -> None:
        if self._num_left == 0:
            if self._withholds:
                return
            raise StepInterrupt
        self._num_left -= 1
        self._sink.ready(slot, grad)


def train_interrupted(session: Session, at_run: int, after: int) -> list[float]:
    """Train to the end, aborting the interrupted step and taking it again; return the loss of every round.

    Raises:
        AssertionError: this rank runs micro-batches, but was not interrupted.
    """
    session.runner = runner = InterruptedRunner(session.runner, at_run, after)
    losses: list[float] = []
    aborts = 0
    while session.state.step < session.num_steps:
        try:
            for stats in session.rounds():
                losses.append(stats.loss)
        except StepInterrupt:
            session.abort()
            aborts += 1
    assert aborts == (runner.runs > 0), "the run ended before it was interrupted"
    return losses
