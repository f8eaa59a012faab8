"""The feed of a rank: the micro-batches of its replica, and the loader that reads them.

Invariant: which micro-batches a rank has follows from the recipe and its place in the mesh. What a batch
contains is decided in `sample_order` and `work`.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import torch

from paceline.data.loader import SampleLoader
from paceline.data.task_data import CollatedSamples, build_order, collate_of
from paceline.data.work import TrainingFeed
from paceline.recipe.recipe import Recipe
from paceline.task import SampleSource, Task

if TYPE_CHECKING:
    from paceline.parallel.session_context import SessionContext


def build_feed(context: SessionContext, task: Task, device: torch.device) -> TrainingFeed:
    """Build the micro-batches of this rank's replica, and their loader."""
    recipe, data, servers = context.recipe, context.mesh.data, context.recipe.strategy.servers
    order = build_order(recipe, task)
    position = max(0, data.rank - servers), data.size - servers  # servers come first, and do not train
    work = context.components.work(order, context.shards, recipe.seed, *position)
    loader = build_loader(recipe, task, task.data, device)
    return TrainingFeed(work, loader, run_length(recipe, order.steps_per_epoch), state_intervals(recipe))


def state_intervals(recipe: Recipe) -> tuple[int, ...]:
    """Return the intervals in steps at which the state is needed; 0: never."""
    return recipe.evaluate.every_steps, recipe.checkpoint.every_steps, recipe.hash_every


def build_loader(recipe: Recipe, task: Task, source: SampleSource, device: torch.device) -> SampleLoader:
    """Build the loader of one source with the settings of the recipe."""
    # The loader knows how to read the inner samples as a batch.
    samples = source.samples if isinstance(source, CollatedSamples) else source
    return SampleLoader(
        samples,
        collate_of(task, source),
        recipe.loader,
        device,
        deadline_seconds=recipe.runtime.deadline_seconds,
    )


def run_length(recipe: Recipe, steps_per_epoch: int) -> int:
    """Return the length of the run in steps."""
    return recipe.steps or math.ceil((recipe.epochs or 0) * steps_per_epoch)
