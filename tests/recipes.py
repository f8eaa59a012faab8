"""Recipes of tests, which name only what a test is about."""

from __future__ import annotations

from typing import Any

from paceline.recipe import Recipe, Strategy


def recipe_of(strategy: str = "", **settings: Any) -> Recipe:
    """Build a recipe of one step of 8 samples in 2 micro-batches.

    Args:
        strategy: as text; empty for the default.
        settings: tables and keys of the recipe, which take the place of these.
    """
    values: dict[str, Any] = {"task": "own", "steps": 1, "batch": {"size": 8, "shards": 2}} | settings
    if strategy:
        values["strategy"] = Strategy.parse(strategy)
    return Recipe(**values)
