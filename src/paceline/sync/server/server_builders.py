"""Constructors of rules with servers: who serves, over which channels, and in which form.

Repeat the order in which the server of an earlier run heard its workers.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from paceline.comm.channel.channel_builders import connect_first_ranks
from paceline.comm.channel.message_channel import MessageChannel
from paceline.comm.channel.replay_channel import ReplayChannel
from paceline.comm.codecs.strategy_codec import build_codec
from paceline.errors import DataError, StrategyError
from paceline.parallel.model_layout import ModelLayout
from paceline.parallel.session_context import SessionContext
from paceline.parallel.sharded_model import ShardedModel
from paceline.report.run_reader import read_run
from paceline.state.keys import key
from paceline.state.train_state import TrainState
from paceline.sync.every_step import items_of_full_batch
from paceline.sync.residuals import DeltaResidualFlush, FixedUnit, ResidualState
from paceline.sync.server.gradient_push import PushFormat, TreeOrderedPushes, UnorderedPushes
from paceline.sync.server.parameter_server import PrimaryServer, SecondaryServer
from paceline.sync.server.parameter_transfer import (
    PRIMARY_RANK,
    CodedTransfer,
    ParameterTransfer,
    ServerResiduals,
    SparseRowTransfer,
    server_values,
)
from paceline.sync.server.server_common import ServerGroup
from paceline.sync.server.server_policies import (
    AsynchronousUpdates,
    BackupWorkers,
    BoundedStaleness,
    ServerPolicy,
    WorkerPush,
)
from paceline.sync.server.server_worker import ServerWorker
from paceline.sync.straggler_detection import COMMUNICATION
from paceline.sync.straggler_recovery import (
    MICRO_BATCH_SECONDS,
    RecoveryJudge,
    StopWhenRecovered,
    TrialServerRule,
)
from paceline.sync.sync_rule import SyncRule


def build_sync_server(context: SessionContext, layout: ModelLayout, state: TrainState) -> SyncRule:
    """Build the rule in which a server makes one update of each batch, once all its parts have arrived."""
    return build_server_rule(context, layout, state, BoundedStaleness(num_server_workers(context), 0))


def build_async_server(context: SessionContext, layout: ModelLayout, state: TrainState) -> SyncRule:
    """Build the rule in which a server applies every push as it arrives."""
    return build_server_rule(context, layout, state, AsynchronousUpdates(num_server_workers(context)))


def build_bounded_staleness(context: SessionContext, layout: ModelLayout, state: TrainState) -> SyncRule:
    """Build the rule in which a server applies every push, and no worker is more than S batches ahead."""
    bound = float(context.recipe.strategy.rule_argument)
    return build_server_rule(context, layout, state, BoundedStaleness(num_server_workers(context), bound))


def build_backup_workers(context: SessionContext, layout: ModelLayout, state: TrainState) -> SyncRule:
    """Build the rule in which a server applies the first pushes of each step and drops the last B."""
    num_backups = int(context.recipe.strategy.rule_argument)
    return build_server_rule(context, layout, state, BackupWorkers(num_server_workers(context), num_backups))


def replay_arrival_order(channel: MessageChannel, folder: str | None) -> MessageChannel:
    """The channel, in the order of the run in `folder`; None: in the order of arrival.

    Raises:
        DataError: the run has recorded none, was resumed, or has lost a worker.
    """
    if folder is None:
        return channel
    run = read_run(Path(folder))
    order = [int(rank) for record in run.of("arrivals") for rank in record["senders"]]
    if not order or len(run.starts) != 1 or run.of("lost"):
        raise DataError(
            f"{folder} holds no order of arrival of a whole run, in which no worker was lost",
            where="debug.replay_arrivals",
            next_step='record one: train under a server with log.level = "debug"',
        )
    return ReplayChannel(channel, order)


def num_server_workers(context: SessionContext) -> int:
    """All ranks that do not serve."""
    return context.mesh.world.size - context.recipe.strategy.servers


def build_server_rule(
    context: SessionContext, layout: ModelLayout, state: TrainState, policy: ServerPolicy
) -> SyncRule:
    """The first ranks serve, rank 0 by a policy, all others work; also for rules of other packages.

    Raises:
        StrategyError: loader workers would read ahead.
    """
    me, num_servers = context.mesh.world.rank, context.recipe.strategy.servers
    if context.recipe.loader.workers:
        raise StrategyError(
            "loader.workers reads ahead, and under a server nobody knows which samples come next",
            next_step="set loader.workers = 0",
        )
    traffics = _build_transfers(context, layout.runner.sharded_model, state)
    recovery = build_recovery_policy(context, policy)
    channel = connect_first_ranks(context, num_servers)
    context.close_callbacks.append(channel.close)
    told = (context.net, context.phases, context.rule_inputs.stop_requested, traffics, context.note)
    rule: PrimaryServer | SecondaryServer | ServerWorker
    if me < num_servers:
        news = recovery.news if recovery is not None else dict[str, Any]
        rule = _build_server(context, recovery or policy, news, channel, *told)
    else:
        rule = _build_worker(context, policy, _build_push_sums(context, traffics), channel, *told)
    state.extra_states["work"], state.extra_states["moved"] = (
        rule,
        DeltaResidualFlush(layout.runner.sharded_model),
    )
    context.rule_inputs.loss_tolerant_rules.append(rule)
    if recovery is None or me != PRIMARY_RANK or not _slow_rank_serves(context):
        return rule
    return TrialServerRule(rule, partial(recovery.bind_trial, num_server_workers(context)), context.phases)


def _build_worker(context: SessionContext, policy: ServerPolicy, *shared: Any) -> ServerWorker:
    counts = num_server_workers(context), context.rule_inputs.items_per_sample
    return ServerWorker(*counts, policy.drops, _slow_rank_serves(context), _push_weight(context), *shared)


def build_recovery_policy(context: SessionContext, policy: ServerPolicy) -> StopWhenRecovered | None:
    """The policy, until the slow rank keeps up again; None: nobody waits for one, or nobody can tell."""
    awaited, factor = context.rule_inputs.awaited_rank, context.recipe.health.straggler_factor
    servers, workers = context.recipe.strategy.servers, num_server_workers(context)
    if awaited is None or factor is None:
        return None
    if _slow_rank_serves(context):
        recovery = RecoveryJudge(workers, workers + 1, factor, awaited.returns)
        return StopWhenRecovered(
            policy, recovery.observe_seconds, awaited.rank, time.monotonic, _reported_seconds
        )
    if awaited.rank < servers or workers < 2:
        return None
    recovery = RecoveryJudge(awaited.rank - servers, workers, factor, awaited.returns)
    return StopWhenRecovered(policy, recovery.observe_seconds, awaited.rank, time.monotonic)


def _slow_rank_serves(context: SessionContext) -> bool:
    """Whether the slow rank serves: what it computes has to be tried, and of its link that shows nothing."""
    awaited = context.rule_inputs.awaited_rank
    return awaited is not None and awaited.rank == PRIMARY_RANK and awaited.cause != COMMUNICATION


def _reported_seconds(push: WorkerPush, seconds: float) -> float:
    """What a worker says of a micro-batch, as a trial is measured; not how long it was away."""
    return float(push.message.fields[MICRO_BATCH_SECONDS])


def _build_server(
    context: SessionContext,
    policy: ServerPolicy,
    news: Callable[[], Any],
    channel: MessageChannel,
    *told: Any,
) -> PrimaryServer | SecondaryServer:
    """The rule of a server: rank 0 decides, the others hold."""
    me, num_servers = context.mesh.world.rank, context.recipe.strategy.servers
    others, pushes = [rank for rank in range(num_servers) if rank != me], _build_push_sums(context, told[3])
    circle = ServerGroup(channel, others, context.net.deadline_seconds, decides=me == PRIMARY_RANK)
    if me != PRIMARY_RANK:
        return SecondaryServer(me, circle, pushes, circle, *told)
    heard = replay_arrival_order(circle, context.recipe.debug.replay_arrivals)
    workers = context.mesh.world.ranks[num_servers:]
    return PrimaryServer(policy, workers, news, circle, pushes, heard, *told)


def _build_push_sums(context: SessionContext, traffics: Sequence[ParameterTransfer]) -> PushFormat:
    """How parts are added up: in the order of the tree where bits must not depend on who ran them."""
    if context.recipe.is_ordered:
        return TreeOrderedPushes(context.shards, num_server_workers(context))
    return UnorderedPushes(traffics)


def _push_weight(context: SessionContext) -> Callable[[int, int], float]:
    """By how much an update divides a push, beside one of a full batch, by the samples of batch and push."""
    batch, strategy = context.recipe.batch, context.recipe.strategy
    if batch.reduction == "sum":
        return lambda whole, own: 1.0
    if strategy.updates_per_step == 1:
        return lambda whole, own: whole / batch.size
    return lambda whole, own: (own or 1) * num_server_workers(context) / batch.size


def _build_transfers(
    context: SessionContext, sharded_model: ShardedModel, state: TrainState
) -> Sequence[ParameterTransfer]:
    """The form of what goes to servers and comes from them: of a worker one for each, of a server its own."""
    me, servers = context.mesh.world.rank, range(context.recipe.strategy.servers)
    spoken = [me] if me in servers else servers
    codec = build_codec(context.recipe.strategy)
    if codec is None:
        return [SparseRowTransfer() for _ in spoken]
    seed = context.recipe.seed
    coded = {
        server: CodedTransfer(
            codec, key(seed, "server", server) if server else seed, server_values(sharded_model, server)
        )
        for server in spoken
    }
    if context.recipe.strategy.uses_error_feedback:
        lost = ServerResiduals(coded, sharded_model)
        first = context.recipe.strategy.servers
        state.extra_states["residual"] = ResidualState(
            *(lost, sharded_model.computes, context.mesh.data, first),
            left=lambda: context.rule_inputs.loss_tolerant_rules[0].left,
            unit=FixedUnit(items=items_of_full_batch(context)),
        )
    return [*coded.values()]
