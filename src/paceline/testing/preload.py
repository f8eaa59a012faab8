"""What the fork server imports once, so that a rank starts in milliseconds.

Invariant: importing this starts no thread and opens no group. A room that cannot be imported is left out;
the rank that needs it will raise the error itself.
"""

from __future__ import annotations

import contextlib
import gc
import importlib
import pkgutil

import paceline

_LIBRARIES = ("numpy", "torch", "torch.distributed", "torch._dynamo", "cloudpickle", "pydantic", "pytest")
_NOT_ROOMS = ("cli", "testing")


def preload() -> None:
    """Import the libraries that ranks use and every room of the package."""
    rooms = [room.name for room in pkgutil.iter_modules(paceline.__path__) if room.name not in _NOT_ROOMS]
    for name in (*_LIBRARIES, *(f"paceline.{room}" for room in rooms)):
        with contextlib.suppress(ImportError):
            importlib.import_module(name)
    gc.collect()
    gc.freeze()  # else every rank's first collection copies all of this


preload()
