"""Verify on this rank, as one of however many there are."""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import torch

from paceline.cluster import Cluster
from paceline.errors import StrategyError
from paceline.layout import Precision
from paceline.layout.holding import hold_whole
from paceline.optim import build_schedule
from paceline.phase import TRAINING
from paceline.recipe import HealthRecipe, Recipe
from paceline.task import Task
from paceline.training import Pieces
from paceline.training.build import (
    build_order,
    build_session,
    build_task_optimizer,
    num_steps_of,
    prepare_model,
)
from paceline.training.by_machine import choose_by_machine
from paceline.training.given import RecipeLike, TaskLike, given_recipe
from paceline.training.job import connected, obtain_together
from paceline.verification.oracle import Oracle
from paceline.verification.report import Report
from paceline.verification.run import Verifier


def verify(
    recipe: RecipeLike,
    task: TaskLike | None = None,
    *,
    steps: int = 20,
    base_dir: Path | None = None,
    cluster: Cluster | None = None,
    pieces: Pieces | None = None,
    observe: Callable[[int], None] = lambda step: None,
) -> Report:
    """Run the recipe's strategy and the oracle side by side for some steps; collective.

    Args:
        recipe: equal on every rank; or the path of its file.
        task: in place of the one that the recipe names; see `paceline.join`.
        steps: how many to compare.
        base_dir: where a task `file.py:function` is looked for.
        cluster: in place of the one in the environment.
        pieces: exchanged parts of the session (a planted fault); the oracle is not affected.
        observe: called after every step that agreed.
    Returns:
        The report, equal on every rank.
    Raises:
        StrategyError: the strategy is approximate by nature.
    """
    recipe, base_dir = given_recipe(recipe, task, base_dir)
    with connected(recipe, cluster) as (found, device):
        built = obtain_together(recipe, task, base_dir, found)
        found.enter_phase(TRAINING)
        return compare_with_oracle(recipe, built, found, device, steps, pieces=pieces, observe=observe)


def compare_with_oracle(
    recipe: Recipe,
    task: Task,
    cluster: Cluster,
    device: torch.device,
    steps: int,
    *,
    pieces: Pieces | None = None,
    observe: Callable[[int], None] = lambda step: None,
) -> Report:
    """`verify` on a cluster that is connected already."""
    if recipe.strategy.is_approximate:
        raise StrategyError(
            f"'{recipe.strategy}' is approximate by nature: no step of it is that of one process",
            next_step="verify the same recipe with sync=every-step codec=fp32, and compare losses over seeds",
        )
    pieces = pieces or Pieces()
    recipe = recipe.replace(health=HealthRecipe())  # a step that is left out has nothing to compare
    recipe = choose_by_machine(recipe, task, cluster, device)
    oracle = build_oracle(recipe, replace(task, model=copy.deepcopy(task.model)), device)
    session = build_session(recipe, task, cluster, device, pieces=pieces)
    return Verifier(session, oracle).run(steps, observe)


def build_oracle(recipe: Recipe, task: Task, device: torch.device, shards: int | None = None) -> Oracle:
    """The oracle of a recipe, on a task that nobody else trains.

    Args:
        shards: virtual shards; the recipe's if None, 1 for the full-batch oracle.
    """
    if recipe.precision.compute == "auto":  # alone; beside a session, what all ranks agreed on stands here
        recipe = choose_by_machine(recipe, task, Cluster.single(), device)
    model = prepare_model(recipe, task, device, whole=True)
    order = build_order(recipe, task)
    num_steps = num_steps_of(recipe, order.steps_per_epoch)
    return Oracle(
        task,
        order,
        build_task_optimizer(recipe, task, hold_whole(model)),
        build_schedule(recipe.schedule, num_steps, recipe.batch.size),
        shards=shards or recipe.batch.shards,
        seed=recipe.seed,
        clip_norm=recipe.optimizer.clip_norm,
        reduction=recipe.batch.reduction,
        autocast=Precision(recipe.precision.compute, device.type, caches=not recipe.is_ordered).autocast,
        ordered=recipe.reproducible,
    )
