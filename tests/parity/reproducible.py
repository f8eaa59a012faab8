"""The small run that tests of reproducible runs share."""

from __future__ import annotations

from typing import Any

from paceline.recipe import Recipe, Strategy


def recipe_of(strategy: str, **changes: Any) -> Recipe:
    settings: dict[str, Any] = {
        "task": "digits",
        "options": {"model": "convnet", "channels": 4, "dropout": 0.2},
        "steps": 8,
        "batch": {"size": 29, "shards": 6},
        "optimizer": {"name": "adamw", "lr": 3e-3, "clip_norm": 0.5},
        "reproducible": True,
        "strategy": Strategy.parse(strategy),
    }
    return Recipe(**(settings | changes))
