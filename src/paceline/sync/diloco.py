"""Local SGD and DiLoCo: replicas train alone for H steps, then agree on where they went.

A round: every replica takes H steps of its own with its own optimizer. What it moved, weighted by the items
that it trained on, is summed over the replicas, and an outer optimizer takes that mean as its gradient. A
replica may be spread over ranks (shards, stages, tensors, positions): each rank sums what it updates with
those that update the same part in the other replicas, and keeps the outer momentum of that part.
Buffers move by the mean of what they moved on the replicas, weighted by micro-batches as in every-step.
With outer SGD of rate 1 the replicas are averaged; for H = 1 and inner SGD without a clip that is exactly
every-step.

Invariant: after a round all replicas hold equal parameters and buffers. The inner optimizers stay apart, and
all of them are state (`inner`).
Source: Stich 2019, Local SGD Converges Fast, arXiv:1805.09767, Algorithm 1; Douillard et al. 2023, DiLoCo,
arXiv:2311.08105, Algorithm 1 (inner AdamW, outer Nesterov).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping

from torch import Tensor

from paceline.comm.net import Net
from paceline.comm.reduction.gradient_norm import SharedNorm
from paceline.comm.reduction.gradients import GradientReduction
from paceline.comm.tally import StepTally
from paceline.data.work import TrainingFeed
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


class DiLoCo(ExtraState):
    """H steps alone, then one agreement.

    Args:
        inner: the step of one replica.
        num_local_steps: H; the last round of a run may be shorter.
        outer: what the agreement does.
        reducer: makes what sums movements over the replicas.
        told: see `LocalRoundLoop`.
    Wire: every H steps one all_reduce of what a rank updates, and one of the tally, over the ranks that hold
        the same, of every replica one; inside a replica that of a step, and what follows an update.
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
        self._movement = ParameterDelta(anchors, runner, outer, self.reducer)
        self.movements = [self._movement]

    def rounds(self, feed: TrainingFeed, runner: ModelRunner, update_step: UpdateStep) -> Iterator[StepStats]:
        """See `Rule`: a round is H steps."""
        return self._loop.rounds(
            feed, runner, update_step, begin=self._begin, step=_take_step, meet=self._agree
        )

    def abort(self) -> None:
        """See `Rule`."""
        self.inner.abort()
        self.reducer.abort()

    def _begin(self, feed: TrainingFeed, step: int) -> int:
        self._movement.begin()
        return min(step + self._num_local_steps, feed.num_steps)

    def _agree(self, stretch: LocalRound, runner: ModelRunner) -> tuple[StepTally, Mapping[str, float]]:
        """Sum the movements, step from the anchors, and go on from there."""
        tally, told = self._loop.agree(stretch, runner, skipped=stretch.skipped)
        self._movement.leave(stretch.count, tally.count)
        self._movement.arrive(tally)
        self._movement.mix(0.0)
        return tally, told

    def pieces(self) -> list[TensorPiece]:
        """Momentum of the outer optimizer, by parameter."""
        return self._movement.pieces()

    def wanted(self, shapes: Mapping[str, tuple[int, ...]]) -> Mapping[str, SlotIndex]:
        """See `ExtraState`."""
        return self._movement.wanted(shapes)

    def load(self, tensors: Mapping[str, Tensor]) -> None:
        """The inverse of `pieces`; a round that was under way is forgotten."""
        self._loop.forget()
        self._movement.load(tensors)


def plan_memory(query: MemoryQuery) -> RuleMemory:
    """Return the bytes of the parameters at the start of a round, outer momentum and buckets.

    Each is as large as what the rank updates. At the end of a round the rank computes its parameter changes
    one tensor at a time, so the largest tensor counts twice there.
    """
    own, strategy = query.sizes.updates, query.recipe.strategy
    parts = [one.updates for one in query.held.values() if one.updates is not None]
    momentum = own if strategy.rule.word == "diloco" and query.recipe.outer.momentum else 0
    return RuleMemory(
        state=own + momentum,
        wire=own if strategy.degrees["replica"] > 1 else 0,
        agreement=2 * max((slot_bytes(part, query.item_bytes) for part in parts), default=0),
    )


def _take_step(stretch: LocalRound, take: TakeStep) -> None:
    take()


def build_local_sgd(context: SessionContext, layout: ModelLayout, state: TrainState) -> SyncRule:
    """Build the rule in which replicas train alone for H steps, then average their parameters."""
    schedule = FragmentSchedule(int(context.recipe.strategy.rule_argument))
    return _build_local_rounds(context, layout, state, OuterOptimizer(), schedule)


def build_diloco(context: SessionContext, layout: ModelLayout, state: TrainState) -> SyncRule:
    """Build DiLoCo, or streaming DiLoCo if the recipe cuts the parameters into fragments."""
    outer, num_steps = context.recipe.outer, int(context.recipe.strategy.rule_argument)
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
    state.extra_states["moved"] = DeltaResidualFlush(sharded_model)
    if residual is not None and mesh.replica.size > 1:
        residuals = ResidualState(rule.reducer, sharded_model.updates, mesh.replica)
        state.extra_states["moved"] = DeltaResidualState(residuals, rule.movements)
    state.extra_states["outer"] = rule
    return stop_when_recovered(context, rule)
