"""Constructors of rules with servers: who serves, over which channels, and in which form."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from paceline.addresses import address_towards
from paceline.comm.channel import Channel, SocketChannel
from paceline.comm.channel.hub import accept_all, connect, listen
from paceline.comm.text import share_text
from paceline.errors import StrategyError
from paceline.handshake import encrypts
from paceline.keys import key
from paceline.layout import Holding
from paceline.state import TrainState
from paceline.sync import Rule
from paceline.sync.circle import Circle
from paceline.sync.holder import Holder
from paceline.sync.policy import Policy
from paceline.sync.pushes import AnyOrder, Pushes
from paceline.sync.residuals import Residuals
from paceline.sync.server import Server
from paceline.sync.shares import SERVER, Together, share_of
from paceline.sync.touched_rows import TouchedRows
from paceline.sync.traffic import Coded, Traffic
from paceline.sync.tree_pushes import InTreeOrder
from paceline.sync.worker import Worker
from paceline.training.arrange import Setting
from paceline.training.codecs import make_codec
from paceline.training.layouts import Layout
from paceline.training.replay import heard_as_recorded


def num_workers(setting: Setting) -> int:
    """All ranks that do not serve."""
    return setting.mesh.world.size - setting.recipe.strategy.servers


def served(setting: Setting, layout: Layout, state: TrainState, policy: Policy) -> Rule:
    """The first ranks serve, rank 0 by a policy, all others work; also for rules of other packages.

    Raises:
        StrategyError: loader workers would read ahead.
    """
    me, num_servers = setting.mesh.world.rank, setting.recipe.strategy.servers
    if setting.recipe.loader.workers:
        raise StrategyError(
            "loader.workers reads ahead, and under a server nobody knows which samples come next",
            next_step="set loader.workers = 0",
        )
    traffics = _traffics(setting, layout.placed.holding, state)
    channel: Channel = connect_first(setting, num_servers)
    setting.closers.append(channel.close)
    told = (setting.net, setting.phases, setting.stop_requested, traffics)
    rule: Server | Holder | Worker
    if me < num_servers:
        rule = _serving(setting, policy, channel, *told)
    else:
        pushes = _pushes(setting, traffics)
        rule = Worker(num_workers(setting), setting.items_per_sample, pushes, channel, *told)
    state.keepers["work"] = rule
    setting.presence.append(lambda: rule.left)
    return rule


def _serving(setting: Setting, policy: Policy, channel: Channel, *told: Any) -> Server | Holder:
    """The rule of a server: rank 0 decides, the others hold."""
    me, num_servers = setting.mesh.world.rank, setting.recipe.strategy.servers
    others, pushes = [rank for rank in range(num_servers) if rank != me], _pushes(setting, told[-1])
    circle = Circle(channel, others, setting.net.deadline_seconds, decides=me == SERVER)
    if me != SERVER:
        return Holder(me, circle, pushes, circle, *told)
    heard = heard_as_recorded(circle, setting.recipe.debug.replay_arrivals)
    workers = setting.mesh.world.ranks[num_servers:]
    return Server(policy, workers, setting.note, circle, pushes, heard, *told)


def _pushes(setting: Setting, traffics: Sequence[Traffic]) -> Pushes:
    """How parts are added up: in the order of the tree where bits must not depend on who ran them."""
    if setting.recipe.is_ordered:
        return InTreeOrder(setting.shards, num_workers(setting))
    return AnyOrder(traffics)


def _traffics(setting: Setting, holding: Holding, state: TrainState) -> Sequence[Traffic]:
    """The form of what goes to servers and comes from them: of a worker one for each, of a server its own."""
    me, servers = setting.mesh.world.rank, range(setting.recipe.strategy.servers)
    spoken = [me] if me in servers else servers
    codec = make_codec(setting.recipe.strategy)
    if codec is None:
        return [TouchedRows() for _ in spoken]
    seed = setting.recipe.seed
    coded = {
        server: Coded(codec, key(seed, "server", server) if server else seed, share_of(holding, server))
        for server in spoken
    }
    if setting.recipe.strategy.feeds_back:
        lost = Together(coded, holding)
        first = setting.recipe.strategy.servers
        state.keepers["residual"] = Residuals(lost, holding.computes, setting.mesh.data, first=first)
    return [*coded.values()]


def connect_first(setting: Setting, num_ranks: int) -> SocketChannel:
    """Connect every one of the first ranks with all ranks after it; collective."""
    world, cluster, limit = setting.mesh.world, setting.cluster, setting.net.deadline_seconds
    me, token = world.rank, cluster.token
    secure = encrypts(setting.recipe.security.tls, cluster.num_nodes)
    listener = listen(_own_address(setting)) if me < num_ranks else None
    try:
        own = f"{listener.getsockname()[1]} {_own_address(setting)}" if listener else ""
        device = torch.device("cpu")
        places = [share_text(own, world, setting.net, device, first) for first in range(num_ranks)]
        peers = {}
        for server, place in enumerate(places[:me]):
            port, _, address = place.partition(" ")
            peers[server] = connect(address, int(port), me, token, limit, tls=secure)
        if listener:
            peers |= accept_all(listener, token, world.ranks[me + 1 :], limit, tls=secure)
    finally:
        if listener:
            listener.close()
    return SocketChannel(peers, setting.net.ledger)


def _own_address(setting: Setting) -> str:
    """By which the other ranks reach this server."""
    cluster = setting.cluster
    if cluster.node_rank == 0:
        return cluster.address
    return address_towards(cluster.address, cluster.port)
