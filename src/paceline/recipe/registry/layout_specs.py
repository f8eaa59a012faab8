"""The layouts of a model over ranks and the schedules of pipelines, and the classes of their
specifications.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from paceline.pipeline_schedule.schedule_table import parts_divide_evenly
from paceline.recipe.registry.word_spec import (
    StrategyRefusal,
    WordArgument,
    WordSpec,
    integer_argument,
    parse_counts,
)

if TYPE_CHECKING:
    from paceline.recipe.strategy import Strategy

_FILE_PREFIX = "file:"
_FILE_SUFFIX = ".csv"


@dataclass(frozen=True, kw_only=True)
class ScheduleSpec(WordSpec):
    """The specification of the order of a pipeline.

    `build(num_stages, num_micro_batches[, argument]) -> ScheduleTable`.

    Args:
        reads_file: its argument is the path of a file with the table.
    """

    choice = "schedule"
    reads_file: bool = False


@dataclass(frozen=True, kw_only=True)
class LayoutSpec(WordSpec):
    """The specification of one partition of a model: `build(context, material) -> ModelPartition`.

    Args:
        order: partitions are applied from the lowest to the highest.
        inexact_reason: why results have other bits than those of one process; empty: they have the same.
        applies: whether a strategy uses it.
    """

    choice = "layout"
    order: int = 0
    inexact_reason: str = ""
    applies: Callable[[Strategy], bool] = lambda strategy: False


def schedule_word(text: str) -> str:
    """Return the word of a schedule: `FILE.csv` is short for `file:FILE.csv`."""
    is_short = text.endswith(_FILE_SUFFIX) and not text.startswith(_FILE_PREFIX)
    return f"{_FILE_PREFIX}{text}" if is_short else text


def _parse_schedule_file(text: str) -> str:
    if not text.endswith(_FILE_SUFFIX):
        raise ValueError(text)
    return text


def is_central_storage(storage: str) -> bool:
    """Return whether one rank of a shard group holds what the others only compute with."""
    return storage == "central"


_NEEDS_ONE_LANE = StrategyRefusal(
    "stages that are lanes of one process run gpipe or 1f1b: leave out lanes, or choose one of these",
    lambda s: s.lanes > 1,
)


def _divides_evenly(strategy: Strategy) -> bool:
    counts = parse_counts(strategy.rechunk)
    return len(counts) == strategy.pipeline and parts_divide_evenly(counts)


_NEEDS_EVEN_PARTS = StrategyRefusal(
    "rechunk has a number for each stage of a pipeline that divides its neighbours' or is divided by them,"
    " as in 1,2,4",
    lambda s: bool(s.rechunk) and not _divides_evenly(s),
)
_NEEDS_WHOLE_SEQUENCES = StrategyRefusal(
    "rechunk divides micro-batches by samples, for ranks that run all positions: leave out rechunk, or lanes"
    " and context",
    lambda s: bool(s.rechunk) and (s.lanes > 1 or s.context > 1),
)
_NEEDS_NO_RECHUNK = StrategyRefusal(
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
        refusals=(_NEEDS_EVEN_PARTS, _NEEDS_WHOLE_SEQUENCES),
    ),
    ScheduleSpec(
        word="1f1b",
        summary="forwards and backwards in turn",
        build="paceline.pipeline_schedule:one_f_one_b",
        with_terms="pipeline=2",
        refusals=(_NEEDS_EVEN_PARTS, _NEEDS_WHOLE_SEQUENCES),
    ),
    ScheduleSpec(
        word="interleaved",
        summary="1f1b over several chunks of the model on each rank; two without a number",
        argument=integer_argument(2, "2"),
        argument_may_be_missing=True,
        build="paceline.pipeline_schedule:interleaved",
        with_terms="pipeline=2",
        refusals=(_NEEDS_ONE_LANE, _NEEDS_NO_RECHUNK),
    ),
    ScheduleSpec(
        word="zero-bubble",
        summary="weight gradients moved into the idle time of stages",
        build="paceline.pipeline_schedule:zero_bubble",
        with_terms="pipeline=2",
        refusals=(_NEEDS_ONE_LANE, _NEEDS_EVEN_PARTS, _NEEDS_WHOLE_SEQUENCES),
    ),
    ScheduleSpec(
        word="file",
        summary="the rows of a file; also written schedule=FILE.csv",
        argument=WordArgument("schedule.csv", "a path that ends with .csv", _parse_schedule_file),
        build="paceline.pipeline_schedule:read_schedule_csv",
        reads_file=True,
        with_terms="pipeline=2",
        refusals=(_NEEDS_ONE_LANE, _NEEDS_NO_RECHUNK),
    ),
)

LAYOUT_SPECS = (
    LayoutSpec(
        word="servers",
        summary="parameters and optimizer state divided among servers, by bytes",
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
        summary="large layers split according to a plan",
        build="paceline.parallel.tensor.tensor_plan:partition_tensors",
        order=20,
        inexact_reason="a split matrix product sums in another order",
        applies=lambda s: s.tensor > 1,
    ),
    LayoutSpec(
        word="context",
        summary="sequences split by position, with attention over all positions",
        build="paceline.parallel.context.context_attention:partition_sequences",
        order=25,
        inexact_reason="sums over the positions of a sequence are made of partial sums",
        applies=lambda s: s.context > 1,
        refusals=(
            StrategyRefusal(
                "lanes run copies of a whole model, and context does not: leave out lanes",
                lambda s: s.lanes > 1,
            ),
        ),
    ),
    LayoutSpec(
        word="zero-1",
        summary="optimizer state sharded",
        build="paceline.parallel.zero:shard_optimizer_state",
        order=30,
        applies=lambda s: s.shard > 1 and s.zero == 1,
    ),
    LayoutSpec(
        word="zero-2",
        summary="optimizer state and gradients sharded",
        build="paceline.parallel.zero:shard_gradients",
        order=30,
        applies=lambda s: s.shard > 1 and s.zero == 2,
    ),
    LayoutSpec(
        word="zero-3",
        summary="optimizer state, gradients and parameters sharded, gathered for use",
        build="paceline.parallel.zero:shard_parameters",
        order=30,
        applies=lambda s: s.shard > 1 and s.zero == 3 and not is_central_storage(s.storage),
    ),
    LayoutSpec(
        word="central",
        summary="one copy of the weights per host, updated by one rank, which holds all moments",
        build="paceline.parallel.central_storage:store_parameters_centrally",
        order=30,
        applies=lambda s: s.shard > 1 and s.zero == 3 and is_central_storage(s.storage),
        refusals=(
            StrategyRefusal(
                "storage=central holds whole models: leave out storage, or tensor, context and pipeline",
                lambda s: s.ranks_per_replica > s.shard or s.lanes > 1,
            ),
            StrategyRefusal(
                "storage=central makes one update of every step: leave out storage or sync",
                lambda s: s.is_set("sync"),
            ),
            StrategyRefusal(
                "storage=central sends no gradients, so a codec has no effect: leave out storage or codec",
                lambda s: s.is_coded,
            ),
        ),
    ),
)
