"""Put a guard into a session's update step, as the recipe's health section says."""

from __future__ import annotations

from paceline.errors import StrategyError
from paceline.layout import Placed
from paceline.mesh import Group, Mesh
from paceline.recipe import HealthRecipe, Strategy
from paceline.sync import UpdateStep
from paceline.sync.health import ANSWERS, Answers, Guard, Watch, guarded
from paceline.sync.lowering import Lowering
from paceline.sync.witness import LossEar, Witness
from paceline.training.arrange import Setting


def guard_update(step: UpdateStep, setting: Setting, placed: Placed, ear: LossEar) -> None:
    """Let an update step look before it updates, unless no rank sees the sums of a step.

    Args:
        step: changed in place.
        setting: its `note` is told of every step that is left out.
    """
    health, strategy = setting.recipe.health, setting.recipe.strategy
    group = _who_steps_together(setting.mesh, strategy)
    if group is None:
        return
    watch = Watch(health.spike_factor, health.spike_window)
    if health.spike_factor is not None and group.size == setting.mesh.world.size:
        step.state.keepers["health"] = watch
    lowering = Lowering(health.rate_factor, health.max_lowerings, step.parts["rate"])
    if health.lowers_rates:
        step.state.keepers["rates"] = lowering
        step.parts["rate"] = lowering.set_rate
    non_finite = {**ANSWERS, "lower-rate": lowering.leave_out}[health.non_finite]
    spike = {**ANSWERS, "lower-rate": lowering.take_smaller_steps}[health.spike]
    answers = Answers(non_finite, spike, health.max_skips)
    guard = Guard(watch, Witness(placed, ear, group, setting.net), answers, setting.note)
    step.parts = guarded(step.parts, guard)
    step.observers.append(guard.accept)


def _who_steps_together(mesh: Mesh, strategy: Strategy) -> Group | None:
    """The ranks that see the same sums in a step: all, those of a replica, or nobody."""
    groups = {"world": mesh.world, "replica": mesh.inside}
    return groups.get(strategy.rule.agrees)


def refuse_health(health: HealthRecipe, strategy: Strategy) -> None:
    """Under some rules a part of the ranks would go on with a step that others leave out.

    Raises:
        StrategyError: the strategy cannot do what the health section asks for.
    """
    together = [word for word in health.answers if word in ("roll-back", "lower-rate")]
    if together and strategy.rule.agrees != "world":
        raise StrategyError(
            f'health: "{together[0]}" needs sync=every-step, and the strategy is {strategy}',
            next_step='choose "stop" or "skip"',
        )
