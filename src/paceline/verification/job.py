"""Verify on this rank, as one of however many there are."""

from __future__ import annotations

import math
from collections.abc import Callable
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from paceline.cluster import Cluster
from paceline.comm import Net
from paceline.data import Batches, build_order, settled
from paceline.errors import StrategyError
from paceline.mesh import Mesh
from paceline.phase import TRAINING
from paceline.recipe import HealthRecipe, Recipe, most_sharers, num_micro_batches, resolve
from paceline.recipe.lasting import AverageRecipe
from paceline.task import Task
from paceline.training import Pieces
from paceline.training.build import build_session
from paceline.training.by_machine import choose_by_machine
from paceline.training.given import RecipeLike, TaskLike, given_recipe
from paceline.training.joining import connected, obtain_together
from paceline.training.prepare import prepare_model
from paceline.verification.loop_side import Loop
from paceline.verification.loops import BothLoops, spoken_by
from paceline.verification.oracle import Oracle
from paceline.verification.plain_optimizer import plain_optimizer
from paceline.verification.plain_schedule import PlainSchedule
from paceline.verification.preflight import Fault, preflight
from paceline.verification.report import Report
from paceline.verification.run import Verifier
from paceline.verification.strict import look_at_shared
from paceline.verification.twin import twin


def verify(
    recipe: RecipeLike,
    task: TaskLike | None = None,
    *,
    steps: int = 20,
    base_dir: Path | None = None,
    cluster: Cluster | None = None,
    pieces: Pieces | None = None,
    observe: Callable[[int], None] = lambda step: None,
    strict: bool = False,
    loop: Loop | None = None,
) -> Report:
    """Run the recipe's strategy and the oracle side by side for some steps; collective.

    Args:
        recipe, task, steps, base_dir, cluster, pieces, observe, strict, loop: see `paceline.verify`, which
            starts processes as well.
    Returns:
        The report, equal on every rank.
    Raises:
        StrategyError: the strategy is approximate by nature.
    """
    recipe, base_dir = given_recipe(recipe, task, base_dir)
    with connected(recipe, cluster) as (found, device):
        built = obtain_together(recipe, task, base_dir, found)
        found.enter_phase(TRAINING)
        return compare_with_oracle(
            recipe, built, found, device, steps, pieces=pieces, observe=observe, strict=strict, loop=loop
        )


def compare_with_oracle(
    recipe: Recipe,
    task: Task,
    cluster: Cluster,
    device: torch.device,
    steps: int,
    *,
    pieces: Pieces | None = None,
    observe: Callable[[int], None] = lambda step: None,
    strict: bool = False,
    loop: Loop | None = None,
) -> Report:
    """`verify` on a cluster that is connected already."""
    _refuse(recipe)
    task = settled(task, recipe)
    recipe = choose_by_machine(_without_extras(recipe), task, cluster, device)
    oracle = _oracle_beside(recipe, task, cluster, device)
    evaluates = spoken_by(oracle, loop, recipe)
    mistake = _look_at_task(recipe, oracle, cluster, strict)
    if mistake is not None:
        return Report(str(recipe.strategy), cluster.world_size, failure=mistake[0], diagnosis=mistake[1])
    session = build_session(recipe, task, cluster, device, pieces=pieces)
    if loop is None:
        return Verifier(session, oracle).run(steps, observe)
    with closing(BothLoops(session, oracle, loop, evaluates)) as both:
        return Verifier(session, oracle, both).run(steps, observe)


def _without_extras(recipe: Recipe) -> Recipe:
    """A step that is left out has nothing to compare, and the oracle keeps no average."""
    return recipe.replace(health=HealthRecipe(), average=AverageRecipe())


def _oracle_beside(recipe: Recipe, task: Task, cluster: Cluster, device: torch.device) -> Oracle:
    """The oracle of a session, on a copy of its model."""
    shards = num_micro_batches(recipe, cluster.world_size)
    at_once = recipe.batch.sync_batchnorm  # statistics of the whole batch are those of one forward of it
    oracle = build_oracle(recipe, replace(task, model=twin(task.model)), device, 1 if at_once else shards)
    if at_once and shards > 1:
        _require_no_draws(oracle)
    return oracle


def _refuse(recipe: Recipe) -> None:
    if recipe.strategy.is_approximate:
        raise StrategyError(
            f"'{recipe.strategy}' is approximate by nature: no step of it is that of one process",
            next_step="verify the same recipe with sync=every-step codec=fp32, and compare losses over seeds",
        )
    if recipe.strategy.servers:
        raise StrategyError(
            f"'{recipe.strategy}' makes several steps between two points at which all ranks hold the same",
            next_step="verify it with sync=every-step, and compare the hashes of two reproducible runs",
        )


def _require_no_draws(oracle: Oracle) -> None:
    """Ranks draw for their own samples, and the oracle would draw for all of them at once."""
    (first,) = oracle.work.micro_batches(0)
    other = replace(first, key=first.key + 1)
    losses = {float(shard.total) for shard in oracle.shards((first, other))}
    if len(losses) > 1:
        raise StrategyError(
            "with batch.sync_batchnorm the oracle runs all samples at once, and this task draws random"
            " numbers (dropout, augmentation) for each rank's samples apart",
            next_step="verify it without what it draws, or with batch.sync_batchnorm = false",
        )


def _look_at_task(recipe: Recipe, oracle: Oracle, cluster: Cluster, strict: bool) -> Fault | None:
    most, called = most_sharers(recipe)
    strategy = resolve(recipe.strategy, processes=cluster.world_size, shards=most, called=called)
    mesh = Mesh.build(cluster, strategy.degrees)
    found = preflight(oracle, mesh.world, Net(recipe.runtime.deadline_seconds))
    mesh.give_back()
    if found is None and strict:
        return look_at_shared(oracle, recipe.precision.compute, cluster.world_size)
    return found


def build_oracle(recipe: Recipe, task: Task, device: torch.device, shards: int | None = None) -> Oracle:
    """The oracle of a recipe, on a task that nobody else trains.

    Args:
        shards: virtual shards; those of one process if None, 1 for the full-batch oracle.
    """
    if recipe.precision.compute == "auto":  # alone; beside a session, what all ranks agreed on stands here
        recipe = choose_by_machine(recipe, task, Cluster.single(), device)
    model, batch = prepare_model(recipe, task, device, whole=True), recipe.batch
    order = build_order(recipe, task)
    optimizer = task.optimizer(model) if task.optimizer is not None else None
    return Oracle(
        task,
        order,
        optimizer or plain_optimizer(model, recipe.optimizer, fused_allowed=not recipe.reproducible),
        PlainSchedule(recipe.schedule, _num_updates(recipe, order), batch.size),
        shards=shards or num_micro_batches(recipe, 1),
        seed=recipe.seed,
        clip_norm=recipe.optimizer.clip_norm,
        reduction=batch.reduction,
        autocast=_autocast(recipe, device),
        ordered=recipe.reproducible,
    )


def _num_updates(recipe: Recipe, order: Batches) -> int:
    return recipe.steps or math.ceil((recipe.epochs or 0) * order.steps_per_epoch)


def _autocast(recipe: Recipe, device: torch.device) -> Callable[[], Any]:
    """Forward in the recipe's type; an ordered run casts a weight at every use, so no cache has a say."""
    dtype = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}[recipe.precision.compute]
    on, caches = recipe.precision.compute != "fp32", not recipe.is_ordered
    return lambda: torch.autocast(device.type, dtype=dtype, enabled=on, cache_enabled=caches)
