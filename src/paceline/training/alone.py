"""What every rule of replicas that train alone is given: a step of the replica, and the ranks that meet."""

from __future__ import annotations

from typing import Any

from paceline.comm import Reduction
from paceline.comm.reduction import Owed
from paceline.layout import Holding
from paceline.mesh import Group
from paceline.state import TrainState
from paceline.sync import EveryStep, InnerState
from paceline.sync.residuals import Always, Residuals
from paceline.training.arrange import Setting
from paceline.training.reductions import build_reduction


def build_step(setting: Setting, reducer: Reduction, group: Group, **more: Any) -> EveryStep:
    """The training step of the ranks of a group."""
    return setting.pieces.rule(
        group,
        setting.net,
        reducer,
        phases=setting.phases,
        items_per_sample=setting.items_per_sample,
        stop_requested=setting.stop_requested,
        by_shard=setting.recipe.is_ordered,
        **more,
    )


def step_alone(setting: Setting, holding: Holding, state: TrainState, owed: Owed | None = None) -> EveryStep:
    """That of a replica by itself, whose optimizer is its own; collective inside it, changes the state.

    Args:
        owed: of `owing`.
    """
    mesh = setting.mesh
    state.keepers["inner"], state.alone = InnerState(state, mesh.replica, mesh.inside), True
    return build_step(setting, build_reduction(setting.of_one_replica(), holding), mesh.inside, owed=owed)


def owing(setting: Setting, holding: Holding, state: TrainState) -> Owed:
    """All that coding had lost, for a replica whose gradients are not coded; kept in the state."""
    counted = {held.updates for held in holding.held.values() if held.counts and held.updates is not None}
    items = items_of_full_batch(setting)
    owed = Owed(holding.updates, counted, items, others=setting.mesh.replica.size > 1)
    alone, unit = setting.mesh.over(()), Always(items=items)
    state.keepers["residual"] = Residuals(owed, holding.updates, alone, unit=unit)
    return owed


def items_of_full_batch(setting: Setting) -> float | None:
    """About how many items a gradient is a sum of, where updates are of means; None: they are of sums."""
    batch = setting.recipe.batch
    return float(batch.size * setting.items_per_sample) if batch.reduction == "mean" else None


def those_who_meet(setting: Setting) -> dict[str, Any]:
    """As `Alone` and its rules take them: of each replica one rank, and every rank in one such group."""
    mesh = setting.mesh
    replicas = mesh.world if mesh.inside.size == 1 else mesh.replica
    return {"replicas": replicas, "net": setting.net, "phases": setting.phases}


def number_of(setting: Setting) -> float:
    """What stands behind the rule's word, as in `local:8`; infinite: nothing does."""
    return float(setting.recipe.strategy.sync.partition(":")[2] or "inf")
