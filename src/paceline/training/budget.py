"""A run keeps `memory.budget`: it computes again what that takes, or does not start."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

from paceline.comm.text import share_text
from paceline.errors import StrategyError, TaskError
from paceline.recipe import Recipe
from paceline.task import Task
from paceline.training.arrange import Setting


def keep_to_budget(setting: Setting, recipe: Recipe, task: Task) -> tuple[Setting, Recipe]:
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
    text = json.dumps(_judged(setting, recipe, task)) if world.rank == 0 else ""
    found = json.loads(share_text(text, world, setting.net, setting.device))
    if "what" in found:
        raise StrategyError(**found)
    if not found:
        return setting, recipe
    setting.warn(found["told"])
    setting.note("recompute", found["record"])
    memory = recipe.memory.replace(recompute=found["record"]["recompute"])
    return replace(setting, recipe=setting.recipe.replace(memory=memory)), recipe.replace(memory=memory)


def _judged(setting: Setting, recipe: Recipe, task: Task) -> dict[str, Any]:
    """Words of an error, or what was chosen; nothing if the recipe says it and that fits.

    Args:
        recipe: with every rule of the run: what a later one keeps has to fit, too.
    """
    from paceline.plan import judge  # which knows how a session is built

    cluster = setting.cluster
    error: StrategyError | TaskError | None
    try:
        found = judge(recipe, task, cluster.world_size, nodes=cluster.num_nodes, device=setting.device)
        error = found.refusal
    except (StrategyError, TaskError) as unknown:
        error = unknown
    if error is not None:
        return {"what": error.what, "where": error.where, "next_step": error.next_step}
    return {} if found.choice is None else {"told": str(found.choice), "record": found.choice.record()}
