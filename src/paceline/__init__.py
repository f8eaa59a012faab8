"""Paceline trains one PyTorch model on many processes, devices and machines, and verifies the answer.

The public names are imported when they are first used, so `import paceline` costs nothing.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from paceline._version import VERSION

if TYPE_CHECKING:
    from paceline.calls import train as train
    from paceline.calls import verify as verify
    from paceline.cluster import Cluster as Cluster
    from paceline.errors import PacelineError as PacelineError
    from paceline.optim import ByGroup as ByGroup
    from paceline.optim import UserOptimizer as UserOptimizer
    from paceline.recipe import Recipe as Recipe
    from paceline.recipe import Strategy as Strategy
    from paceline.recipe import load_recipe as load_recipe
    from paceline.recipe import support as support
    from paceline.task import Loss as Loss
    from paceline.task import Metric as Metric
    from paceline.task import Task as Task
    from paceline.training import Callback as Callback
    from paceline.training import Result as Result
    from paceline.training import Session as Session
    from paceline.training import evaluate as evaluate
    from paceline.training import generate as generate
    from paceline.training import join as join
    from paceline.training import open_run as open_run
    from paceline.training import own_loop as own_loop

__version__ = VERSION
_HOMES = {
    "ByGroup": "optim",
    "Callback": "training",
    "Cluster": "cluster",
    "Loss": "task",
    "Metric": "task",
    "PacelineError": "errors",
    "Recipe": "recipe",
    "Result": "training",
    "Session": "training",
    "Strategy": "recipe",
    "Task": "task",
    "UserOptimizer": "optim",
    "evaluate": "training",
    "generate": "training",
    "join": "training",
    "load_recipe": "recipe",
    "open_run": "training",
    "own_loop": "training",
    "support": "recipe",
    "train": "calls",
    "verify": "calls",
}
__all__ = [
    "ByGroup",
    "Callback",
    "Cluster",
    "Loss",
    "Metric",
    "PacelineError",
    "Recipe",
    "Result",
    "Session",
    "Strategy",
    "Task",
    "UserOptimizer",
    "__version__",
    "evaluate",
    "generate",
    "join",
    "load_recipe",
    "open_run",
    "own_loop",
    "support",
    "train",
    "verify",
]


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'paceline' has no attribute '{name}'; it has {', '.join(__all__)}")
    return getattr(import_module(f"paceline.{_HOMES[name]}"), name)


def __dir__() -> list[str]:
    return __all__
