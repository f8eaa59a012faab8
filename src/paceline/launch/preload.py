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
_NOT_ROOMS = ("__main__", "cli", "testing")


def preload(more: Iterable[str] = ()) -> None:
    """Import the libraries that every process uses, every room of the package, and `more`."""
    rooms = [room.name for room in pkgutil.iter_modules(paceline.__path__) if room.name not in _NOT_ROOMS]
    for name in (*_LIBRARIES, *(f"paceline.{room}" for room in rooms), *more):
        with contextlib.suppress(ImportError):
            importlib.import_module(name)
    gc.collect()
    gc.freeze()  # else every first collection of a forked process copies all of this
