"""A call and its result, as files that the calling process and the processes it starts exchange.

Functions and classes of a script or a notebook are pickled by value, those of a module by name.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import cloudpickle

_CALL, _PATHS, _RESULT = "call", "paths", "given"


@dataclass(frozen=True)
class RemoteCall:
    """A call that every rank makes.

    Args:
        function: a function of `recipe`, `task` and `options`.
        reports: it takes a console, on which rank 0 prints.
    """

    function: Callable[..., Any]
    recipe: Any
    task: Any
    options: Mapping[str, Any]
    reports: bool = False

    def save(self, folder: Path) -> None:
        """Write the call, and the module search path of this process."""
        (folder / _PATHS).write_text("\n".join(sys.path), encoding="utf-8")
        (folder / _CALL).write_bytes(cloudpickle.dumps(self))

    @classmethod
    def load(cls, folder: Path) -> RemoteCall:
        """Read the call in another process, after setting its module search path."""
        # before unpickling: modules of the caller's script are imported by name
        sys.path[:] = (folder / _PATHS).read_text(encoding="utf-8").split("\n")
        call: RemoteCall = cloudpickle.loads((folder / _CALL).read_bytes())
        return call


@dataclass(frozen=True)
class CallResult:
    """The result of a call on rank 0.

    Args:
        result: what the function returned.
        states: the states of the callbacks.
    """

    result: Any
    states: Sequence[Mapping[str, Any]] = field(default_factory=list)

    def save(self, folder: Path) -> None:
        """Write the result atomically."""
        draft = folder / f".{_RESULT}"
        draft.write_bytes(cloudpickle.dumps(self))
        draft.replace(folder / _RESULT)

    @classmethod
    def load(cls, folder: Path) -> CallResult | None:
        """Read the result; None if rank 0 has written none."""
        path = folder / _RESULT
        if not path.exists():
            return None
        result: CallResult = cloudpickle.loads(path.read_bytes())
        return result
