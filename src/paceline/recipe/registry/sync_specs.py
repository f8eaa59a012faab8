"""All words: one line of registration each. Here those of when replicas agree."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from paceline.recipe.registry.codec_specs import CODEC_SPECS, ROUTE_SPECS, integer_argument
from paceline.recipe.registry.layout_specs import LAYOUT_SPECS, SCHEDULE_SPECS
from paceline.recipe.registry.optimizer_specs import OPTIMIZER_SPECS
from paceline.recipe.registry.route_specs import CHANNEL_SPECS
from paceline.recipe.registry.word_spec import StrategyRefusal, SyncSpec, WordArgument, WordSpec

if TYPE_CHECKING:
    from paceline.recipe.strategy import Strategy


def _integer_argument(strategy: Strategy) -> int:
    return int(strategy.sync.partition(":")[2])


def _is_bound(text: str) -> bool:
    return text == "inf" or (text.isascii() and text.isdigit() and text == str(int(text)))


def _one_exact_server(strategy: Strategy) -> bool:
    """Whether one server adds what workers bring as it is; several would take norms of their own."""
    return strategy.servers == 1 and strategy.codec == "fp32"


_ONE_PIPELINE = StrategyRefusal(
    "pipedream is a rule of one pipeline: replicas=1 and pipeline=2 or more, without shard, tensor or"
    " context",
    lambda s: s.pipeline == 1 or s.replicas != 1 or s.ranks_per_replica != s.stage_ranks,
)
_NEEDS_WHOLE_MODEL = StrategyRefusal(
    "a server holds a whole model: leave out shard, tensor and pipeline",
    lambda s: s.ranks_per_replica > 1,
)
_NO_CHOICE_SPREAD = StrategyRefusal(
    "replicas of several ranks that train alone choose no codec by measuring: name one in place of auto",
    lambda s: s.ranks_per_replica > 1 and s.form.chooses,
)
_NO_LANES = StrategyRefusal("a worker of a server is one lane: leave out lanes", lambda s: s.lanes > 1)

SYNC_SPECS = (
    SyncSpec(
        word="every-step",
        summary="replicas average their gradients in every step",
        build="paceline.sync.rule_builders:build_every_step_rule",
        memory="paceline.sync.every_step:plan_memory",
        exact=True,
        agrees="world",
        shares_state=True,
        steady=True,
        deals=lambda s: s.sync == "every-step",
        extra_tally_bytes=0,
    ),
    SyncSpec(
        word="backup",
        summary="a server takes the first pushes of a step and drops the last B",
        argument=integer_argument(0, "1"),
        build="paceline.sync.rule_builders:build_backup_workers",
        memory="paceline.sync.server.server_memory:backup_workers_memory",
        with_terms="servers=1",
        needs_server=1,
        sums=False,
        refusals=(
            _NEEDS_WHOLE_MODEL,
            StrategyRefusal(
                "backup:B leaves out the last B of the replicas, and one must be left: add replicas",
                lambda s: _integer_argument(s) >= (s.replicas or 1),
            ),
        ),
    ),
    SyncSpec(
        word="bounded",
        summary="a server applies every push as it comes, and nobody is more than S batches ahead",
        argument=WordArgument("2", "a number of batches >= 0, or inf", _is_bound),
        build="paceline.sync.rule_builders:build_bounded_staleness",
        memory="paceline.sync.server.server_memory:bounded_staleness_memory",
        with_terms="servers=1",
        needs_server=1,
        sums=False,
        updates_per_step=lambda s: (s.replicas or 1) if s.sync != "bounded:0" else 1,
        in_order=lambda s: s.sync == "bounded:0" and _one_exact_server(s),
        refusals=(_NEEDS_WHOLE_MODEL,),
    ),
    SyncSpec(
        word="server",
        summary="a server adds what all workers bring of a step, and makes one update",
        build="paceline.sync.rule_builders:build_sync_server",
        memory="paceline.sync.server.server_memory:sync_server_memory",
        with_terms="servers=1",
        needs_server=1,
        sums=False,
        exact=True,
        in_order=_one_exact_server,
        refusals=(_NEEDS_WHOLE_MODEL, _NO_LANES),
    ),
    SyncSpec(
        word="server-async",
        summary="a server applies every push as it comes",
        build="paceline.sync.rule_builders:build_async_server",
        memory="paceline.sync.server.server_memory:async_server_memory",
        with_terms="servers=1",
        needs_server=1,
        sums=False,
        updates_per_step=lambda s: s.replicas or 1,
        refusals=(_NEEDS_WHOLE_MODEL,),
    ),
    SyncSpec(
        word="hogwild",
        summary="replicas of one host update one set of weights without a lock; with S at most S steps apart",
        argument=WordArgument("2", "a number of steps >= 0, or inf", _is_bound),
        argument_may_be_missing=True,
        build="paceline.sync.hogwild:build_hogwild",
        memory="paceline.sync.hogwild:hogwild_memory",
        agrees="replica",
        needs_whole_replicas=True,
        deals=lambda s: s.sync not in ("hogwild", "hogwild:inf"),
        sums=False,
        refusals=(StrategyRefusal("hogwild sends nothing: leave out codec", lambda s: s.codec != "fp32"),),
    ),
    SyncSpec(
        word="gossip",
        summary="replicas give halves of their weights to each other in pairs, at most S steps late",
        argument=integer_argument(0, "2"),
        build="paceline.sync.gossip:build_gossip",
        memory="paceline.sync.gossip:plan_memory",
        agrees="replica",
        needs_whole_replicas=True,
        deals=lambda s: True,
        sums=False,
        sends=True,
        refusals=(
            StrategyRefusal("gossip sends values as they are: leave out codec", lambda s: s.codec != "fp32"),
        ),
    ),
    SyncSpec(
        word="local",
        summary="replicas train alone for H steps, then average",
        argument=integer_argument(1, "8"),
        build="paceline.sync.rule_builders:build_local_sgd",
        memory="paceline.sync.diloco:plan_memory",
        agrees="replica",
        steady=True,
        extra_tally_bytes=8,
        refusals=(_NO_CHOICE_SPREAD,),
    ),
    SyncSpec(
        word="diloco",
        summary="local steps with an outer optimizer",
        argument=integer_argument(1, "50"),
        build="paceline.sync.rule_builders:build_diloco",
        memory="paceline.sync.diloco:plan_memory",
        agrees="replica",
        steady=True,
        reads=("outer",),
        extra_tally_bytes=8,
        refusals=(_NO_CHOICE_SPREAD,),
    ),
    SyncSpec(
        word="pipedream",
        summary="stages update as gradients reach them; 2bw: with two versions of weights on each",
        argument=WordArgument("2bw", "2bw or nothing", lambda text: text == "2bw"),
        argument_may_be_missing=True,
        build="paceline.sync.pipedream:build_pipedream",
        memory="paceline.sync.pipedream:pipedream_memory",
        with_terms="replicas=1 pipeline=2",
        sums=False,
        refusals=(
            StrategyRefusal(
                "pipedream has one replica, so there is nothing to code: leave out codec",
                lambda s: s.codec != "fp32",
            ),
            StrategyRefusal(
                "pipedream orders its stages itself: leave out schedule and rechunk",
                lambda s: s.schedule != "gpipe" or bool(s.rechunk),
            ),
            _ONE_PIPELINE,
        ),
    ),
    SyncSpec(
        word="auto",
        summary="every-step, and after some steps the rule behind it that the measured link makes fastest",
        argument=WordArgument("every-step,diloco:8", "every-step, then rules by comma", bool),
        build="paceline.sync.rule_builders:build_every_step_rule",
        chooses=True,
    ),
    SyncSpec(word="federated", argument=integer_argument(1, "10")),
)

ALL_SPECS: tuple[WordSpec, ...] = (
    *SYNC_SPECS,
    *CODEC_SPECS,
    *ROUTE_SPECS,
    *CHANNEL_SPECS,
    *SCHEDULE_SPECS,
    *LAYOUT_SPECS,
    *OPTIMIZER_SPECS,
)
SPECS_BY_CHOICE: Mapping[str, Mapping[str, Any]] = {
    choice: {spec.word: spec for spec in ALL_SPECS if spec.choice == choice}
    for choice in {spec.choice for spec in ALL_SPECS}
}
"""The same, by what they are a choice of, and by word."""
