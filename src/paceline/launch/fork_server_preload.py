"""What a fork server imports once, so that a process that it forks starts in milliseconds.

Invariant: importing starts no thread and opens no group. What cannot be imported is left out; the process
that needs it will raise the error itself.
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
    """Import the libraries that every process uses, the rooms of the package, what words name, and `more`."""
    rooms = [room.name for room in pkgutil.iter_modules(paceline.__path__) if room.name not in _NOT_PRELOADED]
    for name in (
        *_LIBRARIES,
        *(f"paceline.{room}" for room in rooms),
        *_JOB_MODULES,
        *_strategy_modules(),
        *more,
    ):
        with contextlib.suppress(ImportError):
            importlib.import_module(name)
    _build_recipe_tables()
    gc.collect()
    gc.freeze()  # else every first collection of a forked process copies all of this


def _strategy_modules() -> list[str]:
    """The modules that construct what a word of a strategy stands for, those of the package alone."""
    from paceline.recipe.registry.sync_specs import ALL_SPECS

    return sorted({spec.build.partition(":")[0] for spec in ALL_SPECS if spec.is_built})


def _build_recipe_tables() -> None:
    """Those of recipes are built at their first use, which takes longer than to read a recipe."""
    from paceline.recipe.validation import RecipeTable

    for table in RecipeTable.__subclasses__():
        table.model_rebuild()
