"""Sinks: where events go. A sink never changes the run, and only rank 0 has any."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Protocol

from paceline.observe.stats import Stats


class Sink(Protocol):
    """Receives events in order; `close` once at the end, also after an error."""

    def step(self, stats: Stats) -> None: ...
    def event(self, name: str, record: Mapping[str, Any]) -> None: ...
    def close(self) -> None: ...


class JsonLines:
    """One JSON object a line: steps as `Stats.record`, other events under their name.

    Args:
        path: appended to, so that a resumed run continues its file.
    """

    def __init__(self, path: Path) -> None:
        self._file = path.open("a", encoding="utf-8")

    def step(self, stats: Stats) -> None:
        """Write one step."""
        self._write(stats.record())

    def event(self, name: str, record: Mapping[str, Any]) -> None:
        """Write one event."""
        self._write({"event": name, **record})

    def close(self) -> None:
        """Flush and close the file."""
        self._file.close()

    def _write(self, record: Mapping[str, Any]) -> None:
        self._file.write(json.dumps(_finite(record)) + "\n")
        self._file.flush()


def _finite(value: Any) -> Any:
    """JSON has no NaN: numbers that are not finite become their names."""
    match value:
        case Mapping():
            return {k: _finite(v) for k, v in value.items()}
        case list() | tuple():
            return [_finite(v) for v in value]
        case float() if not math.isfinite(value):
            return str(value)
        case _:
            return value
