"""What a call is made of, as files that the calling process and the processes it has started exchange.

Functions and classes of a script or a notebook travel by value, those of a module by their name.
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
        function: of `recipe`, `task` and `options`.
        reports: it takes a console, on which rank 0 reports.
    """

    function: Callable[..., Any]
    recipe: Any
    task: Any
    options: Mapping[str, Any]
    reports: bool = False

    def save(self, folder: Path) -> None:
        """Write it, with where this process finds its modules."""
        (folder / _PATHS).write_text("\n".join(sys.path), encoding="utf-8")
        (folder / _CALL).write_bytes(cloudpickle.dumps(self))

    @classmethod
    def load(cls, folder: Path) -> RemoteCall:
        """Read it in another process, which finds the same modules from now on."""
        sys.path[:] = (folder / _PATHS).read_text(encoding="utf-8").split("\n")
        order: RemoteCall = cloudpickle.loads((folder / _CALL).read_bytes())
        return order


@dataclass(frozen=True)
class CallResult:
    """What rank 0 gives back.

    Args:
        result: of the call.
        states: what the callbacks keep.
    """

    result: Any
    states: Sequence[Mapping[str, Any]] = field(default_factory=list)

    def save(self, folder: Path) -> None:
        """Write it whole or not at all."""
        draft = folder / f".{_RESULT}"
        draft.write_bytes(cloudpickle.dumps(self))
        draft.replace(folder / _RESULT)

    @classmethod
    def load(cls, folder: Path) -> CallResult | None:
        """Read it; None: rank 0 gave nothing."""
        path = folder / _RESULT
        if not path.exists():
            return None
        given: CallResult = cloudpickle.loads(path.read_bytes())
        return given
