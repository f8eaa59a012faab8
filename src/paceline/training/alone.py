"""What every rule of replicas that train alone is given: a step of the replica, and the ranks that meet."""

from __future__ import annotations

from typing import Any

from paceline.comm import Reduction
from paceline.comm.reduction import OwedReducer
from paceline.layout import Holding
from paceline.mesh import Group
from paceline.state import TrainState
from paceline.sync import EveryStep, InnerState
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


def step_alone(
    setting: Setting, holding: Holding, state: TrainState, owed: OwedReducer | None = None
) -> EveryStep:
    """That of a replica by itself, whose optimizer is its own; collective inside it, changes the state.

    Args:
        owed: of `owing`: takes its gradients, and what coding had lost under another rule.
    """
    mesh = setting.mesh
    state.keepers["inner"], state.alone = InnerState(state, mesh.replica, mesh.inside), True
    if owed is None:
        return build_step(setting, build_reduction(setting.of_one_replica(), holding), mesh.inside)
    return step_owing(setting, owed, setting.mesh.inside)


def owing(setting: Setting, holding: Holding, *, others: bool = True) -> OwedReducer:
    """Sums over the ranks of a replica by itself, which may have taken over what coding had lost; collective.

    Args:
        others: other replicas may have taken over some of it, too.
    """
    counted = {held.updates for held in holding.held.values() if held.counts and held.updates is not None}
    inner = build_reduction(setting.of_one_replica(), holding)
    return OwedReducer(inner, holding.updates, counted, others=others)


def step_owing(setting: Setting, owed: OwedReducer, group: Group) -> EveryStep:
    """That of ranks whose gradients are not coded, and that have taken over what coding had lost."""
    more: dict[str, Any] = {"ran": lambda sums, scale: owed.ran(scale), "owes": lambda: owed.names}
    return build_step(setting, owed, group, **more)


def those_who_meet(setting: Setting) -> dict[str, Any]:
    """As `Alone` and its rules take them: of each replica one rank, and every rank in one such group."""
    mesh = setting.mesh
    replicas = mesh.world if mesh.inside.size == 1 else mesh.replica
    return {"replicas": replicas, "net": setting.net, "phases": setting.phases}


def number_of(setting: Setting) -> float:
    """What stands behind the rule's word, as in `local:8`; infinite: nothing does."""
    return float(setting.recipe.strategy.sync.partition(":")[2] or "inf")
