"""The words of layouts and of schedules: one line of registration each."""

from __future__ import annotations

from typing import TYPE_CHECKING

from paceline.recipe.specs import Argument, LayoutSpec, Refusal, ScheduleSpec
from paceline.recipe.written_words import numbers_in
from paceline.schedule import fit_together, is_file

if TYPE_CHECKING:
    from paceline.recipe.strategy import Strategy

_NO_LANES = Refusal(
    "stages that are lanes of one process run gpipe or 1f1b: leave out lanes, or choose one of these",
    lambda s: s.lanes > 1,
)


def _is_divided(strategy: Strategy) -> bool:
    parts = numbers_in(strategy.rechunk)
    return len(parts) == strategy.pipeline and fit_together(parts)


_UNEVEN = Refusal(
    "rechunk gives each stage of a pipeline a number, which divides its neighbours' or is divided by them,"
    " as in 1,2,4",
    lambda s: bool(s.rechunk) and not _is_divided(s),
)
_NO_PARTS = Refusal(
    "rechunk divides micro-batches by samples, for ranks that run all positions: leave out rechunk, or lanes"
    " and context",
    lambda s: bool(s.rechunk) and (s.lanes > 1 or s.context > 1),
)
_NO_RECHUNK = Refusal(
    "rechunk makes a gpipe, 1f1b or zero-bubble of parts, and a file names parts itself: leave out rechunk or"
    " schedule",
    lambda s: bool(s.rechunk),
)

SCHEDULES = (
    ScheduleSpec(
        word="gpipe",
        summary="all forwards, then all backwards",
        build="paceline.schedule:gpipe",
        with_terms="pipeline=2",
        refusals=(_UNEVEN, _NO_PARTS),
    ),
    ScheduleSpec(
        word="1f1b",
        summary="forwards and backwards in turn",
        build="paceline.schedule:one_f_one_b",
        with_terms="pipeline=2",
        refusals=(_UNEVEN, _NO_PARTS),
    ),
    ScheduleSpec(
        word="interleaved",
        summary="1f1b over several chunks of the model on each rank",
        argument=Argument("2", "an integer >= 2", lambda text: text.isdecimal() and int(text) >= 2),
        build="paceline.schedule:interleaved",
        with_terms="pipeline=2",
        refusals=(_NO_LANES, _NO_RECHUNK),
    ),
    ScheduleSpec(
        word="zero-bubble",
        summary="gradients of weights put off into what would be waiting",
        build="paceline.schedule:zero_bubble",
        with_terms="pipeline=2",
        refusals=(_NO_LANES, _UNEVEN, _NO_PARTS),
    ),
    ScheduleSpec(
        word="file",
        summary="the rows of a file, also written schedule=FILE.csv",
        argument=Argument("schedule.csv", "a path that ends with .csv", is_file),
        build="paceline.schedule:read_table",
        with_terms="pipeline=2",
        refusals=(_NO_LANES, _NO_RECHUNK),
    ),
)

LAYOUTS = (
    LayoutSpec(
        word="servers",
        summary="parameters and optimizer state spread over several servers, by bytes",
        build="paceline.training.cuts:cut_among_servers",
        order=5,
        applies=lambda s: s.servers > 1,
    ),
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
        adds_otherwise="a product that is cut adds up in another order",
        applies=lambda s: s.tensor > 1,
    ),
    LayoutSpec(
        word="context",
        summary="every sequence split by positions, attention over all of them",
        build="paceline.training.cuts:cut_sequences",
        order=25,
        adds_otherwise="what is added over the positions of a sequence is added in parts",
        applies=lambda s: s.context > 1,
        refusals=(
            Refusal(
                "lanes run copies of a whole model, and context changes what is around it: leave out lanes",
                lambda s: s.lanes > 1,
            ),
        ),
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
