"""Fill in what a recipe leaves to the processes, the machine and the network, before a session is built.

Each chooser runs only if the recipe asks for it, measures on all ranks together, and decides by a pure
function of numbers that all ranks have, so all ranks continue with the same recipe. Every choice is
printed with its reason and recorded among the events of the run; the run folder keeps the result, so a
resumed run does not choose again.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from typing import Any

import torch

from paceline.comm.group_collectives import broadcast_text
from paceline.comm.net import Net
from paceline.errors import StrategyError, TaskError
from paceline.job.cluster import Cluster
from paceline.job.mesh import Mesh
from paceline.plan.memory_budget import check_budget
from paceline.recipe.recipe import Recipe, max_sharers
from paceline.recipe.strategy import Strategy
from paceline.recipe.support import resolve_strategy
from paceline.task import Task
from paceline.tuning.bucket_choice import choose_buckets
from paceline.tuning.codec_choice import choose_codec
from paceline.tuning.hardware_defaults import choose_hardware_defaults
from paceline.tuning.stage_choice import choose_stages


def tune_recipe(
    recipe: Recipe,
    task: Task,
    cluster: Cluster,
    device: torch.device,
    *,
    warn: Callable[[str], None],
    note: Callable[[str, Mapping[str, Any]], None],
) -> tuple[Recipe, Strategy]:
    """Choose number format, threads, stages, codec, buckets and recomputation; collective.

    Args:
        cluster: connected.
        warn: receives a sentence for each choice, with its reason.
        note: receives the same as an event, for the run folder.
    Returns:
        The recipe without words such as `auto`, its strategy otherwise as the user wrote it; and that
        strategy with its replicas filled in.
    Raises:
        StrategyError: the strategy does not fit the processes, or nothing keeps `memory.budget`.
        TaskError: the model cannot be partitioned as the strategy says.
        DataError: a link profile cannot be read.
    """
    max_shards, limit_key = max_sharers(recipe)
    strategy = resolve_strategy(
        recipe.strategy, processes=cluster.world_size, shards=max_shards, limit_key=limit_key
    )
    # Number format first: the choosers below measure forward and backward in it.
    recipe = choose_hardware_defaults(recipe, task, cluster, device, warn=warn, note=note)
    if strategy.has_timed_stages:
        recipe, strategy = choose_stages(recipe, strategy, task, cluster, device, warn=warn, note=note)
    if len(strategy.codec_alternatives) > 1:
        recipe, strategy = choose_codec(recipe, strategy, task, cluster, device, warn=warn, note=note)
    if recipe.runtime.bucket_latency is not None and cluster.world_size > 1:
        recipe = choose_buckets(recipe, strategy, cluster, device, warn=warn, note=note)
    if recipe.memory.budget is not None:
        recipe = _apply_memory_budget(recipe, task, cluster, device, warn=warn, note=note)
    return recipe, strategy


def _apply_memory_budget(
    recipe: Recipe,
    task: Task,
    cluster: Cluster,
    device: torch.device,
    *,
    warn: Callable[[str], None],
    note: Callable[[str, Mapping[str, Any]], None],
) -> Recipe:
    """Return the recipe with the recomputation that keeps `memory.budget`; collective.

    Args:
        recipe: with every rule of the run: the memory of a later rule has to fit as well.
    Raises:
        StrategyError: a rank needs more memory whatever is recomputed, or its memory cannot be planned.
    """
    # Rank 0 plans for all: the plan takes seconds, and equal choices need no comparison.
    world = Mesh.build(cluster, {"replica": cluster.world_size}).world
    text = json.dumps(_plan_recomputation(recipe, task, cluster, device)) if world.rank == 0 else ""
    plan = json.loads(broadcast_text(text, world, Net(recipe.runtime.deadline_seconds), device))
    if "what" in plan:
        raise StrategyError(**plan)
    if not plan:
        return recipe
    warn(plan["sentence"])
    note("recompute", plan["record"])
    return recipe.replace(memory=recipe.memory.replace(recompute=plan["record"]["recompute"]))


def _plan_recomputation(recipe: Recipe, task: Task, cluster: Cluster, device: torch.device) -> dict[str, Any]:
    """Return the fields of an error, or the choice; empty if the recipe already says it and that fits."""
    error: StrategyError | TaskError | None
    try:
        verdict = check_budget(recipe, task, cluster.world_size, nodes=cluster.num_nodes, device=device)
        error = verdict.refusal
    except (StrategyError, TaskError) as planning_error:
        error = planning_error
    if error is not None:
        return {"what": error.what, "where": error.where, "next_step": error.next_step}
    choice = verdict.choice
    return {} if choice is None else {"sentence": str(choice), "record": choice.record()}
