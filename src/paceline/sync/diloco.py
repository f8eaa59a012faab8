"""Local SGD and DiLoCo: replicas train alone for H steps, then agree on their parameters.

In a round each replica takes H steps with its own optimizer. The parameter deltas, weighted by the items that
each replica trained on, are summed over the replicas, and an outer optimizer takes their mean as its
gradient.
A replica can be spread over ranks (shards, stages, tensor parts, positions): each rank sums what it updates
with the ranks that update the same part in the other replicas, and keeps the outer momentum of that part.
Buffers move by the mean of their changes on the replicas, weighted by micro-batches as in every-step.

Local SGD is DiLoCo with an outer SGD of rate 1, which averages the replicas. With H = 1 and inner SGD without
a clip that is exactly every-step.

Invariant: after a round all replicas hold equal parameters and buffers. The inner optimizers stay different,
and all of them are state (`inner`).
Source: Stich 2019, Local SGD Converges Fast, arXiv:1805.09767, Algorithm 1; Douillard et al. 2023, DiLoCo,
arXiv:2311.08105, Algorithm 1 (inner AdamW, outer Nesterov).
Refusals: `paceline.recipe.registry.sync_specs`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from paceline.comm.net import Net
from paceline.comm.reduction.gradient_norm import SharedNorm
from paceline.comm.reduction.gradients import GradientReduction
from paceline.comm.tally import StepTally
from paceline.data.work import MicroBatchWork, TrainingFeed
from paceline.job.mesh import RankGroup
from paceline.observe.step_stats import PhaseTimer, StepStats
from paceline.parallel.gradient_reduction import build_delta_reduction
from paceline.parallel.model_layout import ModelLayout
from paceline.parallel.model_runner import ModelRunner
from paceline.parallel.placement import slot_bytes
from paceline.parallel.session_context import SessionContext
from paceline.state.slot import ExtraState, SlotIndex, TensorPiece, TensorSlot
from paceline.state.train_state import TrainState
from paceline.sync.every_step import EveryStep, build_pending_residual
from paceline.sync.local_rounds import (
    LocalRound,
    LocalRoundLoop,
    TakeStep,
    build_replica_step,
    meeting_ranks,
)
from paceline.sync.outer_optimizer import OuterOptimizer, OuterStep, ParameterDelta, copy_anchors
from paceline.sync.residuals import DeltaResidualFlush, DeltaResidualState, ResidualState
from paceline.sync.straggler_recovery import stop_when_recovered
from paceline.sync.streaming_diloco import FragmentSchedule, StreamingDiLoCo
from paceline.sync.sync_rule import MemoryQuery, RuleMemory, SyncRule
from paceline.sync.update import UpdateStep


@dataclass(frozen=True)
class InterruptedRound:
    """A round whose meeting has failed, because a replica was lost.

    Args:
        local_round: what this replica has done in it.
        anchors: the parameters with which it began.
    """

    local_round: LocalRound
    anchors: Sequence[Tensor]


class DiLoCo(ExtraState):
    """The rule of H local steps and one agreement.

    Args:
        inner: the step of one replica.
        num_local_steps: H; the last round of a run can be shorter.
        outer: the outer optimizer and the collectives around it.
        reducer: builds the reduction of parameter deltas over the replicas, given the anchors.
        runner: this rank's part of the model.
        replicas, net, phases: as for `LocalRoundLoop`.
    Attributes:
        count_waiting: returns how many processes wait to join, as this rank sees it.
        num_waiting: sum of these numbers over all replicas, in the latest meeting.
    Wire: every H steps one all_reduce of the parameters that a rank updates, and one of the tally, over the
        ranks that hold the same part of each replica. Inside a replica: the traffic of a step, and a gather
        after H.
    """

    def __init__(
        self,
        inner: EveryStep,
        num_local_steps: int,
        outer: OuterStep,
        reducer: Callable[[Mapping[TensorSlot, Tensor]], GradientReduction],
        runner: ModelRunner,
        *,
        replicas: RankGroup,
        net: Net,
        phases: PhaseTimer,
    ) -> None:
        self.inner, self._num_local_steps = inner, num_local_steps
        self._loop = LocalRoundLoop(inner, replicas=replicas, net=net, phases=phases)
        anchors = copy_anchors(runner)
        self.reducer = reducer(anchors)
        self._delta = ParameterDelta(anchors, runner, outer, self.reducer)
        self.deltas = [self._delta]
        self.count_waiting: Callable[[], int] = lambda: 0
        self.num_waiting = 0.0

    def rounds(self, feed: TrainingFeed, runner: ModelRunner, update_step: UpdateStep) -> Iterator[StepStats]:
        return self._loop.rounds(
            feed, runner, update_step, begin=self._begin, step=_take_step, meet=self._agree
        )

    def abort(self) -> None:
        self.inner.abort()
        # A sum of deltas may have been started with the others; the next round sums from the anchors again.
        self.reducer.abort()

    @property
    def interrupted_round(self) -> InterruptedRound | None:
        """The round that an error has interrupted; None: there is none."""
        local_round = self._loop.interrupted_round
        return None if local_round is None else InterruptedRound(local_round, [*self._delta.anchors.values()])

    @torch.no_grad()
    def continue_round(self, interrupted: InterruptedRound) -> None:
        """Continue a round that began with other members; the delta of a lost replica is not in its mean."""
        for anchor, value in zip(self._delta.anchors.values(), interrupted.anchors, strict=True):
            anchor.copy_(value)
        self._loop.continue_round(interrupted.local_round)

    def keep_share(self, work: MicroBatchWork) -> None:
        """Give the next round a share of the samples that is not the present one."""
        self._loop.keep_share(work)

    def _begin(self, feed: TrainingFeed, step: int) -> int:
        self._delta.begin()
        return min(step + self._num_local_steps, feed.num_steps)

    def _agree(self, local_round: LocalRound, runner: ModelRunner) -> tuple[StepTally, Mapping[str, float]]:
        """Sum the deltas, step from the anchors, and continue from there; collective."""
        waiting = float(self.count_waiting())
        tally, sums = self._loop.agree(local_round, runner, skipped=local_round.skipped, waiting=waiting)
        self.num_waiting = sums["waiting"]
        # The weights are known only after the tally, so the sum cannot start earlier.
        self._delta.start_sum(local_round.count, tally.count)
        self._delta.finish_sum(tally)
        # Without mixing the anchors replace the parameters, so all replicas continue from equal bits.
        self._delta.mix(0.0)
        return tally, sums

    def pieces(self) -> list[TensorPiece]:
        """Return the momentum of the outer optimizer, by parameter."""
        return self._delta.pieces()

    def wanted(self, shapes: Mapping[str, tuple[int, ...]]) -> Mapping[str, SlotIndex]:
        return self._delta.wanted(shapes)

    def load(self, tensors: Mapping[str, Tensor]) -> None:
        """Load what `pieces` returned, and forget a round that was in progress."""
        self._loop.forget()
        self._delta.load(tensors)


def _take_step(local_round: LocalRound, take: TakeStep) -> None:
    take()


def plan_memory(query: MemoryQuery) -> RuleMemory:
    """Return the bytes of the parameters at the start of a round, outer momentum and buckets.

    Each is as large as what the rank updates. At the end of a round the rank computes its parameter changes
    one tensor at a time, so the largest tensor counts twice there.
    """
    update_bytes, strategy = query.sizes.updates, query.recipe.strategy
    parts = [placement.updates for placement in query.held.values() if placement.updates is not None]
    momentum = update_bytes if strategy.sync_spec.has_outer_optimizer and query.recipe.outer.momentum else 0
    return RuleMemory(
        state=update_bytes + momentum,
        # A single replica sends nothing, so it has no buckets.
        wire=update_bytes if strategy.degrees["replica"] > 1 else 0,
        # Twice: the change of a tensor and its product with the weight exist at the same time.
        agreement=2 * max((slot_bytes(part, query.item_bytes) for part in parts), default=0),
    )


def build_local_sgd(context: SessionContext, layout: ModelLayout, state: TrainState) -> SyncRule:
    """Build the rule in which replicas train alone for H steps, then average their parameters."""
    schedule = FragmentSchedule(context.recipe.strategy.sync_word.argument)
    return _build_local_rounds(context, layout, state, OuterOptimizer(), schedule)


def build_diloco(context: SessionContext, layout: ModelLayout, state: TrainState) -> SyncRule:
    """Build DiLoCo, or streaming DiLoCo if the recipe cuts the parameters into fragments."""
    outer, num_steps = context.recipe.outer, context.recipe.strategy.sync_word.argument
    schedule = FragmentSchedule(num_steps, outer.fragments, outer.delay_steps, outer.mixing)
    return _build_local_rounds(context, layout, state, OuterOptimizer(outer.lr, outer.momentum), schedule)


def _build_local_rounds(
    context: SessionContext,
    layout: ModelLayout,
    state: TrainState,
    outer: OuterOptimizer,
    schedule: FragmentSchedule,
) -> SyncRule:
    """Build the rule, register its state, and watch a slow replica if the run is waiting for one."""
    mesh, sharded_model = context.mesh, layout.runner.sharded_model
    outer_step = OuterStep(outer, SharedNorm(mesh.inside, context.net), layout.gather)

    def build_reduction(anchors: Mapping[TensorSlot, Tensor], number: int = 0) -> GradientReduction:
        prefix = f"fragment-{number}/" if schedule.fragments > 1 else ""
        return build_delta_reduction(context, sharded_model, anchors, prefix)

    residual = None
    if context.recipe.strategy.uses_error_feedback:
        residual = build_pending_residual(context, sharded_model, state)
    step = build_replica_step(context, sharded_model, state, residual)
    group, net, phases = meeting_ranks(context), context.net, context.phases
    rule: DiLoCo | StreamingDiLoCo
    if schedule.is_whole:
        rule = DiLoCo(
            *(step, schedule.steps, outer_step, build_reduction, layout.runner),
            replicas=group,
            net=net,
            phases=phases,
        )
    else:
        rule = StreamingDiLoCo(
            *(step, schedule, outer_step, build_reduction, layout.runner),
            replicas=group,
            net=net,
            phases=phases,
        )
    # A checkpoint of a coded rule can hold errors of deltas: a rule without a codec applies them at once.
    state.extra_states["moved"] = DeltaResidualFlush(sharded_model)
    if residual is not None and mesh.replica.size > 1:
        residuals = ResidualState(rule.reducer, sharded_model.updates, mesh.replica)
        state.extra_states["moved"] = DeltaResidualState(residuals, rule.deltas)
    state.extra_states["outer"] = rule
    return stop_when_recovered(context, rule)
