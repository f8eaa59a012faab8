"""What keys of the recipe need from other tables, or exclude: the needs that take more than a line.

Each constant is the list of `FieldNeed`s of one field or of several; the field carries it in its
annotation. A need that is decided inside one table, in one expression, stands at the field itself.

Invariant: a need is stated once. Errors of a recipe, reasons of `support`, warnings of a session and the
reference page are all made from it. Pure, and without imports of the tables, which import this module.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

from paceline.recipe.registry import RouteSpec, parse_word
from paceline.recipe.registry.optimizer_specs import OPTIMIZER_SPECS
from paceline.recipe.registry.route_specs import uses_channel
from paceline.recipe.strategy_text import phases_of, waits_for_straggler
from paceline.recipe.validation import FieldNeed

if TYPE_CHECKING:
    from paceline.recipe.recipe import Recipe
    from paceline.recipe.strategy import Strategy


class SessionFacts(NamedTuple):
    """What only the task and the processes decide about the keys of a recipe; known when a session starts.

    Args:
        recipe: with the strategy as it runs.
        has_batch_norm: the model has BatchNorm modules.
        has_held_out: the task has held-out data.
        num_nodes: of the job.
        num_replicas: ranks of the replica axis.
        num_data_ranks: ranks that share the samples of a batch, and so sum gradients.
        num_tensor_ranks: ranks of the tensor axis.
    """

    recipe: Recipe
    has_batch_norm: bool
    has_held_out: bool
    num_nodes: int
    num_replicas: int
    num_data_ranks: int
    num_tensor_ranks: int


# ---------------------------------------------------------------------- the optimizer


def need_of_optimizer(option: str, next_step: str = "") -> FieldNeed:
    """Return the need of a key that only some optimizers read; those of other packages count as well."""
    *others, last = (spec.word for spec in OPTIMIZER_SPECS if option in spec.reads)
    return FieldNeed(
        lambda table: option in table.spec.reads,
        f"with {', '.join(others)} or {last}" if others else f"with {last}",
        'found "{t.name}"',
        keys=("name",),
        next_step=next_step,
    )


COUPLED_DECAY = "{t.coupled_decay}"


def _rate_need(what: str, when: Any = None) -> FieldNeed:
    return FieldNeed(
        lambda recipe: recipe.optimizer.spec.follows_rate,
        keys=("optimizer.name",),
        scope="recipe",
        when=when,
        reason=f'expected {what} with optimizer.name = "{{t.optimizer.name}}", which reads lr only at the'
        " first update",
        is_conflict=True,
    )


RATE_SCHEDULE_NEEDS = (_rate_need("no schedule"),)
RATE_LOWERING_NEEDS = (_rate_need('another answer than "lower-rate"', lambda health: health.lowers_rates),)


# ---------------------------------------------------------------------- evaluation, health, outer optimizer

BEST_VALUE_NEEDS = (
    FieldNeed(
        lambda recipe: recipe.evaluate.patience or recipe.checkpoint.keep_best,
        "with evaluate.patience or checkpoint.keep_best",
        "and neither is set",
        keys=("evaluate.patience", "checkpoint.keep_best"),
        scope="recipe",
    ),
)
KEEP_BEST_NEEDS = (
    FieldNeed(
        lambda recipe: recipe.evaluate.every_steps,
        "with evaluate.every_steps",
        "which is not set",
        keys=("evaluate.every_steps",),
        scope="recipe",
    ),
)


HELD_OUT_NEEDS = (
    FieldNeed(
        lambda facts: facts.has_held_out,
        "with held-out data",
        "the task has no held-out data, Task(held_out=...)",
        scope="session",
    ),
)
GLOBAL_VIEW_NEEDS = (
    FieldNeed(
        lambda recipe: recipe.strategy.sync_spec.agrees != "nobody",
        "with sync=every-step, local, diloco or federated",
        "found sync={t.strategy.sync}, with which no rank sees all of a step",
        keys=("strategy.sync",),
        scope="recipe",
    ),
)
STRAGGLER_NEEDS = (
    FieldNeed(
        lambda recipe: any(spec.finds_stragglers for spec in recipe.strategy.sync_specs),
        "with sync=every-step",
        "found sync={t.strategy.sync}",
        keys=("strategy.sync",),
        scope="recipe",
    ),
)
_FOUND_SYNC = "found sync={t.strategy.sync}"


def _sync_need(met: Any, only: str) -> FieldNeed:
    return FieldNeed(met, only, _FOUND_SYNC, keys=("strategy.sync",), scope="recipe")


OUTER_NEEDS = (
    _sync_need(
        lambda recipe: recipe.strategy.sync_spec.has_outer_optimizer, "with sync=diloco:H or federated:E"
    ),
)
STREAMING_NEEDS = (_sync_need(lambda recipe: recipe.strategy.sync_spec.can_stream, "with sync=diloco:H"),)
FEDERATED_NEEDS = (
    _sync_need(lambda recipe: recipe.strategy.sync_spec.trains_clients, "with sync=federated:E"),
)
ENTROPY_NEEDS = (
    FieldNeed(
        lambda recipe: recipe.federated.secure == "masks" or recipe.private.is_on,
        'with federated.secure = "masks" or private.noise',
        'found federated.secure = "{t.federated.secure}", and no noise',
        keys=("federated.secure", "private.noise"),
        scope="recipe",
    ),
)
WIRE_NEEDS = (
    FieldNeed(
        lambda recipe: recipe.federated.is_networked,
        'with federated.clients = "network"',
        "whose messages it lists",
        keys=("federated.clients",),
        scope="recipe",
    ),
)
GLOBAL_BATCH_NEEDS = (
    _sync_need(
        lambda recipe: not recipe.strategy.sync_spec.trains_clients,
        "without sync=federated:E, whose clients have federated.batch",
    ),
)
BATCH_SCALING_NEEDS = (
    FieldNeed(
        lambda recipe: not recipe.strategy.sync_spec.trains_clients,
        keys=("strategy.sync",),
        scope="recipe",
        reason='expected "none" with sync={t.strategy.sync}, which has no global batch',
        is_conflict=True,
    ),
)
SPIKE_NEEDS = (
    *GLOBAL_VIEW_NEEDS,
    _sync_need(
        lambda recipe: not recipe.strategy.sync_spec.trains_clients,
        "without sync=federated:E, whose rounds have other clients",
    ),
)
FORMAT_NEEDS = (
    FieldNeed(
        lambda recipe: not recipe.strategy.sync_spec.trains_clients,
        keys=("strategy.sync",),
        scope="recipe",
        when=lambda compute: compute == "fp16",
        reason='expected "fp32" or "bf16" with sync={t.strategy.sync}: every client would have to find a loss'
        " scale of its own",
        is_conflict=True,
    ),
)


def _shortest_round(recipe: Recipe) -> int:
    """Return the smallest H of all `diloco:H` of a run; 0 if there is none."""
    words = recipe.strategy.sync_words
    return min((word.argument for word in words if word.spec.can_stream), default=0)


FRAGMENT_NEEDS = (
    FieldNeed(
        lambda recipe: recipe.outer.fragments <= _shortest_round(recipe),
        "with sync=diloco:H, and H as large or larger",
        "found sync={t.strategy.sync}",
        keys=("strategy.sync",),
        scope="recipe",
    ),
)
DELAY_NEEDS = (
    FieldNeed(
        lambda recipe: recipe.outer.delay_steps * recipe.outer.fragments <= _shortest_round(recipe),
        "with sync=diloco:H, and at most H / outer.fragments",
        "found fragments = {t.outer.fragments} and sync={t.strategy.sync}",
        keys=("outer.fragments", "strategy.sync"),
        scope="recipe",
    ),
)

# ---------------------------------------------------------------------- communication and security

REPLAY_NEEDS = (
    FieldNeed(
        lambda recipe: recipe.strategy.sync_spec.needs_server or recipe.strategy.sync_spec.trains_clients,
        "with a rule that has servers, or with sync=federated:E",
        "found sync={t.strategy.sync}",
        keys=("strategy.sync",),
        scope="recipe",
    ),
)
CERTIFICATE_NEEDS = (
    FieldNeed(
        lambda recipe: recipe.strategy.channel_spec.uses_certificate and recipe.security.tls != "off",
        'with channel=grpc, and without security.tls = "off"',
        'found channel={t.strategy.channel} and tls = "{t.security.tls}"',
        keys=("strategy.channel", "security.tls"),
        scope="recipe",
    ),
)
TLS_NEEDS = (
    FieldNeed(
        lambda facts: (
            facts.num_nodes > 1 or facts.recipe.strategy.servers or facts.recipe.federated.is_networked
        ),
        "with a server or clients of a network, or where a job has several nodes",
        "there is one node, and no server",
        scope="session",
    ),
)
_ONE_RANK = "one rank runs all samples, so no gradient is sent"


def _sums_gradients(facts: SessionFacts) -> bool:
    """Return whether ranks sum gradients, or have another rule, whose needs the recipe has checked."""
    return facts.num_data_ranks > 1 or not facts.recipe.strategy.sync_spec.sums


_SUMS_BETWEEN_HOSTS = FieldNeed(
    _sums_gradients, "where ranks of several hosts sum gradients", _ONE_RANK, scope="session"
)
LINK_PROFILE_NEEDS = (
    FieldNeed(
        lambda recipe: (
            (recipe.strategy.route_spec.chooses or recipe.runtime.bucket_latency is not None)
            and not (recipe.strategy.is_coded or recipe.is_ordered)
        ),
        "with route=auto or bucket_latency, and codec=fp32, and without reproducible and lanes",
        "found '{t.strategy}'",
        keys=("strategy.route", "strategy.codec", "reproducible"),
        scope="recipe",
    ),
    _SUMS_BETWEEN_HOSTS,
)
BUCKET_LATENCY_NEEDS = (
    FieldNeed(
        lambda recipe: recipe.strategy.sync_spec.sums and not (recipe.strategy.is_coded or recipe.is_ordered),
        "where gradients are summed with codec=fp32, and without reproducible and lanes",
        "found '{t.strategy}'",
        keys=("strategy.sync", "strategy.codec", "reproducible"),
        scope="recipe",
    ),
    _SUMS_BETWEEN_HOSTS,
)
BUCKET_BYTES_NEEDS = (
    FieldNeed(
        lambda recipe: recipe.strategy.sync_spec.sums,
        "where gradients are summed",
        "and sync={t.strategy.sync} sends them to a server or sums none",
        keys=("strategy.sync",),
        scope="recipe",
    ),
    FieldNeed(_sums_gradients, "where several ranks sum gradients", _ONE_RANK, scope="session"),
)

# ---------------------------------------------------------------------- the strategy


def _strategy_need(met: Any, only: str, reason: str, when: Any = None) -> FieldNeed:
    return FieldNeed(met, only, reason=reason, scope="strategy", when=when)


SHARD_NEEDS = (
    _strategy_need(lambda s: s.zero, "with zero", "shard without zero shares nothing: add zero=1"),
)
ZERO_NEEDS = (
    _strategy_need(lambda s: s.shard > 1, "with shard", "zero shares state among shard ranks: add shard=2"),
)
STORAGE_NEEDS = (
    _strategy_need(
        lambda s: s.zero == 3,
        "with zero=3",
        "storage says where shard ranks keep all of the state: add shard=2 zero=3",
    ),
)
SCHEDULE_NEEDS = (
    _strategy_need(
        lambda s: s.pipeline > 1, "with pipeline", "schedule orders the stages of a pipeline: add pipeline=2"
    ),
)
STAGES_NEEDS = (
    _strategy_need(
        lambda s: s.pipeline > 1, "with pipeline", "stages says how a pipeline is cut: add pipeline=2"
    ),
)
PARTITION_NEEDS = (
    _strategy_need(
        lambda s: s.servers > 1,
        "with several servers",
        "partition says how tensors are cut for several servers: add servers=2",
    ),
)
CHANNEL_NEEDS = (
    _strategy_need(
        lambda s: uses_channel(s.sync_spec),
        "with servers, gossip or clients of a network",
        "this rule sends no messages from rank to rank: leave out channel",
    ),
)
CODEC_NEEDS = (
    _strategy_need(
        lambda s: s.route_spec.coded != 0,
        "with a route that sends messages of its own",
        "this route has no messages that a codec could encode: leave out codec or route",
    ),
    FieldNeed(_sums_gradients, "where several ranks sum gradients", _ONE_RANK, scope="session"),
)
ROUTE_NEEDS = (
    _strategy_need(
        lambda s: s.sync_spec.sums,
        "with a rule that sums over replicas",
        "this rule sums nothing over replicas, so there is nothing to route: leave out route",
        when=lambda route: not parse_word(RouteSpec, route).spec.is_default,
    ),
    FieldNeed(
        lambda facts: _sums_gradients(facts) or facts.num_tensor_ranks > 1,
        "where several ranks send each other tensors",
        _ONE_RANK,
        scope="session",
    ),
)


def _can_balance(strategy: Strategy) -> bool:
    is_whole = strategy.ranks_per_replica == 1 and strategy.lanes == 1 and not strategy.cut
    return is_whole and strategy.sync_spec.can_balance(strategy)


BALANCE_NEEDS = (
    _strategy_need(
        _can_balance,
        "with every-step, hogwild:S or gossip:S, and replicas of one rank and one lane",
        "balance=speed assigns the shards of every-step, hogwild:S or gossip:S to whole replicas: leave out"
        " balance, or another sync, lanes, shard, tensor and pipeline",
    ),
    FieldNeed(
        lambda facts: facts.num_replicas > 1,
        "where several replicas share a batch",
        "one replica runs all shards",
        scope="session",
    ),
)


def _reads_ahead_of_server(recipe: Recipe) -> bool:
    """Return whether loader processes read ahead when a run switches to a server."""
    specs = recipe.strategy.sync_specs
    return len(specs) > 1 and specs[-1].needs_server > 0 and recipe.loader.workers > 0


def _averages(facts: SessionFacts) -> bool:
    spec = facts.recipe.strategy.sync_spec
    return spec.agrees != "replica" or facts.num_replicas > 1 or bool(spec.recipe_tables)


SYNC_NEEDS = (
    FieldNeed(
        lambda recipe: recipe.rl.total_steps,
        keys=("rl.total_steps",),
        scope="recipe",
        when=lambda text: any(phase.word.spec.learns_alone for phase in phases_of(text)),
        reason="expected rl.total_steps with sync=actors: actors play environments, and there are none",
        is_conflict=True,
        change_first="rl.total_steps",
    ),
    FieldNeed(
        lambda recipe: recipe.health.straggler_factor is not None,
        keys=("health.straggler_factor",),
        scope="recipe",
        when=waits_for_straggler,
        reason="expected health.straggler_factor with @straggler: without it no rank is reported as slow",
        is_conflict=True,
    ),
    FieldNeed(
        lambda recipe: not _reads_ahead_of_server(recipe),
        scope="recipe",
        when=lambda text: len(phases_of(text)) > 1,
        reason="expected 0 with a switch to a server: it is not known which samples come next",
        change_first="loader.workers",
        is_conflict=True,
    ),
    FieldNeed(
        _averages,
        "where several replicas average, for local:H, hogwild and gossip",
        "there is no other replica to average with",
        scope="session",
    ),
)

# ---------------------------------------------------------------------- reproducible runs, lanes, BatchNorm


def _inexact_cuts(recipe: Recipe) -> str:
    """Return the reasons for which partitions change the bits of a result."""
    messages = []
    for spec in recipe.strategy.cuts:
        if spec.inexact_reason:
            degree = getattr(recipe.strategy, spec.word, None)
            wanted = f"{spec.word}=1" if degree else "no cut"
            shown = f"{spec.word}={degree}" if degree else f"cut={spec.word}"
            messages.append(f"expected {wanted} with reproducible, found {shown}: {spec.inexact_reason}")
    return "; ".join(messages)


def _has_exact_sums(recipe: Recipe) -> bool:
    strategy = recipe.strategy
    # A client encodes its own update, wherever it trains; other codecs round the sums of ranks.
    codes_alone = strategy.sync_spec.trains_clients
    return strategy.sync_spec.has_reproducible_sums(strategy) and (
        codes_alone or all(word.spec.exact for word in strategy.codec_words)
    )


def _reproducible_need(change_first: str, met: Any, reason: Any) -> FieldNeed:
    return FieldNeed(met, change_first=change_first, reason=reason, is_conflict=True)


REPRODUCIBLE_NEEDS = (
    _reproducible_need(
        "batch.accumulation",
        lambda recipe: recipe.batch.accumulation is None,
        "expected batch.shards with reproducible: accumulation times the number of ranks would change"
        " with the ranks",
    ),
    _reproducible_need(
        "strategy",
        _has_exact_sums,
        "expected sync=every-step and codec=fp32 with reproducible, found '{t.strategy}': its result depends"
        " on which rank trains when, or on the quantisation error of the codec",
    ),
    _reproducible_need(
        "strategy",
        lambda recipe: not recipe.strategy.route_spec.has_own_sum_order,
        "expected another route with reproducible, found route={t.strategy.route}: its sums have an order of"
        " their own",
    ),
    _reproducible_need(
        "strategy",
        lambda recipe: not recipe.strategy.balances_by_speed,
        "expected balance=even with reproducible, found balance={t.strategy.balance}: the tree of additions"
        " is assigned to ranks once, for equal shares",
    ),
    _reproducible_need(
        "strategy",
        lambda recipe: not recipe.strategy.rechunk,
        "expected no rechunk with reproducible, found rechunk={t.strategy.rechunk}: a gradient that is summed"
        " part by part has other bits",
    ),
    _reproducible_need("strategy", lambda recipe: not _inexact_cuts(recipe), _inexact_cuts),
    _reproducible_need(
        "runtime",
        lambda recipe: recipe.runtime.threads <= 1,
        "expected runtime.threads = 1 (or 0) with reproducible, found {t.runtime.threads}: the number of"
        " threads inside an operation changes the order of its sums; use the cores with lanes=2 in the"
        " strategy",
    ),
    _reproducible_need(
        "runtime",
        lambda recipe: not recipe.runtime.compile,
        "expected runtime.compile = false with reproducible: a compiled graph has a sum order of its own",
    ),
)


def _lane_need(met: Any, reason: str) -> FieldNeed:
    """Return a need of runs with lanes; reproducible runs have the same ones, and report them themselves."""
    return FieldNeed(
        lambda recipe: recipe.reproducible or met(recipe),
        keys=("strategy",),
        scope="recipe",
        when=lambda lanes: lanes > 1,
        reason=reason,
        change_first="runtime",
        is_conflict=True,
    )


LANE_NEEDS = (
    _lane_need(
        lambda recipe: recipe.runtime.threads <= 1,
        "expected runtime.threads = 1 (or 0) with lanes, found {t.runtime.threads}: a lane is one thread",
    ),
    _lane_need(
        lambda recipe: not recipe.runtime.compile,
        "expected runtime.compile = false with lanes: a lane runs a copy of the model",
    ),
)


def _runs_whole_forward(recipe: Recipe) -> bool:
    """Return whether every rank runs one whole forward in every step."""
    strategy = recipe.strategy
    is_split = max(strategy.pipeline, strategy.tensor, strategy.context, strategy.lanes) > 1
    is_exact = strategy.sync_spec.exact and not strategy.servers
    return is_exact and not is_split and not strategy.balances_by_speed and not strategy.cut


def _batch_norm_need(key: str, met: Any, why: str) -> FieldNeed:
    reason = f"does not go with this {key}: {why}"
    return FieldNeed(met, keys=(key,), scope="recipe", reason=reason, is_conflict=True)


SYNC_BATCHNORM_NEEDS = (
    _batch_norm_need(
        "batch.accumulation",
        lambda recipe: (recipe.batch.accumulation or 1) == 1,
        "micro-batches of a rank run one after another",
    ),
    _batch_norm_need("strategy", _runs_whole_forward, "every rank has to run one whole forward a step"),
    _batch_norm_need(
        "reproducible", lambda recipe: not recipe.reproducible, "a sum over ranks has an order of its own"
    ),
    _batch_norm_need(
        "memory.recompute",
        lambda recipe: not recipe.memory.recomputes,
        "a recomputed block would sum again in backward",
    ),
    _batch_norm_need(
        "runtime.compile",
        lambda recipe: not recipe.runtime.compile,
        "a compiled graph has no sums over ranks",
    ),
    FieldNeed(
        lambda facts: facts.has_batch_norm,
        "where the model has BatchNorm",
        "the model has no BatchNorm",
        scope="session",
    ),
)
RECOMPUTE_NEEDS = (
    FieldNeed(
        lambda recipe: not recipe.runtime.compile,
        keys=("runtime.compile",),
        scope="recipe",
        when=lambda text: text == "segments",
        reason='expected "blocks" with runtime.compile: a traced graph knows no blocks',
        is_conflict=True,
    ),
)
