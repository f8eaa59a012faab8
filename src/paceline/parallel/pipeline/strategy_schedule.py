"""Schedule of a strategy: computed for its stages or read from a file, and checked before it runs.

Schedules themselves are pure tables (`paceline.pipeline_schedule`); this file connects them with a recipe.
"""

from __future__ import annotations

from functools import partial
from pathlib import Path

from paceline.errors import StrategyError, format_count
from paceline.pipeline_schedule.schedule_formats import read_schedule_csv
from paceline.pipeline_schedule.schedule_table import ScheduleFactory, ScheduleTable, simulate_schedule
from paceline.recipe.recipe import Recipe
from paceline.recipe.registry import parse_counts
from paceline.recipe.strategy import Strategy


def make_schedule(strategy: Strategy) -> ScheduleFactory:
    """Return the function that makes the schedule table of a pipeline.

    Raises:
        StrategyError: a file cannot be read.
    """
    spec, argument = strategy.schedule_word
    if spec.reads_file:
        return partial(_first_rows, read_schedule_csv(Path(argument)), argument)
    make: ScheduleFactory = spec.load()
    if strategy.rechunk:
        return partial(make, parts=parse_counts(strategy.rechunk))
    return partial(_with_argument, make, argument) if argument else make


def build_checked_table(recipe: Recipe, shards: int) -> ScheduleTable:
    """Return the table of a step for the rank with most micro-batches, after checking that it can run.

    Args:
        shards: number of virtual shards of a step.
    Raises:
        StrategyError: it cannot run, or adds gradients in an order that a reproducible run does not allow.
    """
    strategy = recipe.strategy
    # Rounded up: ranks may differ by one micro-batch.
    most = -(-shards // ((strategy.replicas or 1) * strategy.shard))
    table = make_schedule(strategy)(strategy.pipeline, most)
    simulate_schedule(table, most)
    if max(table.parts) > 1:
        _refuse_partial_micro_batches(recipe)
    if recipe.is_ordered and not all(
        _backwards_are_ordered(table, stage) for stage in range(table.num_stages)
    ):
        raise StrategyError(
            f"schedule={strategy.schedule} runs the backward passes of micro-batches neither in ascending nor"
            " in descending order, so the bits of a sum would depend on the schedule",
            next_step="leave out reproducible, or choose gpipe, 1f1b, interleaved or zero-bubble",
        )
    return table


def _refuse_partial_micro_batches(recipe: Recipe) -> None:
    """Refuse schedules with parts of micro-batches where results would change.

    For `rechunk` the recipe checks the same; a file is known only after it was read.

    Raises:
        StrategyError: sums are ordered, or ranks split the positions of a sequence.
    """
    strategy = recipe.strategy
    if recipe.is_ordered or strategy.context > 1:
        raise StrategyError(
            f"schedule={strategy.schedule} runs micro-batches in parts, which changes the bits of sums and is"
            " not supported with context",
            next_step="leave out reproducible and context, or use a schedule without parts",
        )


def _with_argument(
    make: ScheduleFactory, argument: str, num_stages: int, num_micro_batches: int
) -> ScheduleTable:
    return make(num_stages, num_micro_batches, argument)


def _first_rows(table: ScheduleTable, name: str, num_stages: int, num_micro_batches: int) -> ScheduleTable:
    """Return the first micro-batches of a file's table, as many as a step has."""
    if (num_stages, num_micro_batches) != (table.num_stages, min(num_micro_batches, table.num_micro_batches)):
        raise StrategyError(
            f"the schedule {name} is for {format_count(table.num_stages, 'stage')} and"
            f" {format_count(table.num_micro_batches, 'micro-batch')}, but a rank has"
            f" {format_count(num_micro_batches, 'micro-batch')} on {format_count(num_stages, 'stage')}",
            next_step=f"write another: paceline schedule show 1f1b --stages {num_stages} --micro"
            f" {num_micro_batches} --csv FILE, or change batch.shards",
        )
    return table.first(num_micro_batches)


def _backwards_are_ordered(table: ScheduleTable, stage: int) -> bool:
    """Return whether each chunk ends its micro-batches in ascending or descending order."""
    order = table.orders[stage]
    split = {action.place for action in order if action.kind == "W"}
    for chunk in range(table.chunks):
        micro_batches = [a.micro_batch for a in order if a.chunk == chunk and a.ends(split)]
        if micro_batches not in (sorted(micro_batches), sorted(micro_batches, reverse=True)):
            return False
    return True
