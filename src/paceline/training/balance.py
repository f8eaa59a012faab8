"""Which part of a batch each of the replicas that train alone runs."""

from __future__ import annotations

from paceline.data import split
from paceline.sync.dealing import WINDOW, Dealt, Notices
from paceline.training.arrange import Setting


def is_by_speed(setting: Setting) -> bool:
    """Whether shares follow speed, and there are several."""
    return setting.recipe.strategy.balance == "speed" and setting.mesh.world.size > 1


def dealt_by_speed(setting: Setting, notices: Notices, *, lag: int, least_window: int = WINDOW) -> Dealt:
    """Even shares to begin with.

    Args:
        lag: see `Dealt`.
        least_window: steps that a measurement is of, at least.
    """
    world, shards = setting.mesh.world, setting.shards
    return Dealt(
        [len(split(shards, world.size, rank)) for rank in range(world.size)],
        world.rank,
        notices,
        lag=lag,
        window=max(WINDOW, least_window),
        divides=setting.recipe.batch.reduction == "mean",
        note=setting.note,
    )
