"""A run that needs more memory than `memory.budget` does not start."""

from __future__ import annotations

import json

from paceline.comm.text import share_text
from paceline.errors import StrategyError, TaskError
from paceline.task import Task
from paceline.training.arrange import Setting


def keep_to_budget(setting: Setting, task: Task) -> None:
    """Rank 0 plans, and all ranks hear the same; collective, nothing where there is no budget.

    Raises:
        StrategyError: a rank would need more; says how much, for what, and the nearest strategy that fits. Or
            what this one keeps is not known, or cannot be.
    """
    if setting.recipe.memory.budget is None:
        return
    world = setting.mesh.world
    text = json.dumps(_refused(setting, task)) if world.rank == 0 else ""
    found = json.loads(share_text(text, world, setting.net, setting.device))
    if found is not None:
        raise StrategyError(**found)


def _refused(setting: Setting, task: Task) -> dict[str, str] | None:
    from paceline.plan import refusal  # which knows how a session is built

    cluster = setting.cluster
    error: StrategyError | TaskError | None
    try:
        error = refusal(setting.recipe, task, cluster.world_size, cluster.num_nodes)
    except (StrategyError, TaskError) as unknown:
        error = unknown
    if error is None:
        return None
    return {"what": error.what, "where": error.where, "next_step": error.next_step}
