"""What to run and how to distribute it, as typed values; imports no torch, so that commands start at once.

`load_recipe(path)` and `Recipe(...)` give the same frozen object; `support` says whether its strategy works
on a number of processes. Nothing here starts, trains or reads the environment.
"""

from paceline.recipe.dump import to_toml
from paceline.recipe.lasting import CheckpointRecipe, HealthRecipe
from paceline.recipe.learning import BatchRecipe, OptimizerRecipe, ScheduleRecipe
from paceline.recipe.load import load_recipe
from paceline.recipe.log import LogRecipe
from paceline.recipe.memory import MemoryRecipe
from paceline.recipe.micro_batches import most_sharers, num_micro_batches
from paceline.recipe.model import (
    EvaluateRecipe,
    LoaderRecipe,
    PrecisionRecipe,
    Recipe,
    RuntimeRecipe,
)
from paceline.recipe.presets import PRESETS, Preset
from paceline.recipe.strategy import Strategy
from paceline.recipe.strategy_table import Row, table
from paceline.recipe.support import Support, resolve, support

__all__ = [
    "PRESETS",
    "BatchRecipe",
    "CheckpointRecipe",
    "EvaluateRecipe",
    "HealthRecipe",
    "LoaderRecipe",
    "LogRecipe",
    "MemoryRecipe",
    "OptimizerRecipe",
    "PrecisionRecipe",
    "Preset",
    "Recipe",
    "Row",
    "RuntimeRecipe",
    "ScheduleRecipe",
    "Strategy",
    "Support",
    "load_recipe",
    "most_sharers",
    "num_micro_batches",
    "resolve",
    "support",
    "table",
    "to_toml",
]
