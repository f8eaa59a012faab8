"""What is left to measurement of how gradients travel, before a session is built: the codec, then buckets.

A run keeps `memory.budget`: it computes again what that takes, or does not start.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import torch

from paceline.comm.group_collectives import broadcast_text
from paceline.errors import StrategyError, TaskError
from paceline.job.cluster import Cluster
from paceline.parallel.session_context import SessionContext
from paceline.recipe.recipe import Recipe
from paceline.recipe.strategy import Strategy
from paceline.task import Task
from paceline.tuning.bucket_choice import choose_buckets
from paceline.tuning.codec_choice import choose_codec


def choose_codec_and_buckets(
    recipe: Recipe,
    strategy: Strategy,
    task: Task,
    cluster: Cluster,
    device: torch.device,
    *,
    warn: Callable[[str], None],
    note: Callable[[str, Mapping[str, Any]], None],
) -> tuple[Recipe, Strategy]:
    """Recipe and strategy with what was chosen; collective. See `choose_codec` and `choose_buckets`."""
    recipe, strategy = choose_codec(recipe, strategy, task, cluster, device, warn=warn, note=note)
    return choose_buckets(recipe, strategy, cluster, device, warn=warn, note=note), strategy


def apply_memory_budget(setting: SessionContext, recipe: Recipe, task: Task) -> tuple[SessionContext, Recipe]:
    """Both with what is computed again; rank 0 plans, and all ranks hear the same.

    Collective; nothing where there is no budget. What was chosen is told, and goes into the run folder.

    Args:
        recipe: with the strategy as the user wrote it.
    Raises:
        StrategyError: a rank would need more whatever is computed again; says how much, for what, and the
            nearest strategy that fits. Or what this one keeps is not known, or cannot be.
    """
    if recipe.memory.budget is None:
        return setting, recipe
    world = setting.mesh.world
    text = json.dumps(_plan_on_this_rank(setting, recipe, task)) if world.rank == 0 else ""
    found = json.loads(broadcast_text(text, world, setting.net, setting.device))
    if "what" in found:
        raise StrategyError(**found)
    if not found:
        return setting, recipe
    setting.warn(found["told"])
    setting.note("recompute", found["record"])
    memory = recipe.memory.replace(recompute=found["record"]["recompute"])
    return replace(setting, recipe=setting.recipe.replace(memory=memory)), recipe.replace(memory=memory)


def _plan_on_this_rank(setting: SessionContext, recipe: Recipe, task: Task) -> dict[str, Any]:
    """Words of an error, or what was chosen; nothing if the recipe says it and that fits.

    Args:
        recipe: with every rule of the run: what a later one keeps has to fit, too.
    """
    from paceline.plan.memory_budget import check_budget  # which knows how a session is built

    cluster = setting.cluster
    error: StrategyError | TaskError | None
    try:
        found = check_budget(recipe, task, cluster.world_size, nodes=cluster.num_nodes, device=setting.device)
        error = found.refusal
    except (StrategyError, TaskError) as unknown:
        error = unknown
    if error is not None:
        return {"what": error.what, "where": error.where, "next_step": error.next_step}
    return {} if found.choice is None else {"told": str(found.choice), "record": found.choice.record()}
