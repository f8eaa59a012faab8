"""What every rule of replicas that train alone is given: a step of the replica, and the ranks that meet.

Which part of a batch each of the replicas that train alone runs.
"""

from __future__ import annotations

from typing import Any

from paceline.comm.reduction.gradients import GradientReduction
from paceline.comm.reduction.pending_residual import PendingResidual
from paceline.data.work import split_evenly
from paceline.job.mesh import RankGroup
from paceline.parallel.gradient_reduction import build_gradient_reduction
from paceline.parallel.session_context import SessionContext
from paceline.parallel.sharded_model import ShardedModel
from paceline.state.train_state import TrainState
from paceline.sync.every_step import EveryStep
from paceline.sync.local_rounds import ReplicaOptimizerState
from paceline.sync.residuals import FixedUnit, ResidualState
from paceline.sync.work_assignment import SPEED_WINDOW_STEPS, SpeedAssignment, SpeedExchange


def build_every_step(
    setting: SessionContext, reducer: GradientReduction, group: RankGroup, **more: Any
) -> EveryStep:
    """The training step of the ranks of a group."""
    return (setting.pieces.rule or EveryStep)(
        group,
        setting.net,
        reducer,
        phases=setting.phases,
        items_per_sample=setting.items_per_sample,
        stop_requested=setting.stop_requested,
        by_shard=setting.recipe.is_ordered,
        **more,
    )


def build_replica_step(
    setting: SessionContext,
    sharded_model: ShardedModel,
    state: TrainState,
    owed: PendingResidual | None = None,
) -> EveryStep:
    """That of a replica by itself, whose optimizer is its own; collective inside it, changes the state.

    Args:
        owed: of `build_pending_residual`.
    """
    mesh = setting.mesh
    state.extra_states["inner"], state.alone = ReplicaOptimizerState(state, mesh.replica, mesh.inside), True
    return build_every_step(
        setting,
        build_gradient_reduction(setting.single_replica_mesh(), sharded_model),
        mesh.inside,
        owed=owed,
    )


def build_pending_residual(
    setting: SessionContext, sharded_model: ShardedModel, state: TrainState
) -> PendingResidual:
    """All that coding had lost, for a replica whose gradients are not coded; kept in the state."""
    counted = {
        held.updates for held in sharded_model.held.values() if held.counts and held.updates is not None
    }
    items = items_of_full_batch(setting)
    owed = PendingResidual(sharded_model.updates, counted, items, others=setting.mesh.replica.size > 1)
    alone, unit = setting.mesh.over(()), FixedUnit(items=items)
    state.extra_states["residual"] = ResidualState(owed, sharded_model.updates, alone, unit=unit)
    return owed


def items_of_full_batch(setting: SessionContext) -> float | None:
    """About how many items a gradient is a sum of, where updates are of means; None: they are of sums."""
    batch = setting.recipe.batch
    return float(batch.size * setting.items_per_sample) if batch.reduction == "mean" else None


def meeting_ranks(setting: SessionContext) -> dict[str, Any]:
    """As `LocalRoundLoop` and its rules take them: of each replica one rank, and every rank in one such group."""
    mesh = setting.mesh
    replicas = mesh.world if mesh.inside.size == 1 else mesh.replica
    return {"replicas": replicas, "net": setting.net, "phases": setting.phases}


def rule_argument(setting: SessionContext) -> float:
    """What stands behind the rule's word, as in `local:8`; infinite: nothing does."""
    return float(setting.recipe.strategy.sync.partition(":")[2] or "inf")


def balances_by_speed(setting: SessionContext) -> bool:
    """Whether shares follow speed, and there are several."""
    return setting.recipe.strategy.balance == "speed" and setting.mesh.world.size > 1


def build_speed_assignment(
    setting: SessionContext, notices: SpeedExchange, *, lag: int, least_window: int = SPEED_WINDOW_STEPS
) -> SpeedAssignment:
    """Even shares to begin with.

    Args:
        lag: see `SpeedAssignment`.
        least_window: steps that a measurement is of, at least.
    """
    world, shards = setting.mesh.world, setting.shards
    return SpeedAssignment(
        [len(split_evenly(shards, world.size, rank)) for rank in range(world.size)],
        world.rank,
        notices,
        lag=lag,
        window=max(SPEED_WINDOW_STEPS, least_window),
        divides=setting.recipe.batch.reduction == "mean",
        note=setting.note,
    )
