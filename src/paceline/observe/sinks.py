"""Sinks: where events go. A sink never changes the run, and only rank 0 has any.

`log.txt`: what a person would want to read later, one line an event, with time, level and rank.

Invariant: every line begins with an ISO time in UTC and a level. Steps are thinned out: the numbers of all of
them are in `metrics.jsonl`.
"""

from __future__ import annotations

import json
import math
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Protocol

from paceline.observe.file_writing import LineAppender, WarnFunction, warn_on_stderr
from paceline.observe.metrics_schema import LEVELS, event_level, passes_level, shows_on_terminal
from paceline.observe.step_stats import StepStats

_STRICT = json.JSONEncoder(allow_nan=False)


class Sink(Protocol):
    """Receives events in order; `close` once at the end, also after an error."""

    def step(self, stats: StepStats) -> None: ...
    def event(self, name: str, record: Mapping[str, Any]) -> None: ...
    def close(self) -> None: ...


class JsonLinesSink:
    """One JSON object a line: steps as `StepStats.record`, other events under their name; see `schema`.

    Nothing is thrown away when the file is full: it is renamed to `NAME.0001.jsonl`, `NAME.0002.jsonl` and so
    on, and a new one begins.

    Args:
        path: appended to, so that a resumed run continues its file.
        level: the lowest level that is written.
        rotate_bytes: size at which a new file begins; 0: never.
        now: seconds since the epoch.
        say: is told if the file cannot be written; the run goes on, see `LineAppender`.
    """

    def __init__(
        self,
        path: Path,
        *,
        level: str = "debug",
        rotate_bytes: int = 0,
        now: Callable[[], float] = time.time,
        say: WarnFunction = warn_on_stderr,
    ) -> None:
        self._level, self._now = level, now
        self._common: dict[str, dict[str, Any] | None] = {}
        self._lines = LineAppender(path, _rotate_numbered, rotate_bytes, say)

    def step(self, stats: StepStats) -> None:
        """Write one step."""
        self.event("step", stats.record())

    def event(self, name: str, record: Mapping[str, Any]) -> None:
        """Write one event, about rank 0 where the record does not say another."""
        if name not in self._common:
            common = {"event": name, "level": event_level(name), "rank": 0}
            self._common[name] = common if passes_level(name, self._level) else None
        found = self._common[name]
        if found is not None:
            self._lines.append(_encode_line({**found, "time": self._now(), **record}))

    def close(self) -> None:
        """Close the file."""
        self._lines.close()


def rotated_name(path: Path, number: int) -> Path:
    """The name of the n-th file that is full, from 1."""
    return path.with_name(f"{path.stem}.{number:04d}{path.suffix}")


def rotated_files(path: Path) -> list[Path]:
    """The files that are full, oldest first."""
    return sorted(path.parent.glob(f"{path.stem}.[0-9][0-9][0-9][0-9]{path.suffix}"))


def _rotate_numbered(path: Path) -> None:
    path.rename(rotated_name(path, len(rotated_files(path)) + 1))


def _encode_line(record: Mapping[str, Any]) -> str:
    """Strict JSON; JSON has no NaN, so numbers that are not finite become their names."""
    try:
        return _STRICT.encode(record) + "\n"
    except (
        TypeError,
        ValueError,
    ):  # a number that is not finite, or a mapping that is no dict
        return json.dumps(_replace_non_finite(record)) + "\n"


def _replace_non_finite(value: Any) -> Any:
    match value:
        case Mapping():
            return {k: _replace_non_finite(v) for k, v in value.items()}
        case list() | tuple():
            return [_replace_non_finite(v) for v in value]
        case float() if not math.isfinite(value):
            return str(value)
        case _:
            return value


_STEP_SECONDS = 10.0
_NUM_OLD_FILES = 3


class TextLogSink:
    """Writes events as lines of text.

    Args:
        path: appended to.
        level: the lowest level that is written; with "debug" every step has its line.
        rotate_bytes: size at which `log.txt` becomes `log.txt.1`, of which three are kept; 0: never.
        now: seconds on a clock that never goes back.
        say: is told if the file cannot be written; the run goes on, see `LineAppender`.
    """

    def __init__(
        self,
        path: Path,
        *,
        level: str = "info",
        rotate_bytes: int = 0,
        now: Callable[[], float] = time.monotonic,
        say: WarnFunction = warn_on_stderr,
    ) -> None:
        self._now, self._next_step, self._every_step = now, now(), level == "debug"
        self._lines = LineAppender(path, _rotate_log, rotate_bytes, say)
        self._level = LEVELS.index(level)

    def step(self, stats: StepStats) -> None:
        """Write a step if the last one is some seconds ago."""
        if self._every_step or self._now() >= self._next_step:
            self._next_step = self._now() + _STEP_SECONDS
            rate = f"{stats.samples_per_second:.0f} samples/s"
            self.write("info", f"step {stats.step}: loss {stats.loss:.5g}  lr {stats.lr:.3g}  {rate}")

    def event(self, name: str, record: Mapping[str, Any]) -> None:
        """Write an event; the books of the run go to the metrics file only."""
        if shows_on_terminal(name) or name in ("run", "end"):
            flat = {**record, **record.get("metrics", {})}
            words = "  ".join(
                f"{k} {_format_value(v)}" for k, v in flat.items() if not isinstance(v, Mapping)
            )
            self.write(event_level(name), f"{name}: {words}")

    def write(self, level: str, text: str) -> None:
        """Write a text of any number of lines."""
        if LEVELS.index(level) >= self._level:
            moment = time.time()
            clock = time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(moment))
            for line in text.splitlines():
                self._lines.append(f"{clock}.{int(moment % 1 * 1000):03d}Z {level.upper():<7} {line}\n")

    def close(self) -> None:
        """Close the file."""
        self._lines.close()


def _rotate_log(path: Path) -> None:
    """`log.txt` becomes `log.txt.1`, that `log.txt.2`, and so on; the oldest goes."""
    for number in range(_NUM_OLD_FILES - 1, 0, -1):
        old = path.with_name(f"{path.name}.{number}")
        if old.exists():
            old.replace(path.with_name(f"{path.name}.{number + 1}"))
    path.replace(path.with_name(f"{path.name}.1"))


def _format_value(value: Any) -> str:
    return f"{value:.5g}" if isinstance(value, float) else str(value)
