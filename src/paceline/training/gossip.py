"""Gossip between the ranks of any hosts: channels between all of them."""

from __future__ import annotations

from paceline.state import TrainState
from paceline.sync import Rule
from paceline.sync.gossip import Gossip
from paceline.training.alone import number_of, step_alone, those_who_meet
from paceline.training.arrange import Setting
from paceline.training.channels import connect_first
from paceline.training.layouts import Layout


def gossip(setting: Setting, layout: Layout, state: TrainState) -> Rule:
    """Replicas give halves of what they have to each other, in pairs."""
    holding = layout.placed.holding
    channel = connect_first(setting, setting.mesh.world.size)
    setting.closers.append(channel.close)
    return Gossip(
        step_alone(setting, holding, state),
        int(number_of(setting)),
        [*holding.computes.values()],
        channel,
        stop_requested=setting.stop_requested,
        **those_who_meet(setting),
    )
