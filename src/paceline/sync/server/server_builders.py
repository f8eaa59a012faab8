"""Constructors of the rules with servers: which ranks serve, over which channels, and in which formats.

They stand here and not next to the policies: a policy is pure and is also used by straggler recovery, while a
constructor needs servers, workers and transfers, which need both.
Refusals: `paceline.recipe.registry.sync_specs`.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import replace
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
    own_values,
    server_values,
)
from paceline.sync.server.server_common import ServerConnections, ServerGroup
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
    bound = float(context.recipe.strategy.sync_word.argument)
    return build_server_rule(context, layout, state, BoundedStaleness(num_server_workers(context), bound))


def build_backup_workers(context: SessionContext, layout: ModelLayout, state: TrainState) -> SyncRule:
    """Build the rule in which a server applies the first pushes of each step and drops the last B."""
    num_backups = context.recipe.strategy.sync_word.argument
    return build_server_rule(context, layout, state, BackupWorkers(num_server_workers(context), num_backups))


def replay_arrival_order(channel: MessageChannel, folder: str | None) -> MessageChannel:
    """Return a channel that delivers messages in the order of an earlier run.

    Args:
        channel: delivers in order of arrival; returned as it is if `folder` is None.
        folder: a run folder.
    Raises:
        DataError: the run has recorded no order, was resumed, or has lost a worker.
    """
    if folder is None:
        return channel
    run = read_run(Path(folder))
    order = [int(rank) for record in run.of("arrivals") for rank in record["senders"]]
    if not order or len(run.starts) != 1 or run.of("lost"):
        raise DataError(
            f"{folder} has no arrival order of a complete run without lost workers",
            where="debug.replay_arrivals",
            next_step='record one: train under a server with log.level = "debug"',
        )
    return ReplayChannel(channel, order)


def num_server_workers(context: SessionContext) -> int:
    """Return the number of ranks that do not serve."""
    return context.mesh.world.size - context.recipe.strategy.servers


def build_server_rule(
    context: SessionContext, layout: ModelLayout, state: TrainState, policy: ServerPolicy
) -> SyncRule:
    """Build the rule of this rank: the first ranks serve, rank 0 decides by `policy`, the others work.

    Rules of other packages can use it with a policy of their own.

    Raises:
        StrategyError: loader workers would read ahead.
    """
    rank, num_servers = context.mesh.world.rank, context.recipe.strategy.servers
    if context.recipe.loader.workers:
        raise StrategyError(
            "loader.workers reads ahead, but under a server a worker does not know its next samples",
            next_step="set loader.workers = 0",
        )
    sharded_model = layout.runner.sharded_model
    transfers = _build_transfers(context, sharded_model, state)
    recovery = build_recovery_policy(context, policy)
    channel = connect_first_ranks(context, num_servers)
    context.close_callbacks.append(channel.close)
    connections = ServerConnections(
        _build_push_format(context, transfers),
        channel,
        context.net,
        context.phases,
        context.rule_inputs.stop_requested,
        transfers,
        context.note,
    )
    rule: PrimaryServer | SecondaryServer | ServerWorker
    if rank < num_servers:
        round_events = recovery.round_events if recovery is not None else dict[str, Any]
        rule = _build_server(context, recovery or policy, round_events, connections)
    else:
        rule = ServerWorker(
            num_server_workers(context),
            context.rule_inputs.items_per_sample,
            _push_weight(context),
            connections,
            checks_for_recall=policy.drops,
            reports_seconds=_slow_rank_serves(context),
        )
    state.extra_states["work"] = rule
    state.extra_states["moved"] = DeltaResidualFlush(sharded_model)
    context.rule_inputs.loss_tolerant_rules.append(rule)
    if recovery is None or rank != PRIMARY_RANK or not _slow_rank_serves(context):
        return rule
    return TrialServerRule(rule, partial(recovery.bind_trial, num_server_workers(context)), context.phases)


def build_recovery_policy(context: SessionContext, policy: ServerPolicy) -> StopWhenRecovered | None:
    """Let a policy stop once the slow rank has recovered.

    None: the run is not waiting for a rank, or there are too few workers to compare with.
    """
    slow, factor = context.rule_inputs.awaited_rank, context.recipe.health.straggler_factor
    servers, workers = context.recipe.strategy.servers, num_server_workers(context)
    if slow is None or factor is None:
        return None
    if _slow_rank_serves(context):
        # The server is judged like one more worker, after the last one.
        judge = RecoveryJudge(workers, workers + 1, factor, slow.returns)
        return StopWhenRecovered(policy, judge.observe_seconds, slow.rank, time.monotonic, _reported_seconds)
    if slow.rank < servers or workers < 2:
        return None
    judge = RecoveryJudge(slow.rank - servers, workers, factor, slow.returns)
    return StopWhenRecovered(policy, judge.observe_seconds, slow.rank, time.monotonic)


def _slow_rank_serves(context: SessionContext) -> bool:
    """Return whether the slow rank is rank 0, so that it needs trials; trials show nothing of a slow link."""
    slow = context.rule_inputs.awaited_rank
    return slow is not None and slow.rank == PRIMARY_RANK and slow.cause != COMMUNICATION


def _reported_seconds(push: WorkerPush, seconds: float) -> float:
    """Return the seconds that a worker reports for a micro-batch, which a trial also measures."""
    return float(push.message.fields[MICRO_BATCH_SECONDS])


def _build_server(
    context: SessionContext,
    policy: ServerPolicy,
    round_events: Callable[[], Any],
    connections: ServerConnections,
) -> PrimaryServer | SecondaryServer:
    """Build the rule of a server: rank 0 decides, the others hold parts."""
    rank, num_servers = context.mesh.world.rank, context.recipe.strategy.servers
    others = [server for server in range(num_servers) if server != rank]
    group = ServerGroup(
        connections.channel, others, context.net.deadline_seconds, decides=rank == PRIMARY_RANK
    )
    if rank != PRIMARY_RANK:
        return SecondaryServer(rank, group, replace(connections, channel=group))
    # Around the group: only messages for the policy are replayed, not those between servers.
    channel = replay_arrival_order(group, context.recipe.debug.replay_arrivals)
    workers = context.mesh.world.ranks[num_servers:]
    return PrimaryServer(policy, workers, round_events, group, replace(connections, channel=channel))


def _build_push_format(context: SessionContext, transfers: Sequence[ParameterTransfer]) -> PushFormat:
    """Return pushes of tree nodes if bits must not depend on which worker ran a part, else plain sums."""
    if context.recipe.is_ordered:
        return TreeOrderedPushes(context.shards, num_server_workers(context))
    return UnorderedPushes(transfers)


def _push_weight(context: SessionContext) -> Callable[[int, int], float]:
    """Return the function from the samples of a batch and of a push to the weight of the push.

    The weight is the divisor of a push in its update, relative to a full batch; see `AssignedPart`.
    """
    batch, strategy = context.recipe.batch, context.recipe.strategy
    if batch.reduction == "sum":
        return lambda batch_samples, push_samples: 1.0
    if strategy.updates_per_step == 1:
        return lambda batch_samples, push_samples: batch_samples / batch.size
    num_workers = num_server_workers(context)
    return lambda batch_samples, push_samples: (push_samples or 1) * num_workers / batch.size


def _build_transfers(
    context: SessionContext, sharded_model: ShardedModel, state: TrainState
) -> Sequence[ParameterTransfer]:
    """Build the transfers of this rank: of a worker one per server, of a server its own."""
    rank, strategy, seed = context.mesh.world.rank, context.recipe.strategy, context.recipe.seed
    is_server = rank < strategy.servers
    servers = [rank] if is_server else range(strategy.servers)
    codec = build_codec(strategy)
    if codec is None:
        return [SparseRowTransfer() for _ in servers]
    transfers = {
        server: CodedTransfer(
            codec,
            key(seed, "server", server) if server else seed,
            own_values(sharded_model) if is_server else server_values(sharded_model, server),
        )
        for server in servers
    }
    if strategy.uses_error_feedback:
        residuals = ServerResiduals(transfers, sharded_model)
        state.extra_states["residual"] = ResidualState(
            residuals,
            sharded_model.computes,
            context.mesh.data,
            first=strategy.servers,
            # The rule is registered later; it knows which ranks are left at the end of a round.
            left=lambda: context.rule_inputs.loss_tolerant_rules[0].left,
            unit=FixedUnit(items=items_of_full_batch(context)),
        )
    return [*transfers.values()]
