"""Recipes: what to run and how to distribute it, as typed values without torch, so that commands start fast.

`load_recipe(path)` and `Recipe(...)` return the same frozen object; `support` returns whether its strategy
runs on a number of processes. Nothing here starts processes, trains or reads the environment.
"""

from paceline.recipe.log_recipe import LogRecipe
from paceline.recipe.optimizer_recipe import OptimizerRecipe
from paceline.recipe.recipe import Recipe, max_sharers, num_micro_batches, to_toml
from paceline.recipe.recipe_loading import load_recipe
from paceline.recipe.schedule_recipe import ScheduleRecipe
from paceline.recipe.strategy import Strategy
from paceline.recipe.strategy_text import PRESETS, StrategyPreset
from paceline.recipe.support import StrategyRow, SupportResult, list_strategies, resolve_strategy, support
from paceline.recipe.tables import (
    BatchRecipe,
    CheckpointRecipe,
    ElasticRecipe,
    EvaluateRecipe,
    HealthRecipe,
    LoaderRecipe,
    MemoryRecipe,
    PrecisionRecipe,
    RuntimeRecipe,
)

__all__ = [
    "PRESETS",
    "BatchRecipe",
    "CheckpointRecipe",
    "ElasticRecipe",
    "EvaluateRecipe",
    "HealthRecipe",
    "LoaderRecipe",
    "LogRecipe",
    "MemoryRecipe",
    "OptimizerRecipe",
    "PrecisionRecipe",
    "Recipe",
    "RuntimeRecipe",
    "ScheduleRecipe",
    "Strategy",
    "StrategyPreset",
    "StrategyRow",
    "SupportResult",
    "list_strategies",
    "load_recipe",
    "max_sharers",
    "num_micro_batches",
    "resolve_strategy",
    "support",
    "to_toml",
]
