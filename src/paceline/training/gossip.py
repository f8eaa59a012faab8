"""Gossip between the ranks of any hosts: channels between all of them."""

from __future__ import annotations

from paceline.state import TrainState
from paceline.sync import Rule
from paceline.sync.dealing import Dealt
from paceline.sync.gossip import Gossip
from paceline.sync.notices import Carried
from paceline.sync.pairs import turn_clocks
from paceline.training.alone import number_of, step_alone, those_who_meet
from paceline.training.arrange import Setting
from paceline.training.balance import dealt_by_speed, is_by_speed
from paceline.training.channels import connect_first
from paceline.training.layouts import Layout


def gossip(setting: Setting, layout: Layout, state: TrainState) -> Rule:
    """Replicas give halves of what they have to each other, in pairs."""
    holding, bound = layout.placed.holding, int(number_of(setting))
    notices, shares = _by_speed(setting, bound) if is_by_speed(setting) else (None, None)
    channel = connect_first(setting, setting.mesh.world.size)
    setting.closers.append(channel.close)
    return Gossip(
        step_alone(setting, holding, state),
        bound,
        [*holding.computes.values()],
        channel,
        stop_requested=setting.stop_requested,
        notices=notices,
        shares=shares,
        **those_who_meet(setting),
    )


def _by_speed(setting: Setting, bound: int) -> tuple[Carried, Dealt]:
    """What travels with halves, and what deals by it; in a turn of the pairs a rank meets all others."""
    world = setting.mesh.world
    notices, turn = Carried(world.rank, world.size), turn_clocks(world.size)
    return notices, dealt_by_speed(setting, notices, lag=turn - 1 + bound, least_window=turn)
