"""PipeDream: a pipeline that is never flushed. Stages update as gradients reach them.

What flows through it, and which weights a stage keeps for it, is a `PipeDreamFlow`: whole steps and a stash
(`weight_stash`), or micro-batches and two buffers (`two_buffers`). Buffers such as running statistics move at
the end of a step's forward, in the order of the steps.

Invariant: the backward of a step uses the version of the weights that its forward used, on every stage.
Between two rounds the pipeline is empty, every stage has made one update for every step, and buffers are
equal on all ranks.
Source: Narayanan et al. 2019, PipeDream, sections 3.2 and 3.3.

Constructor of PipeDream.
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
    """What goes through a stage between two moments at which the pipeline is empty.

    Attributes:
        versions: of the updates of the last run.
    """

    @property
    def versions(self) -> Sequence[UpdateVersions]: ...

    def run(
        self, first: int, end: int, feed: TrainingFeed, update_step: UpdateStep
    ) -> tuple[LossSums, UpdateResult]:
        """Fill the pipeline, keep it full, and run it empty; the stage makes an update for every step."""

    def drop(self) -> None:
        """Forget what is in flight."""


class PipeDream:
    """The rule of one pipeline.

    Args:
        runner: this rank's stage.
        flow: what goes through it.
        world: all stages.
        stop_requested: see `EveryStep`.
    Wire: activations and their gradients between neighbours; one tally a round.
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
        """Of the updates of the last round."""
        return self.flow.versions

    def rounds(self, feed: TrainingFeed, runner: ModelRunner, update_step: UpdateStep) -> Iterator[StepStats]:
        """See `Rule`: a round ends where the feed wants a pause; then the pipeline runs empty."""
        state = update_step.state
        while state.step < feed.num_steps:
            self._phases.take()
            first, end = state.step, feed.next_pause(state.step)
            self._undo, buffers = _remember_stage(state, self._stage), runner.buffers.values()
            sums, update = self.flow.run(first, end, feed, update_step)
            change = runner.buffers.change_since(buffers)
            own = self._tally(sums, update, runner, change)
            agreement = own.agree(self._net, self._world, runner.sharded_model.device)
            self._phases.begin("communication")
            tally = agreement.wait()
            self._phases.begin("optimizer")
            runner.buffers.reset(buffers)
            runner.buffers.end_step(tally.buffers, 1.0)  # every stage moved its own
            state.step, self._undo = end, _no_undo
            stats = step_stats(range(first, end), feed.work, state, tally, update, self._phases, self._net)
            stale = {
                n: tally.metrics[n] / (end - first) for n in tally.metrics if n.startswith(_STALENESS_PREFIX)
            }
            metrics = {n: x for n, x in stats.metrics.items() if n != _SQUARED_NORM} | stale
            yield replace(stats, metrics=metrics, grad_norm=tally.metrics[_SQUARED_NORM] ** 0.5)

    def abort(self) -> None:
        """Go back to where the pipeline was empty: stages have made different numbers of updates since."""
        self._undo()
        self.flow.drop()
        self._undo = _no_undo

    def _tally(self, sums: LossSums, update: UpdateResult, runner: ModelRunner, change: Tensor) -> StepTally:
        total, count, metrics = sums.read()
        stale = dict.fromkeys((f"{_STALENESS_PREFIX}{s}" for s in range(self._stage.cut.num_stages)), 0.0)
        ages = sum(v.applied - v.forward for v in self.versions)
        stale[f"{_STALENESS_PREFIX}{self._stage.cut.stage}"] = float(ages)
        return StepTally(
            micro_batches=float(sums.micro_batches),
            total=total,
            count=count,
            metrics={**metrics, **stale, _SQUARED_NORM: update.grad_norm**2},
            stops=float(self._stop_requested()),
            used=[0.0] * len(runner.sharded_model.slots),
            buffers=change,
        )


_STALENESS_PREFIX = "staleness of stage "
_SQUARED_NORM = "squared norm"
"""Of the last gradient; each stage knows that of its own part."""


def _no_undo() -> None:
    """There is no half round."""


def _remember_stage(state: TrainState, stage: PipelineRunner) -> Callable[[], None]:
    """Remember what this stage updates; the result puts it back."""
    kept = {name: t.detach().clone() for name, t in state.tensors().items()}
    step, updates, buffers = state.step, state.updates, stage.buffers.values()

    def undo() -> None:
        state.step, state.updates = step, updates
        with torch.no_grad():
            for name, t in state.tensors().items():
                if name in kept:
                    t.copy_(kept[name])
        if not any(name.startswith("optimizer/") for name in kept):
            state.optimizer.state.clear()
        stage.buffers.reset(buffers)

    return undo


def build_pipedream(context: SessionContext, layout: ModelLayout, state: TrainState) -> SyncRule:
    """Stages update as gradients reach them."""
    recipe, runner = context.recipe, layout.runner
    alone = "each stage updates alone, and this needs all of them at once"
    unfit = {
        "optimizer.clip_norm": alone if recipe.optimizer.clip_norm is not None else "",
        'precision.compute = "fp16"': alone if recipe.precision.compute == "fp16" else "",
        "weights that two stages share": alone
        if not isinstance(runner, PipelineRunner) or runner.cut.shared
        else "",
        "memory.recompute": _RECOMPUTE_REASON if recipe.memory.recomputes else "",
    }
    reasons = [f"{name} ({why})" for name, why in unfit.items() if why]
    if reasons or not isinstance(runner, PipelineRunner):
        raise _unsupported_error(reasons)
    net, phases = context.net, context.phases
    build_flow = TwoBufferFlow if recipe.strategy.sync_word.argument else WeightStashFlow
    flow = build_flow(runner, net, phases, context.rule_inputs.items_per_sample)
    return PipeDream(
        runner, flow, context.mesh.world, net, phases, stop_requested=context.rule_inputs.stop_requested
    )


_RECOMPUTE_REASON = "it would compute again with the weights of today, not with those of the forward"


def _unsupported_error(reasons: Sequence[str]) -> StrategyError:
    return StrategyError(
        f"pipedream does not go with {'; '.join(reasons)}",
        next_step="leave it out, or choose sync=every-step",
    )
