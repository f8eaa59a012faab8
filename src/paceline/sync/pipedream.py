"""PipeDream: a pipeline that is never flushed. Stages update as gradients reach them.

What flows through the pipeline, and which versions of the weights a stage keeps, is a `PipeDreamFlow` of
`weight_stashing`: whole steps and stashed weights, or micro-batches and two buffers (`pipedream:2bw`).
Buffers such as running statistics move at the end of a step's forward, in the order of the steps.

Invariant: on every stage the backward of a step uses the version of the weights that its forward used.
Between two rounds the pipeline is empty, every stage has made one update for every step, and buffers are
equal on all ranks.
Source: Narayanan et al. 2019, PipeDream, sections 3.2 and 3.3.
Refusals: `paceline.recipe.registry.sync_specs`, and `build_pipedream` for what depends on the model.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Protocol

import torch
from torch import Tensor

from paceline.comm.net import Net
from paceline.comm.tally import StepTally
from paceline.data.work import TrainingFeed
from paceline.errors import StrategyError
from paceline.job.mesh import RankGroup
from paceline.observe.step_stats import PhaseTimer, StepStats
from paceline.parallel.model_layout import ModelLayout
from paceline.parallel.model_runner import LossSums, ModelRunner
from paceline.parallel.pipeline.pipeline_runner import PipelineRunner
from paceline.parallel.session_context import SessionContext
from paceline.state.train_state import TrainState
from paceline.sync.sync_rule import SyncRule, step_stats
from paceline.sync.update import UpdateResult, UpdateStep
from paceline.sync.weight_stashing import TwoBufferFlow, UpdateVersions, WeightStashFlow


class PipeDreamFlow(Protocol):
    """The work that flows through a stage between two moments at which the pipeline is empty.

    Attributes:
        versions: of the updates of the last run.
    """

    @property
    def versions(self) -> Sequence[UpdateVersions]: ...

    def run(
        self, first: int, end: int, feed: TrainingFeed, update_step: UpdateStep
    ) -> tuple[LossSums, UpdateResult]:
        """Fill the pipeline, keep it full, and run it empty; the stage makes one update per step."""

    def drop(self) -> None:
        """Drop what is in flight."""


class PipeDream:
    """The rule of one pipeline without flushes.

    Args:
        runner: this rank's stage.
        flow: what flows through it.
        world: all stages.
        net: this rank's collectives.
        phases: measures the seconds of each phase.
        stop_requested: returns whether this rank was asked to stop.
    Wire: activations and their gradients between neighbours; one tally per round.
    """

    def __init__(
        self,
        runner: PipelineRunner,
        flow: PipeDreamFlow,
        world: RankGroup,
        net: Net,
        phases: PhaseTimer,
        *,
        stop_requested: Callable[[], bool],
    ) -> None:
        self._stage, self._world, self._net, self._phases = runner, world, net, phases
        self.flow, self._stop_requested = flow, stop_requested
        self._undo: Callable[[], None] = _no_undo

    @property
    def versions(self) -> Sequence[UpdateVersions]:
        """Return the versions of the updates of the last round."""
        return self.flow.versions

    def rounds(self, feed: TrainingFeed, runner: ModelRunner, update_step: UpdateStep) -> Iterator[StepStats]:
        state = update_step.state
        while state.step < feed.num_steps:
            self._phases.take()
            first, end = state.step, feed.next_pause(state.step)
            # While the pipeline is full, stages have made different numbers of updates: only a whole round
            # can be undone.
            self._undo, buffers = _remember_stage(state, self._stage), runner.buffers.values()
            sums, update = self.flow.run(first, end, feed, update_step)
            change = runner.buffers.change_since(buffers)
            local_tally = self._tally(sums, update, runner, change)
            agreement = local_tally.agree(self._net, self._world, runner.sharded_model.device)
            self._phases.begin("communication")
            tally = agreement.wait()
            self._phases.begin("optimizer")
            # Each stage has moved its own buffers. All ranks start again from the old values and add the
            # agreed change.
            runner.buffers.reset(buffers)
            runner.buffers.end_step(tally.buffers, 1.0)  # a sum of one term: every stage moved its own
            state.step, self._undo = end, _no_undo
            stats = step_stats(range(first, end), feed.work, state, tally, update, self._phases, self._net)
            staleness = {
                n: tally.metrics[n] / (end - first) for n in tally.metrics if n.startswith(_STALENESS_PREFIX)
            }
            metrics = {n: x for n, x in stats.metrics.items() if n != _SQUARED_NORM} | staleness
            yield replace(stats, metrics=metrics, grad_norm=tally.metrics[_SQUARED_NORM] ** 0.5)

    def abort(self) -> None:
        """Go back to the state at the start of the round, because stages have made different numbers of
        updates since.
        """
        self._undo()
        self.flow.drop()
        self._undo = _no_undo

    def _tally(self, sums: LossSums, update: UpdateResult, runner: ModelRunner, change: Tensor) -> StepTally:
        total, count, metrics = sums.read()
        staleness = dict.fromkeys((f"{_STALENESS_PREFIX}{s}" for s in range(self._stage.cut.num_stages)), 0.0)
        ages = sum(v.applied - v.forward for v in self.versions)
        staleness[f"{_STALENESS_PREFIX}{self._stage.cut.stage}"] = float(ages)
        return StepTally(
            micro_batches=float(sums.micro_batches),
            total=total,
            count=count,
            metrics={**metrics, **staleness, _SQUARED_NORM: update.grad_norm**2},
            stops=float(self._stop_requested()),
            # Stages have updated already, so no rank needs to know which parameters were used.
            used=[0.0] * len(runner.sharded_model.slots),
            buffers=change,
        )


_STALENESS_PREFIX = "staleness of stage "
_SQUARED_NORM = "squared norm"
"""Squared norm of the last gradient; each stage adds that of its own part."""


def _no_undo() -> None:
    """Do nothing: no round is in progress."""


def _remember_stage(state: TrainState, stage: PipelineRunner) -> Callable[[], None]:
    """Copy what this stage updates, and return the function that restores it."""
    copies = {name: t.detach().clone() for name, t in state.tensors().items()}
    step, updates, buffers = state.step, state.num_updates, stage.buffers.values()

    def undo() -> None:
        state.step, state.num_updates = step, updates
        with torch.no_grad():
            for name, t in state.tensors().items():
                if name in copies:
                    t.copy_(copies[name])
        # The optimizer creates its state in the first step, so there was none to copy.
        if not any(name.startswith("optimizer/") for name in copies):
            state.optimizer.state.clear()
        stage.buffers.reset(buffers)

    return undo


def build_pipedream(context: SessionContext, layout: ModelLayout, state: TrainState) -> SyncRule:
    """Build the rule in which stages update as gradients reach them.

    Raises:
        StrategyError: the recipe or the model needs all stages at once.
    """
    recipe, runner = context.recipe, layout.runner
    needs_all_stages = "it needs all stages at once, but each stage updates alone"
    unsupported = {
        "optimizer.clip_norm": needs_all_stages if recipe.optimizer.clip_norm is not None else "",
        'precision.compute = "fp16"': needs_all_stages if recipe.precision.compute == "fp16" else "",
        "weights that two stages share": needs_all_stages
        if not isinstance(runner, PipelineRunner) or runner.cut.shared
        else "",
        "memory.recompute": _RECOMPUTE_REASON if recipe.memory.recomputes else "",
    }
    reasons = [f"{name} ({reason})" for name, reason in unsupported.items() if reason]
    if reasons or not isinstance(runner, PipelineRunner):
        raise _unsupported_error(reasons)
    net, phases = context.net, context.phases
    build_flow = TwoBufferFlow if recipe.strategy.sync_word.argument else WeightStashFlow
    flow = build_flow(runner, net, phases, context.rule_inputs.items_per_sample)
    return PipeDream(
        runner, flow, context.mesh.world, net, phases, stop_requested=context.rule_inputs.stop_requested
    )


_RECOMPUTE_REASON = "it would recompute with newer weights than those of the forward"


def _unsupported_error(reasons: Sequence[str]) -> StrategyError:
    return StrategyError(
        f"pipedream does not support {'; '.join(reasons)}",
        next_step="remove it, or choose sync=every-step",
    )
