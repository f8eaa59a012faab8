"""The schedule that a strategy names: made for its stages, or read from a file."""

from __future__ import annotations

from functools import partial
from pathlib import Path

from paceline.errors import StrategyError
from paceline.pipeline_schedule.schedule_formats import read_schedule_csv
from paceline.pipeline_schedule.schedule_table import ScheduleFactory, ScheduleTable, simulate_schedule
from paceline.recipe.recipe import Recipe
from paceline.recipe.strategy import Strategy
from paceline.recipe.strategy_text import parse_counts


def make_schedule(strategy: Strategy) -> ScheduleFactory:
    """What makes the table of a pipeline.

    Raises:
        StrategyError: a file that cannot be read.
    """
    word, _, argument = strategy.schedule.partition(":")
    if word == "file":
        return partial(_first_rows, read_schedule_csv(Path(argument)), argument)
    make: ScheduleFactory = strategy.order.load()
    if strategy.rechunk:
        return partial(make, parts=parse_counts(strategy.rechunk))
    return partial(_with_argument, make, argument) if argument else make


def build_checked_table(recipe: Recipe, shards: int) -> ScheduleTable:
    """The table of a step, for the rank that has most micro-batches.

    Args:
        shards: virtual shards of a step.
    Raises:
        StrategyError: it cannot run, or adds gradients in an order that a reproducible run cannot have.
    """
    strategy = recipe.strategy
    most = -(-shards // ((strategy.replicas or 1) * strategy.shard))
    table = make_schedule(strategy)(strategy.pipeline, most)
    simulate_schedule(table, most)
    if max(table.parts) > 1:
        _refuse_partial_micro_batches(recipe)
    if recipe.is_ordered and not all(
        _backwards_are_ordered(table, stage) for stage in range(table.num_stages)
    ):
        raise StrategyError(
            f"schedule={strategy.schedule} runs backwards neither from the first micro-batch to the last nor"
            " the other way round, and the bits of a sum would depend on it",
            next_step="leave out reproducible, or choose gpipe, 1f1b, interleaved or zero-bubble",
        )
    return table


def _refuse_partial_micro_batches(recipe: Recipe) -> None:
    """A file names parts where nobody sees it before it is read; of `rechunk` the recipe says the same.

    Raises:
        StrategyError: sums have one order, or ranks split the positions of a sequence.
    """
    strategy = recipe.strategy
    if recipe.is_ordered or strategy.context > 1:
        raise StrategyError(
            f"schedule={strategy.schedule} runs micro-batches in parts: their sums have other bits, and masks"
            " are those of all positions",
            next_step="leave out reproducible and context, or take a schedule without parts",
        )


def _with_argument(
    make: ScheduleFactory, argument: str, num_stages: int, num_micro_batches: int
) -> ScheduleTable:
    return make(num_stages, num_micro_batches, argument)


def _first_rows(table: ScheduleTable, name: str, num_stages: int, num_micro_batches: int) -> ScheduleTable:
    """As many micro-batches of a file's table as a step has."""
    if (num_stages, num_micro_batches) != (table.num_stages, min(num_micro_batches, table.num_micro_batches)):
        raise StrategyError(
            f"the schedule {name} is one of {table.num_stages} stages and {table.num_micro_batches}"
            f" micro-batches, and a rank has {num_micro_batches} micro-batches on {num_stages} stages",
            next_step=f"write one: paceline schedule show 1f1b --stages {num_stages} --micro"
            f" {num_micro_batches} --csv FILE, or change batch.shards",
        )
    return table.first(num_micro_batches)


def _backwards_are_ordered(table: ScheduleTable, stage: int) -> bool:
    """Whether the backwards of each chunk end going up, or down."""
    order = table.orders[stage]
    split = {action.place for action in order if action.kind == "W"}
    for chunk in range(table.chunks):
        own = [a.micro_batch for a in order if a.chunk == chunk and a.ends(split)]
        if own not in (sorted(own), sorted(own, reverse=True)):
            return False
    return True
