"""The words of a strategy: one line of registration each."""

from __future__ import annotations

from typing import TYPE_CHECKING

from paceline.recipe.specs import (
    Argument,
    LayoutSpec,
    Refusal,
    ScheduleSpec,
    Spec,
    SyncSpec,
)
from paceline.recipe.wire_words import CODECS, ROUTES, integer

if TYPE_CHECKING:
    from paceline.recipe.strategy import Strategy


def _anything(example: str) -> Argument:
    return Argument(example, "an argument", lambda text: bool(text) and not any(c.isspace() for c in text))


def _argument(strategy: Strategy) -> int:
    return int(strategy.sync.partition(":")[2])


_ONE_PIPELINE = Refusal(
    "pipedream is a rule of one pipeline: replicas=1 and pipeline=2 or more, without shard or tensor",
    lambda s: s.pipeline == 1 or s.replicas != 1 or s.shard > 1 or s.tensor > 1,
)
_SERVED = Refusal(
    "a server holds a whole model: leave out shard, tensor and pipeline",
    lambda s: s.ranks_per_replica > 1,
)

SYNCS = (
    SyncSpec(
        word="every-step",
        summary="replicas average their gradients in every step",
        build="paceline.training.rules:every_step",
        exact=True,
        agrees="world",
        shares_state=True,
        steady=True,
        more_tally_bytes=0,
    ),
    SyncSpec(
        word="backup",
        summary="a server takes the first pushes of a step and drops the last B",
        argument=integer(0, "1"),
        build="paceline.training.rules:backup",
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
    SyncSpec(word="bounded", argument=integer(1, "2")),
    SyncSpec(word="server"),
    SyncSpec(
        word="server-async",
        summary="a server applies every push as it comes",
        build="paceline.training.rules:server_async",
        with_terms="servers=1",
        needs_server=1,
        sums=False,
        updates_per_step=lambda replicas: replicas,
        refusals=(_SERVED,),
    ),
    SyncSpec(word="hogwild"),
    SyncSpec(
        word="local",
        summary="replicas train alone for H steps, then average",
        argument=integer(1, "8"),
        build="paceline.training.rules:local",
        agrees="replica",
        steady=True,
        whole_replicas=True,
        more_tally_bytes=8,
    ),
    SyncSpec(
        word="diloco",
        summary="local steps with an outer optimizer",
        argument=integer(1, "50"),
        build="paceline.training.rules:diloco",
        agrees="replica",
        steady=True,
        whole_replicas=True,
        reads=("outer",),
        more_tally_bytes=8,
    ),
    SyncSpec(
        word="pipedream",
        summary="stages update as gradients reach them",
        build="paceline.training.rules:pipedream",
        with_terms="replicas=1 pipeline=2",
        sums=False,
        refusals=(
            Refusal(
                "pipedream has one replica, so there is nothing to code: leave out codec",
                lambda s: s.codec != "fp32",
            ),
            Refusal(
                "pipedream orders its stages itself: leave out schedule", lambda s: s.schedule != "gpipe"
            ),
            _ONE_PIPELINE,
        ),
    ),
    SyncSpec(word="federated", argument=integer(1, "10")),
)

SCHEDULES = (
    ScheduleSpec(
        word="gpipe",
        summary="all forwards, then all backwards",
        build="paceline.layout.pipeline:gpipe",
        with_terms="pipeline=2",
    ),
    ScheduleSpec(
        word="1f1b",
        summary="forwards and backwards in turn",
        build="paceline.layout.pipeline:one_f_one_b",
        with_terms="pipeline=2",
    ),
    ScheduleSpec(word="interleaved", argument=_anything("2"), with_terms="pipeline=2"),
    ScheduleSpec(word="zero-bubble", with_terms="pipeline=2"),
)

LAYOUTS = (
    LayoutSpec(
        word="pipeline",
        summary="consecutive layers on consecutive ranks",
        build="paceline.training.cuts:cut_into_stages",
        order=10,
        applies=lambda s: s.stage_ranks > 1,
    ),
    LayoutSpec(
        word="tensor",
        summary="large layers split, by a plan",
        build="paceline.training.cuts:cut_tensors",
        order=20,
        applies=lambda s: s.tensor > 1,
    ),
    LayoutSpec(
        word="zero-1",
        summary="optimizer state cut among the shard ranks",
        build="paceline.training.cuts:cut_updates",
        order=30,
        applies=lambda s: s.shard > 1 and s.zero == 1,
    ),
    LayoutSpec(
        word="zero-2",
        summary="optimizer state and gradients cut among the shard ranks",
        build="paceline.training.cuts:cut_gradients",
        order=30,
        applies=lambda s: s.shard > 1 and s.zero == 2,
    ),
    LayoutSpec(
        word="zero-3",
        summary="all state cut among the shard ranks, gathered for its use",
        build="paceline.training.cuts:cut_everything",
        order=30,
        applies=lambda s: s.shard > 1 and s.zero == 3,
    ),
)

WORDS: tuple[Spec, ...] = (*SYNCS, *CODECS, *ROUTES, *SCHEDULES, *LAYOUTS)
