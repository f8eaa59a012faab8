"""Constructors of the rules. A rule says when replicas agree."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, cast

from torch import Tensor

from paceline.comm.codecs.strategy_codec import local_clip_norm
from paceline.comm.reduction.gradient_norm import LocalClip, SharedNorm
from paceline.comm.reduction.gradients import GradientReduction
from paceline.comm.reduction.pending_residual import GradientUnit
from paceline.data.work import LockstepWork, MicroBatchWork, split_evenly
from paceline.job.mesh import DATA_AXES, RankGroup
from paceline.parallel.gradient_reduction import build_delta_reduction, build_gradient_reduction
from paceline.parallel.model_layout import ModelLayout
from paceline.parallel.session_context import SessionContext
from paceline.parallel.sharded_model import ShardedModel
from paceline.state.slot import TensorSlot
from paceline.state.train_state import TrainState
from paceline.sync.diloco import DiLoCo
from paceline.sync.every_step import EveryStep, power_of_two_below
from paceline.sync.outer_optimizer import OuterOptimizer, OuterStep
from paceline.sync.replica_step import (
    build_every_step,
    build_pending_residual,
    build_replica_step,
    meeting_ranks,
    rule_argument,
)
from paceline.sync.residuals import DeltaResidualFlush, DeltaResidualState, ResidualState
from paceline.sync.server.server_builders import build_server_rule, num_server_workers
from paceline.sync.server.server_policies import AsynchronousUpdates, BackupWorkers, BoundedStaleness
from paceline.sync.straggler_detection import COMMUNICATION, StragglerDetection
from paceline.sync.straggler_recovery import (
    RecoveryJudge,
    ReplicaRecoveryRule,
    measure_compute,
    measure_links,
)
from paceline.sync.streaming_diloco import FragmentSchedule, StreamingDiLoCo
from paceline.sync.sync_choice import SyncChooser
from paceline.sync.sync_rule import SyncRule
from paceline.sync.work_assignment import SpeedBalancedRule


def build_every_step_rule(setting: SessionContext, layout: ModelLayout, state: TrainState) -> SyncRule:
    """All replicas average their gradients in every step."""
    sharded_model, replicas = layout.runner.sharded_model, setting.mesh.data
    step, reducer = _coded_step(setting, sharded_model, state)
    state.extra_states["moved"] = DeltaResidualFlush(sharded_model)
    told: dict[str, Any] = {"group": replicas, "net": setting.net, "note": setting.note}
    rule: SyncRule = step
    ran: Callable[[int], int] = partial(_micro_batches, setting.shards, replicas)
    if setting.recipe.strategy.balance == "speed" and setting.mesh.replica.size > 1:
        shares = [len(split_evenly(setting.shards, replicas.size, rank)) for rank in range(replicas.size)]
        rule = balanced = SpeedBalancedRule(step, _assign_shares, shares, **told)
        ran = balanced.ran
    factor = setting.recipe.health.straggler_factor
    if factor is not None and replicas.size > 1:
        rule = StragglerDetection(rule, ran, factor, **told)
    if setting.choices and replicas.size > 1:
        rule = SyncChooser(rule, setting.choices, reducer, sharded_model.computes, warn=setting.warn, **told)
    return rule


def _coded_step(
    setting: SessionContext, sharded_model: ShardedModel, state: TrainState
) -> tuple[EveryStep, GradientReduction]:
    """A step of all ranks, and what sums; what their coding loses is kept.

    One rank codes nothing, and applies what others had lost.
    """
    codes, world = setting.recipe.strategy.uses_error_feedback, setting.mesh.world
    if codes and world.size == 1 and not setting.recipe.is_ordered:
        reducer = build_gradient_reduction(setting, sharded_model)
        return build_every_step(
            setting, reducer, world, owed=build_pending_residual(setting, sharded_model, state)
        ), reducer
    reducer = build_gradient_reduction(setting, sharded_model)
    if not codes:
        return _clipped_step(setting, reducer), reducer
    items, divides = setting.recipe.batch.size * setting.items_per_sample, _divides(setting)
    scale = state.scale.value / power_of_two_below(items)
    unit = GradientUnit(reducer.rescale, scale, items, divides=divides)
    coders = setting.mesh.over([*DATA_AXES, *sharded_model.reduction_axes])
    state.extra_states["residual"] = ResidualState(reducer, sharded_model.computes, coders, unit=unit)
    return _clipped_step(setting, reducer, follows=unit.follow), reducer


def _divides(setting: SessionContext) -> bool:
    return setting.recipe.batch.reduction == "mean"


def _clipped_step(setting: SessionContext, reducer: GradientReduction, **more: Any) -> EveryStep:
    """A step of all ranks, each of which clips its gradient first, if the codec says so."""
    clip_norm, world = local_clip_norm(setting.recipe.strategy), setting.mesh.world
    if clip_norm is None or world.size == 1:
        return build_every_step(setting, reducer, world, **more)
    clip = LocalClip(reducer, clip_norm, world.size, divides=_divides(setting))
    return build_every_step(
        setting, clip, world, ran=lambda sums, scale: clip.ran(sums.read()[1], scale), **more
    )


def _micro_batches(shards: int, group: RankGroup, step: int) -> int:
    """Of a rank that has an even share of a full batch."""
    return len(split_evenly(shards, group.size, group.rank))


def _assign_shares(work: MicroBatchWork, shares: Sequence[int]) -> MicroBatchWork:
    return cast("LockstepWork", work).dealt(shares)


def _build_local_rounds(
    setting: SessionContext,
    layout: ModelLayout,
    state: TrainState,
    outer: OuterOptimizer,
    streaming: FragmentSchedule,
) -> SyncRule:
    """Replicas that train alone; what they have moved travels at once, or in fragments."""
    mesh, sharded_model = setting.mesh, layout.runner.sharded_model
    at_end = OuterStep(outer, SharedNorm(mesh.inside, setting.net), layout.gather)

    def sums(anchors: Mapping[TensorSlot, Tensor], number: int = 0) -> GradientReduction:
        name = f"fragment-{number}/" if streaming.fragments > 1 else ""
        return build_delta_reduction(setting, sharded_model, anchors, name)

    owed = (
        build_pending_residual(setting, sharded_model, state)
        if setting.recipe.strategy.uses_error_feedback
        else None
    )
    step, told = build_replica_step(setting, sharded_model, state, owed), meeting_ranks(setting)
    rule: DiLoCo | StreamingDiLoCo
    if streaming.is_whole:
        rule = DiLoCo(step, streaming.steps, at_end, sums, layout.runner, **told)
    else:
        rule = StreamingDiLoCo(step, streaming, at_end, sums, layout.runner, **told)
    state.extra_states["moved"] = DeltaResidualFlush(sharded_model)
    if owed is not None and mesh.replica.size > 1:
        residuals = ResidualState(rule.reducer, sharded_model.updates, mesh.replica)
        state.extra_states["moved"] = DeltaResidualState(residuals, rule.movements)
    state.extra_states["outer"] = rule
    return _until_recovered(setting, rule)


def _until_recovered(setting: SessionContext, rule: SyncRule) -> SyncRule:
    """The rule, until a slow replica, or its link, keeps up again; where nobody was slow, for good."""
    awaited, factor, replicas = setting.awaited, setting.recipe.health.straggler_factor, setting.mesh.replica
    if awaited is None or factor is None:
        return rule
    recovery = RecoveryJudge(replicas.ranks.index(awaited.rank), replicas.size, factor, awaited.returns)
    look = measure_compute(partial(_micro_batches, setting.shards, replicas), replicas, setting.net)
    if awaited.cause == COMMUNICATION:
        look = measure_links(replicas, setting.net)
    return ReplicaRecoveryRule(rule, recovery.hear, awaited.rank, look, setting.note)


def build_local_sgd(setting: SessionContext, layout: ModelLayout, state: TrainState) -> SyncRule:
    """Replicas train alone, then average."""
    return _build_local_rounds(
        setting, layout, state, OuterOptimizer(), FragmentSchedule(int(rule_argument(setting)))
    )


def build_diloco(setting: SessionContext, layout: ModelLayout, state: TrainState) -> SyncRule:
    """Replicas train alone, then an outer optimizer moves them; in fragments, if the recipe says so."""
    outer = setting.recipe.outer
    streaming = FragmentSchedule(
        int(rule_argument(setting)), outer.fragments, outer.delay_steps, outer.mixing
    )
    return _build_local_rounds(setting, layout, state, OuterOptimizer(outer.lr, outer.momentum), streaming)


def build_sync_server(setting: SessionContext, layout: ModelLayout, state: TrainState) -> SyncRule:
    """A server makes one update of a batch, once all its parts have come."""
    return build_server_rule(setting, layout, state, BoundedStaleness(num_server_workers(setting), 0))


def build_async_server(setting: SessionContext, layout: ModelLayout, state: TrainState) -> SyncRule:
    """A server applies every push."""
    return build_server_rule(setting, layout, state, AsynchronousUpdates(num_server_workers(setting)))


def build_bounded_staleness(setting: SessionContext, layout: ModelLayout, state: TrainState) -> SyncRule:
    """A server applies every push, and nobody gets too far ahead."""
    return build_server_rule(
        setting, layout, state, BoundedStaleness(num_server_workers(setting), rule_argument(setting))
    )


def build_backup_workers(setting: SessionContext, layout: ModelLayout, state: TrainState) -> SyncRule:
    """A server applies the first pushes of a step."""
    return build_server_rule(
        setting, layout, state, BackupWorkers(num_server_workers(setting), int(rule_argument(setting)))
    )
