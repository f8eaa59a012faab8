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
from paceline.data.work import MicroBatchWork, TrainingFeed
from paceline.recipe.recipe import Recipe
from paceline.recipe.registry import import_object
from paceline.task import SampleSource, Task

if TYPE_CHECKING:
    from paceline.parallel.session_context import SessionContext


def build_feed(context: SessionContext, task: Task, device: torch.device) -> TrainingFeed:
    """Build the micro-batches of this rank's replica, and their loader."""
    recipe, work = context.recipe, build_work(context, task)
    loader = build_loader(recipe, task, task.data, device)
    return TrainingFeed(work, loader, run_length(recipe, work.steps_per_epoch), state_intervals(recipe))


def build_work(context: SessionContext, task: Task) -> MicroBatchWork:
    """Build the micro-batches of this rank: its share of every global batch, or what the sync rule deals."""
    recipe, data, servers = context.recipe, context.mesh.data, context.recipe.strategy.servers
    if path := recipe.strategy.sync_spec.work:
        work: MicroBatchWork = import_object(path)(context, task)
        return work
    position = max(0, data.rank - servers), data.size - servers  # servers come first, and do not train
    return context.components.work(build_order(recipe, task), context.shards, recipe.seed, *position)


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
