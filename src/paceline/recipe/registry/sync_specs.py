"""The rules by which replicas agree, and the class of their specifications."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from paceline.recipe.registry.word_spec import StrategyRefusal, WordArgument, WordSpec, integer_argument

if TYPE_CHECKING:
    from paceline.recipe.strategy import Strategy

AgreementScope = Literal["world", "replica", "nobody"]
"""The ranks that see the same sums in a step: all, those of one replica, or none."""


@dataclass(frozen=True, kw_only=True)
class SyncSpec(WordSpec):
    """The specification of when replicas agree: `build(context, layout, state) -> SyncRule`.

    Args:
        exact: its result is that of one process, up to rounding.
        is_exact: the same, for a rule whose argument decides it.
        agrees: the ranks that see the same sums in a step.
        shares_state: all ranks that hold a part of the state hold the same bits, so any of them may save it.
        steady: only the optimizer changes parameters before the first update of a round.
        needs_server: the smallest number of servers.
        needs_whole_replicas: each replica must be whole on one rank, and trains independently of others.
        sums: it sums over replicas with collectives, which have a route and a codec.
        sends: ranks send each other messages over a channel; with servers they always do.
        recipe_tables: tables of the recipe that only some rules read.
        finds_stragglers: it compares the step times of ranks, so a slow one can be named.
        updates_per_step: updates of one global batch, given a strategy with its replicas filled in.
        can_balance: whether the shards of a batch can be assigned by speed.
        has_reproducible_sums: whether its sums can follow the tree of a reproducible run.
        extra_tally_bytes: bytes by which its tally is longer than that of every-step; None: unknown.
        memory: `module:name` of the function that plans its memory; empty: not planned.
        can_stream: its outer step can be divided into fragments, which leave in turn.
        leaves_rounds: its replicas train alone between meetings, and a lost one only leaves its round.
        learns_alone: rank 0 learns a policy, and the other ranks play the environments of `[rl]`.
        work: `module:name` of `work(context, task) -> MicroBatchWork`, for a rule whose micro-batches are no
            parts of one global batch.
    """

    choice = "sync"
    exact: bool = False
    is_exact: Callable[[Strategy], bool] = lambda strategy: strategy.sync_spec.exact
    agrees: AgreementScope = "nobody"
    shares_state: bool = False
    steady: bool = False
    needs_server: int = 0
    needs_whole_replicas: bool = False
    sums: bool = True
    sends: bool = False
    recipe_tables: tuple[str, ...] = ()
    finds_stragglers: bool = False
    updates_per_step: Callable[[Strategy], int] = lambda strategy: 1
    has_reproducible_sums: Callable[[Strategy], bool] = lambda strategy: strategy.sync_spec.exact
    can_balance: Callable[[Strategy], bool] = lambda strategy: False
    extra_tally_bytes: int | None = None
    memory: str = ""
    can_stream: bool = False
    leaves_rounds: bool = False
    learns_alone: bool = False
    work: str = ""

    @property
    def trains_clients(self) -> bool:
        """Return whether a step is a round of clients with data of their own."""
        return "federated" in self.recipe_tables

    @property
    def has_outer_optimizer(self) -> bool:
        """Return whether an outer optimizer applies the mean movement of replicas."""
        return "outer" in self.recipe_tables


def _parse_bound(text: str) -> float:
    """Return a number of steps, or infinity."""
    if text == "inf":
        return math.inf
    if not (text.isascii() and text.isdigit() and text == str(int(text))):
        raise ValueError(text)
    return int(text)


def _parse_double_buffering(text: str) -> bool:
    if text != "2bw":
        raise ValueError(text)
    return True


def _bound(strategy: Strategy) -> float:
    """Return how many steps workers may be apart; no argument means infinitely many."""
    argument = strategy.sync_word.argument
    return math.inf if argument is None else float(argument)


def _one_exact_server(strategy: Strategy) -> bool:
    """Return whether a single server sums uncoded gradients; several would compute norms of their own."""
    return strategy.servers == 1 and not strategy.is_coded


_NEEDS_ONE_PIPELINE = StrategyRefusal(
    "pipedream is a rule of one pipeline: replicas=1 and pipeline=2 or more, without shard, tensor or"
    " context",
    lambda s: s.pipeline == 1 or s.replicas != 1 or s.ranks_per_replica != s.stage_ranks,
)
_NEEDS_WHOLE_MODEL = StrategyRefusal(
    "a server holds a whole model: leave out shard, tensor and pipeline",
    lambda s: s.ranks_per_replica > 1,
)
_NEEDS_NAMED_CODEC = StrategyRefusal(
    "replicas of several ranks that train independently cannot choose a codec by measuring: name one in place"
    " of auto",
    lambda s: s.ranks_per_replica > 1 and s.codec_spec.chooses,
)
_NEEDS_ONE_LANE = StrategyRefusal("a worker of a server is one lane: leave out lanes", lambda s: s.lanes > 1)

SYNC_SPECS = (
    SyncSpec(
        word="every-step",
        summary="replicas average their gradients in every step",
        build="paceline.sync.every_step:build_every_step_rule",
        memory="paceline.sync.every_step:plan_memory",
        exact=True,
        agrees="world",
        shares_state=True,
        steady=True,
        can_balance=lambda s: not s.is_set("sync"),
        extra_tally_bytes=0,
        finds_stragglers=True,
    ),
    SyncSpec(
        word="backup",
        summary="a server sums the first gradients of a step and drops the last B",
        argument=integer_argument(0, "1"),
        build="paceline.sync.server.server_builders:build_backup_workers",
        with_terms="servers=1",
        needs_server=1,
        is_exact=lambda s: s.sync_word.argument == 0,
        sums=False,
        refusals=(
            _NEEDS_WHOLE_MODEL,
            StrategyRefusal(
                "backup:B leaves out the last B of the replicas, and one must be left: add replicas",
                lambda s: s.sync_word.argument >= (s.replicas or 1),
            ),
        ),
    ),
    SyncSpec(
        word="bounded",
        summary="a server applies each gradient as it arrives; no worker is more than S batches ahead",
        argument=WordArgument("2", "a number of batches >= 0, or inf", _parse_bound),
        build="paceline.sync.server.server_builders:build_bounded_staleness",
        with_terms="servers=1",
        needs_server=1,
        is_exact=lambda s: _bound(s) == 0,
        sums=False,
        updates_per_step=lambda s: (s.replicas or 1) if _bound(s) else 1,
        has_reproducible_sums=lambda s: _bound(s) == 0 and _one_exact_server(s),
        refusals=(_NEEDS_WHOLE_MODEL,),
    ),
    SyncSpec(
        word="server",
        summary="a server sums the gradients of all workers in a step, and makes one update",
        build="paceline.sync.server.server_builders:build_sync_server",
        with_terms="servers=1",
        needs_server=1,
        sums=False,
        exact=True,
        has_reproducible_sums=_one_exact_server,
        refusals=(_NEEDS_WHOLE_MODEL, _NEEDS_ONE_LANE),
    ),
    SyncSpec(
        word="server-async",
        summary="a server applies each gradient as it arrives",
        build="paceline.sync.server.server_builders:build_async_server",
        with_terms="servers=1",
        needs_server=1,
        sums=False,
        updates_per_step=lambda s: s.replicas or 1,
        refusals=(_NEEDS_WHOLE_MODEL,),
    ),
    SyncSpec(
        word="hogwild",
        summary="replicas of one host update shared weights without a lock; with S at most S steps apart",
        argument=WordArgument("2", "a number of steps >= 0, or inf", _parse_bound),
        argument_may_be_missing=True,
        build="paceline.sync.hogwild:build_hogwild",
        agrees="replica",
        needs_whole_replicas=True,
        can_balance=lambda s: _bound(s) < math.inf,
        sums=False,
        refusals=(StrategyRefusal("hogwild sends nothing: leave out codec", lambda s: s.is_coded),),
    ),
    SyncSpec(
        word="gossip",
        summary="pairs of replicas send each other half of their weights, at most S steps late",
        argument=integer_argument(0, "2"),
        build="paceline.sync.gossip:build_gossip",
        agrees="replica",
        needs_whole_replicas=True,
        can_balance=lambda s: True,
        sums=False,
        sends=True,
        refusals=(StrategyRefusal("gossip sends values as they are: leave out codec", lambda s: s.is_coded),),
    ),
    SyncSpec(
        word="local",
        summary="replicas train independently for H steps, then average",
        argument=integer_argument(1, "8"),
        build="paceline.sync.diloco:build_local_sgd",
        memory="paceline.sync.diloco:plan_memory",
        agrees="replica",
        steady=True,
        leaves_rounds=True,
        extra_tally_bytes=16,
        refusals=(_NEEDS_NAMED_CODEC,),
    ),
    SyncSpec(
        word="diloco",
        summary="local steps with an outer optimizer",
        argument=integer_argument(1, "50"),
        build="paceline.sync.diloco:build_diloco",
        memory="paceline.sync.diloco:plan_memory",
        agrees="replica",
        steady=True,
        recipe_tables=("outer",),
        can_stream=True,
        leaves_rounds=True,
        extra_tally_bytes=16,
        refusals=(_NEEDS_NAMED_CODEC,),
    ),
    SyncSpec(
        word="pipedream",
        summary="stages update when gradients reach them; 2bw: with two versions of the weights each",
        argument=WordArgument("2bw", "2bw or nothing", _parse_double_buffering),
        argument_may_be_missing=True,
        build="paceline.sync.pipedream:build_pipedream",
        with_terms="replicas=1 pipeline=2",
        sums=False,
        refusals=(
            StrategyRefusal(
                "pipedream has one replica, so there is nothing to code: leave out codec",
                lambda s: s.is_coded,
            ),
            StrategyRefusal(
                "pipedream orders its stages itself: leave out schedule and rechunk",
                lambda s: s.is_set("schedule") or bool(s.rechunk),
            ),
            _NEEDS_ONE_PIPELINE,
        ),
    ),
    SyncSpec(
        word="auto",
        summary="every-step at first, then the listed rule that is fastest on the measured link",
        argument=WordArgument(
            "every-step,diloco:8", "every-step, then rules by comma", lambda text: tuple(text.split(","))
        ),
        build="paceline.sync.every_step:build_every_step_rule",
        chooses=True,
    ),
    SyncSpec(
        word="federated",
        summary="a cohort of clients trains for E passes over its own data, then their mean is applied",
        argument=integer_argument(1, "1"),
        build="paceline.federated.build_rounds:build_federated_rounds",
        work="paceline.federated.cohorts:build_cohort_work",
        agrees="replica",
        shares_state=True,
        recipe_tables=("federated", "outer"),
        has_reproducible_sums=lambda s: True,
        refusals=(
            StrategyRefusal(
                "a client trains the whole model on one rank, so no layout may split a replica: leave out"
                " shard, tensor, pipeline, context and cut",
                lambda s: s.ranks_per_replica > 1 or bool(s.cut),
            ),
            StrategyRefusal(
                "each client of federated encodes its update alone: choose a codec that does not need the"
                " values of others or of a gradient",
                lambda s: any(
                    word.spec.summed or word.spec.chooses or word.spec.has_momentum for word in s.codec_words
                ),
            ),
        ),
    ),
    SyncSpec(
        word="actors",
        summary="rank 0 learns a policy, and the other ranks play its environments",
        build="paceline.rl.actor_ranks:build_actors_rule",
        work="paceline.rl.actor_ranks:build_learner_work",
        with_terms="servers=1",
        needs_server=1,
        sums=False,
        exact=True,
        learns_alone=True,
        refusals=(
            StrategyRefusal(
                "one rank learns, and every actor has the whole policy: set servers=1, and leave out shard,"
                " tensor, pipeline, context and cut",
                lambda s: s.servers > 1 or s.ranks_per_replica > 1 or bool(s.cut),
            ),
            StrategyRefusal("actors get exact weights, and send rows: leave out codec", lambda s: s.is_coded),
            StrategyRefusal(
                "the learner is one lane, and an actor plays its groups in one thread: leave out lanes",
                lambda s: s.lanes > 1,
            ),
        ),
    ),
)


_SWITCH_REFUSALS = (
    StrategyRefusal(
        "a step of federated is a round of clients, and one of another rule a batch: name federated alone",
        lambda s: any(spec.trains_clients for spec in s.sync_specs),
    ),
    StrategyRefusal(
        "actors play for a learner from the first step on: name sync=actors alone",
        lambda s: any(spec.learns_alone for spec in s.sync_specs),
    ),
    StrategyRefusal(
        "a run can switch between rules that sum over replicas (every-step, local and diloco), and at last to"
        " one with a server, or to gossip",
        lambda s: any(not spec.sums for spec in s.sync_specs[:-1]) or not _can_be_last(s.sync_specs[-1]),
    ),
    StrategyRefusal(
        "replicas of several ranks cannot be followed until they keep up, nor can a rule be chosen for them"
        " by measuring: name a step in place of @straggler or auto",
        lambda s: s.ranks_per_replica > 1 and s.switches_on_event and _trains_independently(s.sync_specs),
    ),
    StrategyRefusal(
        "a run can switch to one server, which holds everything: set servers=1",
        lambda s: s.servers > 1,
    ),
)


def _can_be_last(spec: SyncSpec) -> bool:
    return spec.sums or spec.sends or spec.needs_server > 0


def _trains_independently(specs: Sequence[SyncSpec]) -> bool:
    return any(spec.agrees == "replica" for spec in specs)


def merge_sync_specs(specs: Sequence[SyncSpec]) -> SyncSpec:
    """Return the specification of a run that has all of these rules, one after another."""
    scopes = [spec.agrees for spec in specs]
    weakest = next(scope for scope in ("nobody", "replica", "world") if scope in scopes)
    return SyncSpec(
        word="+".join(spec.word for spec in specs),
        build=specs[0].build if all(spec.is_built for spec in specs) else "",
        exact=all(spec.exact for spec in specs),
        agrees=weakest,
        shares_state=all(spec.shares_state for spec in specs),
        steady=all(spec.steady for spec in specs),
        needs_server=max(spec.needs_server for spec in specs),
        needs_whole_replicas=any(spec.needs_whole_replicas for spec in specs),
        sums=any(spec.sums for spec in specs),
        sends=any(spec.sends for spec in specs),
        recipe_tables=tuple(dict.fromkeys(table for spec in specs for table in spec.recipe_tables)),
        can_stream=any(spec.can_stream for spec in specs),
        finds_stragglers=any(spec.finds_stragglers for spec in specs),
        refusals=_SWITCH_REFUSALS,
    )
