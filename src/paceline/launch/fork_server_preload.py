"""The imports of a fork server, after which a process that it forks starts in milliseconds.

This is a module of its own because `paceline.testing.preload`, which the fork server of `multiprocessing`
imports by name, uses it too. Invariant: importing starts no thread and creates no process group. A module
that cannot be imported is skipped; the process that needs it raises the error itself.
"""

from __future__ import annotations

import contextlib
import gc
import importlib
import pkgutil
from collections.abc import Iterable

import paceline

_LIBRARIES = ("numpy", "torch", "torch.distributed", "torch._dynamo", "pydantic")
_JOB_MODULES = tuple(
    f"paceline.job.{name}" for name in ("cluster", "membership", "mesh", "process_group", "torch_store")
)
_NOT_PRELOADED = ("__main__", "cli", "testing")


def import_modules(more: Iterable[str] = ()) -> None:
    """Import what every worker uses: libraries, the packages of Paceline, strategy modules, and `more`."""
    packages = [
        package.name
        for package in pkgutil.iter_modules(paceline.__path__)
        if package.name not in _NOT_PRELOADED
    ]
    for name in (
        *_LIBRARIES,
        *(f"paceline.{package}" for package in packages),
        *_JOB_MODULES,
        *_strategy_modules(),
        *more,
    ):
        with contextlib.suppress(ImportError):
            importlib.import_module(name)
    _build_recipe_tables()
    gc.collect()
    gc.freeze()  # else the first garbage collection of each forked process copies all these pages


def _strategy_modules() -> list[str]:
    """Return the modules that build the words of a strategy, without plug-ins."""
    from paceline.recipe.registry import ALL_SPECS

    return sorted({spec.build.partition(":")[0] for spec in ALL_SPECS if spec.is_built})


def _build_recipe_tables() -> None:
    """Build the validators of recipe tables, which pydantic otherwise does at their first use."""
    from paceline.recipe.validation import RecipeTable

    for table in RecipeTable.__subclasses__():
        table.model_rebuild()
