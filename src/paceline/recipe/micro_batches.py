"""Into how many micro-batches a batch is cut, where the recipe leaves it open. Pure.

Invariant: a number that the recipe names, and every number of a reproducible run, does not depend on the
number of processes. One that is left out follows from them: equal shares, one micro-batch a rank.
"""

from __future__ import annotations

from typing import NamedTuple

from paceline.recipe.model import Recipe
from paceline.recipe.strategy import Strategy
from paceline.recipe.support import fill, num_sharers

REPRODUCIBLE = 8
"""Micro-batches of a reproducible run that names no number: alike on any number of processes."""
PER_STAGE = 4
"""Micro-batches of each stage of a pipeline: with S stages, (S - 1) / (4 S + S - 1) of the time is idle."""


class Most(NamedTuple):
    """How many ranks and lanes may share a batch, and the keys from which that follows."""

    sharers: int
    called: str


def num_micro_batches(recipe: Recipe, processes: int) -> int:
    """The micro-batches of a full batch, over all ranks.

    Args:
        processes: in the job.
    """
    batch, strategy = recipe.batch, fill(recipe.strategy, processes)
    if batch.shards is not None:
        return batch.shards
    if recipe.reproducible:
        return min(REPRODUCIBLE, batch.size)
    if batch.accumulation is not None:
        return min(batch.size, num_sharers(strategy) * batch.accumulation)
    return min(batch.size, num_sharers(strategy) * _each(strategy, batch.size))


def _each(strategy: Strategy, size: int) -> int:
    """Of each rank: one; with stages as many as keep them busy."""
    wanted = PER_STAGE * strategy.pipeline if strategy.pipeline > 1 else 1
    return max(1, min(wanted, size // num_sharers(strategy)))


def most_sharers(recipe: Recipe) -> Most:
    """How many ranks and lanes find work in every batch."""
    batch = recipe.batch
    if batch.shards is not None:
        return Most(batch.shards, "batch.shards")
    if recipe.reproducible:
        return Most(min(REPRODUCIBLE, batch.size), "batch.shards (by default, with reproducible)")
    if batch.accumulation is not None:
        return Most(batch.size // batch.accumulation, "batch.size / batch.accumulation")
    return Most(batch.size, "batch.size")
