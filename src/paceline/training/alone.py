"""What every rule of replicas that train alone is given: a step of the replica, and the ranks that meet."""

from __future__ import annotations

from typing import Any

from paceline.comm import LocalReducer, Reduction
from paceline.layout import Holding
from paceline.mesh import Group
from paceline.state import TrainState
from paceline.sync import EveryStep, InnerState
from paceline.training.arrange import Setting


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


def step_alone(setting: Setting, holding: Holding, state: TrainState) -> EveryStep:
    """That of a replica by itself, whose optimizer is its own; changes the state."""
    state.keepers["inner"], state.alone = InnerState(state, setting.mesh.replica), True
    return build_step(setting, LocalReducer(holding.computes), setting.mesh.inside)


def those_who_meet(setting: Setting) -> dict[str, Any]:
    """As `Alone` and its rules take them."""
    return {"world": setting.mesh.world, "net": setting.net, "phases": setting.phases}


def number_of(setting: Setting) -> float:
    """What stands behind the rule's word, as in `local:8`; infinite: nothing does."""
    return float(setting.recipe.strategy.sync.partition(":")[2] or "inf")
