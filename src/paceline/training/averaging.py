"""Put an average of the weights into a session, as the recipe says, under every strategy."""

from __future__ import annotations

from paceline.comm.many import give_all
from paceline.mesh import Group
from paceline.state import TrainState
from paceline.sync import UpdateStep
from paceline.sync.average import Average
from paceline.sync.shares import share_of
from paceline.training.arrange import Setting
from paceline.training.layouts import Layout

KEPT_AS = "average"


def build_average(
    setting: Setting, layout: Layout, state: TrainState, update_step: UpdateStep
) -> Average | None:
    """An average that follows every update; None: the recipe asks for none.

    Replicas that train alone differ between two rounds: their average follows the rounds (`Session.rounds`).
    """
    decay, strategy = setting.recipe.average.decay, setting.recipe.strategy
    if decay is None:
        return None
    holding = layout.placed.holding
    keeps = not strategy.servers or setting.mesh.world.rank < strategy.servers

    def bring(world: Group) -> None:
        if strategy.servers:
            for server in range(strategy.servers):
                give_all([*share_of(holding, server).values()], setting.net, world, server)
        else:
            layout.gather()

    average = Average(holding.updates, decay, bring, keeps=keeps)
    state.keepers[KEPT_AS] = average
    if not by_rounds(setting):
        update_step.observers.append(average.accept)
    return average


def by_rounds(setting: Setting) -> bool:
    """Whether replicas agree only where a round ends."""
    return setting.recipe.strategy.rule.agrees == "replica"
