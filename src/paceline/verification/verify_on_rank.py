"""Verification on one rank of a job: build the session, the oracle and the checks of the task, and compare.

Invariant: session and oracle get the same recipe, with everything chosen that a machine chooses; what has no
counterpart in one process (health rules, an average of the weights) is switched off on both sides.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from paceline.comm.net import Net
from paceline.data.sample_order import BatchOrder
from paceline.data.task_data import build_order, prepare_data
from paceline.errors import RecipeError, StrategyError
from paceline.job.cluster import Cluster
from paceline.job.launcher_reports import TRAINING
from paceline.job.mesh import Mesh
from paceline.parallel.session_context import Components
from paceline.recipe.private_recipe import PrivateRecipe
from paceline.recipe.recipe import Recipe, max_sharers, num_micro_batches
from paceline.recipe.support import resolve_strategy
from paceline.recipe.tables import AverageRecipe, HealthRecipe
from paceline.session.arguments import RecipeLike, TaskLike, resolve_recipe
from paceline.session.build import build_session
from paceline.session.model_setup import prepare_model
from paceline.session.start_rank import build_task_on_all_ranks, connected
from paceline.task import Task
from paceline.tuning.hardware_defaults import choose_hardware_defaults
from paceline.verification.federated_oracle import FederatedVerifier
from paceline.verification.loop_verification import LoopPair, use_loop_loss
from paceline.verification.model_copy import copy_model
from paceline.verification.oracle import Oracle
from paceline.verification.oracle_loop import OwnLoopFunction
from paceline.verification.plain_optimizer import PlainMasks, PlainSchedule, plain_optimizer
from paceline.verification.preflight import TaskFault, check_task
from paceline.verification.strict_checks import check_user_code
from paceline.verification.verification_report import VerificationReport
from paceline.verification.verifier import StrategyVerifier


def verify(
    recipe: RecipeLike,
    task: TaskLike | None = None,
    *,
    steps: int = 20,
    base_dir: Path | None = None,
    cluster: Cluster | None = None,
    components: Components | None = None,
    observe: Callable[[int], None] = lambda step: None,
    strict: bool = False,
    loop: OwnLoopFunction | None = None,
) -> VerificationReport:
    """Run the recipe's strategy and the oracle side by side for some steps; collective.

    Args:
        recipe, task, steps, base_dir, cluster, components, observe, strict, loop: as in `paceline.verify`,
            which also starts processes.
    Returns:
        The report, equal on every rank.
    Raises:
        StrategyError: the strategy is an approximation, so it has no step of one process.
    """
    recipe, base_dir = resolve_recipe(recipe, task, base_dir)
    with connected(recipe, cluster) as (joined, device):
        built = build_task_on_all_ranks(recipe, task, base_dir, joined)
        joined.enter_phase(TRAINING)
        return compare_with_oracle(
            recipe,
            built,
            joined,
            device,
            steps,
            components=components,
            observe=observe,
            strict=strict,
            loop=loop,
        )


def compare_with_oracle(
    recipe: Recipe,
    task: Task,
    cluster: Cluster,
    device: torch.device,
    steps: int,
    *,
    components: Components | None = None,
    observe: Callable[[int], None] = lambda step: None,
    strict: bool = False,
    loop: OwnLoopFunction | None = None,
) -> VerificationReport:
    """Verify on a cluster that is already connected; arguments as in `verify`."""
    _require_comparable(recipe, has_loop=loop is not None)
    task = prepare_data(task, recipe)
    recipe = choose_hardware_defaults(_without_extras(recipe), task, cluster, device)
    oracle = _oracle_of_session(recipe, task, cluster, device)
    evaluate = use_loop_loss(oracle, loop, recipe)
    fault = _check_task(recipe, oracle, cluster, strict)
    if fault is not None:
        return VerificationReport(
            str(recipe.strategy), cluster.world_size, failure=fault[0], diagnosis=fault[1]
        )
    session = build_session(recipe, task, cluster, device, components=components)
    if recipe.strategy.sync_spec.trains_clients:
        return FederatedVerifier(session, oracle).run(steps, observe)
    if loop is None:
        return StrategyVerifier(session, oracle).run(steps, observe)
    with closing(LoopPair(session, oracle, loop, evaluate)) as loop_pair:
        return StrategyVerifier(session, oracle, loop_pair).run(steps, observe)


def _without_extras(recipe: Recipe) -> Recipe:
    """Return the recipe without noise, an average of the weights, and health rules that skip steps.

    Under a server all ranks hold the same state only between two rounds, so each step becomes a round.
    """
    hash_every = 1 if recipe.strategy.servers else recipe.hash_every
    return recipe.replace(
        health=HealthRecipe(),
        average=AverageRecipe(),
        private=PrivateRecipe(),
        debug=recipe.debug.replace(entropy_seed=None),
        hash_every=hash_every,
    )


def _oracle_of_session(recipe: Recipe, task: Task, cluster: Cluster, device: torch.device) -> Oracle:
    """Build the oracle of a session, on a copy of its model."""
    shards = num_micro_batches(recipe, cluster.world_size)
    oracle = build_oracle(recipe, replace(task, model=copy_model(task.model)), device, shards)
    # Statistics of the whole batch, and a loss over all of its rows, are those of one forward of it.
    if recipe.batch.sync_batchnorm or oracle.gathers():
        oracle.run_at_once()
        if shards > 1:
            _require_no_random_numbers(oracle)
    return oracle


def _require_comparable(recipe: Recipe, *, has_loop: bool) -> None:
    if recipe.federated.is_networked:
        raise StrategyError(
            "the oracle trains on the data of all clients, and that of network clients stays with them",
            where='federated.clients = "network"',
            next_step="verify simulated clients: federated.clients = N without channel=grpc; equal data gives"
            " equal bits",
        )
    if has_loop and recipe.schedule.follows_evaluations:
        raise RecipeError(
            f'schedule.decay = "{recipe.schedule.decay}" follows evaluations, which the oracle of an own loop'
            " does not make",
            where="schedule.decay",
            next_step='verify it with decay = "constant", or let the loop step a scheduler of its own',
        )
    is_compared_by_rounds = recipe.strategy.sync_spec.trains_clients and not has_loop
    if not (is_compared_by_rounds or recipe.strategy.has_steps_of_one_process):
        raise StrategyError(
            f"'{recipe.strategy}' is an approximation, so there is no single-process step to compare it with",
            next_step="verify the same recipe with sync=every-step codec=fp32, and compare losses over seeds",
        )
    if recipe.strategy.servers > 1:
        raise StrategyError(
            f"no rank sees a whole update of '{recipe.strategy}': each server updates its part of the model",
            next_step="verify it with servers=1, which makes the same updates",
        )


def _require_no_random_numbers(oracle: Oracle) -> None:
    """Refuse a task with random numbers: ranks draw for their own samples, the oracle for all at once."""
    (first,) = oracle.work.micro_batches(0)
    # Another key changes nothing but random numbers, so different losses show that some are drawn.
    other = replace(first, key=first.key + 1)
    losses = {float(shard.total) for shard in oracle.shards((first, other))}
    if len(losses) > 1:
        raise StrategyError(
            "with batch.sync_batchnorm or paceline.gather the oracle runs the whole batch at once, but this"
            " task draws random numbers (dropout, augmentation) per rank",
            next_step="verify it without dropout and augmentation",
        )


def _check_task(recipe: Recipe, oracle: Oracle, cluster: Cluster, strict: bool) -> TaskFault | None:
    most, limit_key = max_sharers(recipe)
    strategy = resolve_strategy(
        recipe.strategy, processes=cluster.world_size, shards=most, limit_key=limit_key
    )
    mesh = Mesh.build(cluster, strategy.degrees)
    fault = check_task(oracle, mesh.world, Net(recipe.runtime.deadline_seconds))
    mesh.give_back()
    if fault is None and strict:
        return check_user_code(oracle, recipe.precision.compute, cluster.world_size)
    return fault


def build_oracle(recipe: Recipe, task: Task, device: torch.device, shards: int | None = None) -> Oracle:
    """Build the oracle of a recipe; it trains the model of the task itself.

    Args:
        shards: virtual shards of a step; None: those of a run of one process; 1: the whole batch at once.
    """
    # Next to a session the recipe already has the number format on which all ranks agreed.
    if recipe.precision.compute == "auto":
        recipe = choose_hardware_defaults(recipe, task, Cluster.single(), device)
    model, batch = prepare_model(recipe, task, device, whole=True), recipe.batch
    order = build_order(recipe, task)
    optimizer = task.optimizer(model) if task.optimizer is not None else None
    oracle = Oracle(
        task,
        order,
        optimizer or plain_optimizer(model, recipe.optimizer, fused_allowed=not recipe.reproducible),
        PlainSchedule(recipe.schedule, _num_updates(recipe, order), batch.size),
        shards=shards or num_micro_batches(recipe, 1),
        seed=recipe.seed,
        clip_norm=recipe.optimizer.clip_norm,
        clip_value=recipe.optimizer.clip_value,
        reduction=batch.reduction,
        autocast=_autocast(recipe, device),
        ordered=recipe.reproducible,
    )
    if recipe.sparsity.target is not None:
        oracle.masks = PlainMasks(model, recipe.sparsity)
    return oracle


def _num_updates(recipe: Recipe, order: BatchOrder) -> int:
    return recipe.steps or math.ceil((recipe.epochs or 0) * order.steps_per_epoch)


def _autocast(recipe: Recipe, device: torch.device) -> Callable[[], Any]:
    """Return a function that makes the autocast context of a forward.

    An ordered run casts a weight at every use: a cached cast would be summed over its uses in another order.
    """
    dtype = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}[recipe.precision.compute]
    enabled, caches = recipe.precision.compute != "fp32", not recipe.is_ordered
    return lambda: torch.autocast(device.type, dtype=dtype, enabled=enabled, cache_enabled=caches)
