"""What a rank trains on: the micro-batches of its replica, and the loader that reads them."""

from __future__ import annotations

import math

import torch

from paceline.data import Feed, Loader, build_order
from paceline.recipe import Recipe
from paceline.task import Source, Task
from paceline.training.arrange import Setting


def build_feed(setting: Setting, task: Task, device: torch.device) -> Feed:
    """The micro-batches of this rank's replica, and their loader."""
    recipe, data, servers = setting.recipe, setting.mesh.data, setting.recipe.strategy.servers
    order = build_order(recipe, task)
    place = max(0, data.rank - servers), data.size - servers  # servers come first, and train nothing
    work = setting.pieces.work(order, setting.shards, recipe.seed, *place)
    loader = build_loader(recipe, task, task.data, device)
    return Feed(work, loader, num_steps_of(recipe, order.steps_per_epoch), intervals_of(recipe))


def intervals_of(recipe: Recipe) -> tuple[int, ...]:
    """Every so many steps the state is wanted; 0: not at all."""
    return recipe.evaluate.every_steps, recipe.checkpoint.every_steps, recipe.hash_every


def build_loader(recipe: Recipe, task: Task, source: Source, device: torch.device) -> Loader:
    """A loader of one source, as the recipe says."""
    return Loader(
        source, task.collate, recipe.loader, device, deadline_seconds=recipe.runtime.deadline_seconds
    )


def num_steps_of(recipe: Recipe, steps_per_epoch: int) -> int:
    """Length of the run in steps."""
    return recipe.steps or math.ceil((recipe.epochs or 0) * steps_per_epoch)
