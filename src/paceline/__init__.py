"""Paceline trains one PyTorch model on many processes, devices and machines, and verifies the result.

Public names are imported on first use, so `import paceline` is fast.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from paceline._version import VERSION

if TYPE_CHECKING:
    from paceline.api import train as train
    from paceline.api import tune as tune
    from paceline.api import verify as verify
    from paceline.errors import PacelineError as PacelineError
    from paceline.job.cluster import Cluster as Cluster
    from paceline.optim import ByGroup as ByGroup
    from paceline.optim import UserOptimizer as UserOptimizer
    from paceline.parallel.batch_gather import gather as gather
    from paceline.recipe import Recipe as Recipe
    from paceline.recipe import Strategy as Strategy
    from paceline.recipe import load_recipe as load_recipe
    from paceline.recipe import support as support
    from paceline.serving import generate as generate
    from paceline.session import Callback as Callback
    from paceline.session import Result as Result
    from paceline.session import Session as Session
    from paceline.session import evaluate as evaluate
    from paceline.session import join as join
    from paceline.session import open_run as open_run
    from paceline.session import own_loop as own_loop
    from paceline.task import Loss as Loss
    from paceline.task import Metric as Metric
    from paceline.task import Task as Task

__version__ = VERSION
_HOMES = {
    "ByGroup": "optim",
    "Callback": "session",
    "Cluster": "job.cluster",
    "Loss": "task",
    "Metric": "task",
    "PacelineError": "errors",
    "Recipe": "recipe",
    "Result": "session",
    "Session": "session",
    "Strategy": "recipe",
    "Task": "task",
    "UserOptimizer": "optim",
    "evaluate": "session",
    "gather": "parallel.batch_gather",
    "generate": "serving",
    "join": "session",
    "load_recipe": "recipe",
    "open_run": "session",
    "own_loop": "session",
    "support": "recipe",
    "train": "api",
    "tune": "api",
    "verify": "api",
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
    "gather",
    "generate",
    "join",
    "load_recipe",
    "open_run",
    "own_loop",
    "support",
    "train",
    "tune",
    "verify",
]


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'paceline' has no attribute '{name}'; it has {', '.join(__all__)}")
    return getattr(import_module(f"paceline.{_HOMES[name]}"), name)


def __dir__() -> list[str]:
    return __all__
