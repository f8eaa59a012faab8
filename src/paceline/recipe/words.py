"""All words: one line of registration each. Here those of when replicas agree."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from paceline.recipe.channel_words import CHANNELS
from paceline.recipe.layout_words import LAYOUTS, SCHEDULES
from paceline.recipe.optimizer_words import OPTIMIZERS
from paceline.recipe.specs import (
    Argument,
    Refusal,
    Spec,
    SyncSpec,
)
from paceline.recipe.wire_words import CODECS, ROUTES, integer

if TYPE_CHECKING:
    from paceline.recipe.strategy import Strategy


def _argument(strategy: Strategy) -> int:
    return int(strategy.sync.partition(":")[2])


def _is_bound(text: str) -> bool:
    return text == "inf" or (text.isascii() and text.isdigit() and text == str(int(text)))


def _one_exact_server(strategy: Strategy) -> bool:
    """Whether one server adds what workers bring as it is; several would take norms of their own."""
    return strategy.servers == 1 and strategy.codec == "fp32"


_ONE_PIPELINE = Refusal(
    "pipedream is a rule of one pipeline: replicas=1 and pipeline=2 or more, without shard, tensor or"
    " context",
    lambda s: s.pipeline == 1 or s.replicas != 1 or s.ranks_per_replica != s.stage_ranks,
)
_SERVED = Refusal(
    "a server holds a whole model: leave out shard, tensor and pipeline",
    lambda s: s.ranks_per_replica > 1,
)
_NO_CHOICE_SPREAD = Refusal(
    "replicas of several ranks that train alone choose no codec by measuring: name one in place of auto",
    lambda s: s.ranks_per_replica > 1 and s.form.chooses,
)
_NO_LANES = Refusal("a worker of a server is one lane: leave out lanes", lambda s: s.lanes > 1)

SYNCS = (
    SyncSpec(
        word="every-step",
        summary="replicas average their gradients in every step",
        build="paceline.training.rules:every_step",
        memory="paceline.sync.every_step:memory",
        exact=True,
        agrees="world",
        shares_state=True,
        steady=True,
        deals=lambda s: s.sync == "every-step",
        more_tally_bytes=0,
    ),
    SyncSpec(
        word="backup",
        summary="a server takes the first pushes of a step and drops the last B",
        argument=integer(0, "1"),
        build="paceline.training.rules:backup",
        memory="paceline.training.served_memory:backup",
        with_terms="servers=1",
        needs_server=1,
        sums=False,
        refusals=(
            _SERVED,
            Refusal(
                "backup:B leaves out the last B of the replicas, and one must be left: add replicas",
                lambda s: _argument(s) >= (s.replicas or 1),
            ),
        ),
    ),
    SyncSpec(
        word="bounded",
        summary="a server applies every push as it comes, and nobody is more than S batches ahead",
        argument=Argument("2", "a number of batches >= 0, or inf", _is_bound),
        build="paceline.training.rules:bounded",
        memory="paceline.training.served_memory:bounded",
        with_terms="servers=1",
        needs_server=1,
        sums=False,
        updates_per_step=lambda s: (s.replicas or 1) if s.sync != "bounded:0" else 1,
        in_order=lambda s: s.sync == "bounded:0" and _one_exact_server(s),
        refusals=(_SERVED,),
    ),
    SyncSpec(
        word="server",
        summary="a server adds what all workers bring of a step, and makes one update",
        build="paceline.training.rules:server",
        memory="paceline.training.served_memory:server",
        with_terms="servers=1",
        needs_server=1,
        sums=False,
        exact=True,
        in_order=_one_exact_server,
        refusals=(_SERVED, _NO_LANES),
    ),
    SyncSpec(
        word="server-async",
        summary="a server applies every push as it comes",
        build="paceline.training.rules:server_async",
        memory="paceline.training.served_memory:server_async",
        with_terms="servers=1",
        needs_server=1,
        sums=False,
        updates_per_step=lambda s: s.replicas or 1,
        refusals=(_SERVED,),
    ),
    SyncSpec(
        word="hogwild",
        summary="replicas of one host update one set of weights without a lock; with S at most S steps apart",
        argument=Argument("2", "a number of steps >= 0, or inf", _is_bound),
        argument_may_be_missing=True,
        build="paceline.training.hogwild:hogwild",
        memory="paceline.training.hogwild:memory",
        agrees="replica",
        whole_replicas=True,
        deals=lambda s: s.sync not in ("hogwild", "hogwild:inf"),
        sums=False,
        refusals=(Refusal("hogwild sends nothing: leave out codec", lambda s: s.codec != "fp32"),),
    ),
    SyncSpec(
        word="gossip",
        summary="replicas give halves of their weights to each other in pairs, at most S steps late",
        argument=integer(0, "2"),
        build="paceline.training.gossip:gossip",
        memory="paceline.sync.gossip:memory",
        agrees="replica",
        whole_replicas=True,
        deals=lambda s: True,
        sums=False,
        sends=True,
        refusals=(Refusal("gossip sends values as they are: leave out codec", lambda s: s.codec != "fp32"),),
    ),
    SyncSpec(
        word="local",
        summary="replicas train alone for H steps, then average",
        argument=integer(1, "8"),
        build="paceline.training.rules:local",
        memory="paceline.sync.local:memory",
        agrees="replica",
        steady=True,
        more_tally_bytes=8,
        refusals=(_NO_CHOICE_SPREAD,),
    ),
    SyncSpec(
        word="diloco",
        summary="local steps with an outer optimizer",
        argument=integer(1, "50"),
        build="paceline.training.rules:diloco",
        memory="paceline.sync.local:memory",
        agrees="replica",
        steady=True,
        reads=("outer",),
        more_tally_bytes=8,
        refusals=(_NO_CHOICE_SPREAD,),
    ),
    SyncSpec(
        word="pipedream",
        summary="stages update as gradients reach them; 2bw: with two versions of weights on each",
        argument=Argument("2bw", "2bw or nothing", lambda text: text == "2bw"),
        argument_may_be_missing=True,
        build="paceline.training.pipedream:pipedream",
        memory="paceline.training.pipedream:memory",
        with_terms="replicas=1 pipeline=2",
        sums=False,
        refusals=(
            Refusal(
                "pipedream has one replica, so there is nothing to code: leave out codec",
                lambda s: s.codec != "fp32",
            ),
            Refusal(
                "pipedream orders its stages itself: leave out schedule and rechunk",
                lambda s: s.schedule != "gpipe" or bool(s.rechunk),
            ),
            _ONE_PIPELINE,
        ),
    ),
    SyncSpec(
        word="auto",
        summary="every-step, and after some steps the rule behind it that the measured link makes fastest",
        argument=Argument("every-step,diloco:8", "every-step, then rules by comma", bool),
        build="paceline.training.rules:every_step",
        chooses=True,
    ),
    SyncSpec(word="federated", argument=integer(1, "10")),
)

WORDS: tuple[Spec, ...] = (*SYNCS, *CODECS, *ROUTES, *CHANNELS, *SCHEDULES, *LAYOUTS, *OPTIMIZERS)
BY_CHOICE: Mapping[str, Mapping[str, Any]] = {
    choice: {spec.word: spec for spec in WORDS if spec.choice == choice}
    for choice in {spec.choice for spec in WORDS}
}
"""The same, by what they are a choice of, and by word."""
