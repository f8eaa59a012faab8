"""Sinks: where events go. A sink never changes the run, and only rank 0 has any."""

from __future__ import annotations

import json
import math
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Protocol

from paceline.observe.append import Appender, Say, say_on_stderr
from paceline.observe.schema import level_of, passes
from paceline.observe.stats import Stats

_STRICT = json.JSONEncoder(allow_nan=False)


class Sink(Protocol):
    """Receives events in order; `close` once at the end, also after an error."""

    def step(self, stats: Stats) -> None: ...
    def event(self, name: str, record: Mapping[str, Any]) -> None: ...
    def close(self) -> None: ...


class JsonLines:
    """One JSON object a line: steps as `Stats.record`, other events under their name; see `schema`.

    Nothing is thrown away when the file is full: it is renamed to `NAME.0001.jsonl`, `NAME.0002.jsonl` and so
    on, and a new one begins.

    Args:
        path: appended to, so that a resumed run continues its file.
        level: the lowest level that is written.
        rotate_bytes: size at which a new file begins; 0: never.
        now: seconds since the epoch.
        say: is told if the file cannot be written; the run goes on, see `Appender`.
    """

    def __init__(
        self,
        path: Path,
        *,
        level: str = "debug",
        rotate_bytes: int = 0,
        now: Callable[[], float] = time.time,
        say: Say = say_on_stderr,
    ) -> None:
        self._level, self._now = level, now
        self._common: dict[str, dict[str, Any] | None] = {}
        self._lines = Appender(path, _put_aside, rotate_bytes, say)

    def step(self, stats: Stats) -> None:
        """Write one step."""
        self.event("step", stats.record())

    def event(self, name: str, record: Mapping[str, Any]) -> None:
        """Write one event, about rank 0 where the record does not say another."""
        if name not in self._common:
            common = {"event": name, "level": level_of(name), "rank": 0}
            self._common[name] = common if passes(name, self._level) else None
        found = self._common[name]
        if found is not None:
            self._lines.append(_line({**found, "time": self._now(), **record}))

    def close(self) -> None:
        """Close the file."""
        self._lines.close()


def full_name(path: Path, number: int) -> Path:
    """The name of the n-th file that is full, from 1."""
    return path.with_name(f"{path.stem}.{number:04d}{path.suffix}")


def full_files(path: Path) -> list[Path]:
    """The files that are full, oldest first."""
    return sorted(path.parent.glob(f"{path.stem}.[0-9][0-9][0-9][0-9]{path.suffix}"))


def _put_aside(path: Path) -> None:
    path.rename(full_name(path, len(full_files(path)) + 1))


def _line(record: Mapping[str, Any]) -> str:
    """Strict JSON; JSON has no NaN, so numbers that are not finite become their names."""
    try:
        return _STRICT.encode(record) + "\n"
    except (
        TypeError,
        ValueError,
    ):  # a number that is not finite, or a mapping that is no dict
        return json.dumps(_finite(record)) + "\n"


def _finite(value: Any) -> Any:
    match value:
        case Mapping():
            return {k: _finite(v) for k, v in value.items()}
        case list() | tuple():
            return [_finite(v) for v in value]
        case float() if not math.isfinite(value):
            return str(value)
        case _:
            return value
