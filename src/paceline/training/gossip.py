"""Gossip between the ranks of any hosts: channels between all of them."""

from __future__ import annotations

from paceline.comm import LocalReducer
from paceline.state import TrainState
from paceline.sync import InnerState, Rule
from paceline.sync.gossip import Gossip
from paceline.training.arrange import Setting
from paceline.training.layouts import Layout
from paceline.training.serving import connect_first


def gossip(setting: Setting, layout: Layout, state: TrainState) -> Rule:
    """Replicas give halves of what they have to each other, in pairs."""
    world, holding = setting.mesh.world, layout.placed.holding
    channel = connect_first(setting, world.size)
    setting.closers.append(channel.close)
    state.keepers["inner"], state.alone = InnerState(state, setting.mesh.replica), True
    inner = setting.pieces.rule(
        setting.mesh.inside,
        setting.net,
        LocalReducer(holding.computes),
        phases=setting.phases,
        items_per_sample=setting.items_per_sample,
        stop_requested=setting.stop_requested,
    )
    return Gossip(
        inner,
        int(setting.recipe.strategy.sync.partition(":")[2]),
        [*holding.computes.values()],
        channel,
        world=world,
        net=setting.net,
        phases=setting.phases,
    )
