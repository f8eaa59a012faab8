"""The words of layouts and of schedules: one line of registration each."""

from __future__ import annotations

from typing import TYPE_CHECKING

from paceline.pipeline_schedule.schedule_formats import is_schedule_file
from paceline.pipeline_schedule.schedule_table import parts_divide_evenly
from paceline.recipe.registry.word_spec import LayoutSpec, ScheduleSpec, StrategyRefusal, WordArgument
from paceline.recipe.strategy_text import parse_counts

if TYPE_CHECKING:
    from paceline.recipe.strategy import Strategy

_NO_LANES = StrategyRefusal(
    "stages that are lanes of one process run gpipe or 1f1b: leave out lanes, or choose one of these",
    lambda s: s.lanes > 1,
)


def _is_divided(strategy: Strategy) -> bool:
    parts = parse_counts(strategy.rechunk)
    return len(parts) == strategy.pipeline and parts_divide_evenly(parts)


_UNEVEN = StrategyRefusal(
    "rechunk gives each stage of a pipeline a number, which divides its neighbours' or is divided by them,"
    " as in 1,2,4",
    lambda s: bool(s.rechunk) and not _is_divided(s),
)
_NO_PARTS = StrategyRefusal(
    "rechunk divides micro-batches by samples, for ranks that run all positions: leave out rechunk, or lanes"
    " and context",
    lambda s: bool(s.rechunk) and (s.lanes > 1 or s.context > 1),
)
_NO_RECHUNK = StrategyRefusal(
    "rechunk makes a gpipe, 1f1b or zero-bubble of parts, and a file names parts itself: leave out rechunk or"
    " schedule",
    lambda s: bool(s.rechunk),
)

SCHEDULE_SPECS = (
    ScheduleSpec(
        word="gpipe",
        summary="all forwards, then all backwards",
        build="paceline.pipeline_schedule:gpipe",
        with_terms="pipeline=2",
        refusals=(_UNEVEN, _NO_PARTS),
    ),
    ScheduleSpec(
        word="1f1b",
        summary="forwards and backwards in turn",
        build="paceline.pipeline_schedule:one_f_one_b",
        with_terms="pipeline=2",
        refusals=(_UNEVEN, _NO_PARTS),
    ),
    ScheduleSpec(
        word="interleaved",
        summary="1f1b over several chunks of the model on each rank",
        argument=WordArgument("2", "an integer >= 2", lambda text: text.isdecimal() and int(text) >= 2),
        build="paceline.pipeline_schedule:interleaved",
        with_terms="pipeline=2",
        refusals=(_NO_LANES, _NO_RECHUNK),
    ),
    ScheduleSpec(
        word="zero-bubble",
        summary="gradients of weights put off into what would be waiting",
        build="paceline.pipeline_schedule:zero_bubble",
        with_terms="pipeline=2",
        refusals=(_NO_LANES, _UNEVEN, _NO_PARTS),
    ),
    ScheduleSpec(
        word="file",
        summary="the rows of a file, also written schedule=FILE.csv",
        argument=WordArgument("schedule.csv", "a path that ends with .csv", is_schedule_file),
        build="paceline.pipeline_schedule:read_schedule_csv",
        with_terms="pipeline=2",
        refusals=(_NO_LANES, _NO_RECHUNK),
    ),
)

LAYOUT_SPECS = (
    LayoutSpec(
        word="servers",
        summary="parameters and optimizer state spread over several servers, by bytes",
        build="paceline.parallel.server_partition:partition_among_servers",
        order=5,
        applies=lambda s: s.servers > 1,
    ),
    LayoutSpec(
        word="pipeline",
        summary="consecutive layers on consecutive ranks",
        build="paceline.parallel.pipeline.stage_partition:partition_into_stages",
        order=10,
        applies=lambda s: s.stage_ranks > 1,
    ),
    LayoutSpec(
        word="tensor",
        summary="large layers split, by a plan",
        build="paceline.parallel.tensor.tensor_plan:partition_tensors",
        order=20,
        inexact_reason="a product that is cut adds up in another order",
        applies=lambda s: s.tensor > 1,
    ),
    LayoutSpec(
        word="context",
        summary="every sequence split by positions, attention over all of them",
        build="paceline.parallel.context.context_attention:partition_sequences",
        order=25,
        inexact_reason="what is added over the positions of a sequence is added in parts",
        applies=lambda s: s.context > 1,
        refusals=(
            StrategyRefusal(
                "lanes run copies of a whole model, and context changes what is around it: leave out lanes",
                lambda s: s.lanes > 1,
            ),
        ),
    ),
    LayoutSpec(
        word="zero-1",
        summary="optimizer state cut among the shard ranks",
        build="paceline.parallel.zero:shard_optimizer_state",
        order=30,
        applies=lambda s: s.shard > 1 and s.zero == 1,
    ),
    LayoutSpec(
        word="zero-2",
        summary="optimizer state and gradients cut among the shard ranks",
        build="paceline.parallel.zero:shard_gradients",
        order=30,
        applies=lambda s: s.shard > 1 and s.zero == 2,
    ),
    LayoutSpec(
        word="zero-3",
        summary="all state cut among the shard ranks, gathered for its use",
        build="paceline.parallel.zero:shard_parameters",
        order=30,
        applies=lambda s: s.shard > 1 and s.zero == 3,
    ),
)
