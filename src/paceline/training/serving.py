"""Constructors of rules with servers: who serves, over which channels, and in which form."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

from paceline.comm.channel import Channel
from paceline.errors import StrategyError
from paceline.keys import key
from paceline.layout import Holding
from paceline.state import TrainState
from paceline.sync import Rule
from paceline.sync.circle import Circle
from paceline.sync.holder import Holder
from paceline.sync.moved import MovedAtOnce
from paceline.sync.policy import Policy, Push
from paceline.sync.pushes import AnyOrder, Pushes
from paceline.sync.recovery import TOOK, Recovery, UntilRecovered
from paceline.sync.residuals import Always, Residuals
from paceline.sync.server import Server
from paceline.sync.shares import SERVER, Together, share_of
from paceline.sync.straggler import COMMUNICATION
from paceline.sync.touched_rows import TouchedRows
from paceline.sync.traffic import Coded, Traffic
from paceline.sync.tree_pushes import InTreeOrder
from paceline.sync.tried import Tried
from paceline.sync.worker import Worker
from paceline.training.alone import items_of_full_batch
from paceline.training.arrange import Setting
from paceline.training.channels import connect_first
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
    recovery = until_recovered(setting, policy)
    channel = connect_first(setting, num_servers)
    setting.closers.append(channel.close)
    told = (setting.net, setting.phases, setting.stop_requested, traffics, setting.note)
    rule: Server | Holder | Worker
    if me < num_servers:
        news = recovery.news if recovery is not None else dict[str, Any]
        rule = _serving(setting, recovery or policy, news, channel, *told)
    else:
        rule = _working(setting, policy, _pushes(setting, traffics), channel, *told)
    state.keepers["work"], state.keepers["moved"] = rule, MovedAtOnce(layout.placed.holding)
    setting.presence.append(rule)
    if recovery is None or me != SERVER or not _tries(setting):
        return rule
    return Tried(rule, partial(recovery.try_with, num_workers(setting)), setting.phases)


def _working(setting: Setting, policy: Policy, *shared: Any) -> Worker:
    counts = num_workers(setting), setting.items_per_sample
    return Worker(*counts, policy.drops, _tries(setting), _weigh(setting), *shared)


def until_recovered(setting: Setting, policy: Policy) -> UntilRecovered | None:
    """The policy, until the slow rank keeps up again; None: nobody waits for one, or nobody can tell."""
    awaited, factor = setting.awaited, setting.recipe.health.straggler_factor
    servers, workers = setting.recipe.strategy.servers, num_workers(setting)
    if awaited is None or factor is None:
        return None
    if _tries(setting):
        recovery = Recovery(workers, workers + 1, factor, awaited.returns)
        return UntilRecovered(policy, recovery.hear, awaited.rank, time.monotonic, _as_told)
    if awaited.rank < servers or workers < 2:
        return None
    recovery = Recovery(awaited.rank - servers, workers, factor, awaited.returns)
    return UntilRecovered(policy, recovery.hear, awaited.rank, time.monotonic)


def _tries(setting: Setting) -> bool:
    """Whether the slow rank serves: what it computes has to be tried, and of its link that shows nothing."""
    awaited = setting.awaited
    return awaited is not None and awaited.rank == SERVER and awaited.cause != COMMUNICATION


def _as_told(push: Push, seconds: float) -> float:
    """What a worker says of a micro-batch, as a trial is measured; not how long it was away."""
    return float(push.message.fields[TOOK])


def _serving(
    setting: Setting, policy: Policy, news: Callable[[], Any], channel: Channel, *told: Any
) -> Server | Holder:
    """The rule of a server: rank 0 decides, the others hold."""
    me, num_servers = setting.mesh.world.rank, setting.recipe.strategy.servers
    others, pushes = [rank for rank in range(num_servers) if rank != me], _pushes(setting, told[3])
    circle = Circle(channel, others, setting.net.deadline_seconds, decides=me == SERVER)
    if me != SERVER:
        return Holder(me, circle, pushes, circle, *told)
    heard = heard_as_recorded(circle, setting.recipe.debug.replay_arrivals)
    workers = setting.mesh.world.ranks[num_servers:]
    return Server(policy, workers, news, circle, pushes, heard, *told)


def _pushes(setting: Setting, traffics: Sequence[Traffic]) -> Pushes:
    """How parts are added up: in the order of the tree where bits must not depend on who ran them."""
    if setting.recipe.is_ordered:
        return InTreeOrder(setting.shards, num_workers(setting))
    return AnyOrder(traffics)


def _weigh(setting: Setting) -> Callable[[int, int], float]:
    """By how much an update divides a push, beside one of a full batch, by the samples of batch and push."""
    batch, strategy = setting.recipe.batch, setting.recipe.strategy
    if batch.reduction == "sum":
        return lambda whole, own: 1.0
    if strategy.updates_per_step == 1:
        return lambda whole, own: whole / batch.size
    return lambda whole, own: (own or 1) * num_workers(setting) / batch.size


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
        state.keepers["residual"] = Residuals(
            *(lost, holding.computes, setting.mesh.data, first),
            left=lambda: setting.presence[0].left,
            unit=Always(items=items_of_full_batch(setting)),
        )
    return [*coded.values()]
