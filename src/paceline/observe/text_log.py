"""`log.txt`: what a person would want to read later, one line an event, with time, level and rank.

Invariant: every line begins with an ISO time in UTC and a level. Steps are thinned out: the numbers of all of
them are in `metrics.jsonl`.
"""

from __future__ import annotations

import logging
import sys
import time
from collections.abc import Callable, Mapping
from logging.handlers import RotatingFileHandler
from pathlib import Path
from typing import Any

from paceline.observe.disk import explained
from paceline.observe.schema import level_of, spoken
from paceline.observe.stats import Stats

_STEP_SECONDS = 10.0
_NUM_OLD_FILES = 3
_FORMAT = "%(asctime)s.%(msecs)03dZ %(levelname)-7s %(message)s"


class _Lines(RotatingFileHandler):
    """Says what could not be written, where logging would print its own traceback and go on."""

    def handleError(self, record: logging.LogRecord) -> None:
        """Raise what `emit` caught."""
        error = sys.exc_info()[1]
        if error is not None:
            raise error


class TextLog:
    """Writes events as lines of text.

    Args:
        path: appended to.
        level: the lowest level that is written; with "debug" every step has its line.
        rotate_bytes: size at which `log.txt` becomes `log.txt.1`, of which three are kept; 0: never.
        now: seconds on a clock that never goes back.
    """

    def __init__(
        self,
        path: Path,
        *,
        level: str = "info",
        rotate_bytes: int = 0,
        now: Callable[[], float] = time.monotonic,
    ) -> None:
        self._now, self._next_step, self._every_step = now, now(), level == "debug"
        self._path = path
        with explained(path):
            self._handler = _Lines(path, maxBytes=rotate_bytes, backupCount=_NUM_OLD_FILES, encoding="utf-8")
        formatter = logging.Formatter(_FORMAT, datefmt="%Y-%m-%dT%H:%M:%S")
        formatter.converter = time.gmtime
        self._handler.setFormatter(formatter)
        self._handler.setLevel(level.upper())

    def step(self, stats: Stats) -> None:
        """Write a step if the last one is some seconds ago."""
        if self._every_step or self._now() >= self._next_step:
            self._next_step = self._now() + _STEP_SECONDS
            rate = f"{stats.samples_per_second:.0f} samples/s"
            self.write("info", f"step {stats.step}: loss {stats.loss:.5g}  lr {stats.lr:.3g}  {rate}")

    def event(self, name: str, record: Mapping[str, Any]) -> None:
        """Write an event; the books of the run go to the metrics file only."""
        if spoken(name) or name in ("run", "end"):
            flat = {**record, **record.get("metrics", {})}
            words = "  ".join(f"{k} {_short(v)}" for k, v in flat.items() if not isinstance(v, Mapping))
            self.write(level_of(name), f"{name}: {words}")

    def write(self, level: str, text: str) -> None:
        """Write a text of any number of lines."""
        number = logging.getLevelName(level.upper())
        if number >= self._handler.level:
            with explained(self._path):
                for line in text.splitlines():
                    self._handler.emit(logging.LogRecord("paceline", number, "", 0, line, None, None))

    def close(self) -> None:
        """Close the file."""
        with explained(self._path):
            self._handler.close()


def _short(value: Any) -> str:
    return f"{value:.5g}" if isinstance(value, float) else str(value)
