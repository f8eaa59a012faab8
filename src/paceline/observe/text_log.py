"""`log.txt`: what a person would want to read later, one line an event, with time, level and rank.

Invariant: every line begins with an ISO time in UTC and a level. Steps are thinned out: the numbers of all of
them are in `metrics.jsonl`.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from paceline.observe.append import Appender, Say, say_on_stderr
from paceline.observe.schema import LEVELS, level_of, spoken
from paceline.observe.stats import Stats

_STEP_SECONDS = 10.0
_NUM_OLD_FILES = 3


class TextLog:
    """Writes events as lines of text.

    Args:
        path: appended to.
        level: the lowest level that is written; with "debug" every step has its line.
        rotate_bytes: size at which `log.txt` becomes `log.txt.1`, of which three are kept; 0: never.
        now: seconds on a clock that never goes back.
        say: is told if the file cannot be written; the run goes on, see `Appender`.
    """

    def __init__(
        self,
        path: Path,
        *,
        level: str = "info",
        rotate_bytes: int = 0,
        now: Callable[[], float] = time.monotonic,
        say: Say = say_on_stderr,
    ) -> None:
        self._now, self._next_step, self._every_step = now, now(), level == "debug"
        self._lines = Appender(path, _put_aside, rotate_bytes, say)
        self._level = LEVELS.index(level)

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
        if LEVELS.index(level) >= self._level:
            moment = time.time()
            clock = time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(moment))
            for line in text.splitlines():
                self._lines.append(f"{clock}.{int(moment % 1 * 1000):03d}Z {level.upper():<7} {line}\n")

    def close(self) -> None:
        """Close the file."""
        self._lines.close()


def _put_aside(path: Path) -> None:
    """`log.txt` becomes `log.txt.1`, that `log.txt.2`, and so on; the oldest goes."""
    for number in range(_NUM_OLD_FILES - 1, 0, -1):
        old = path.with_name(f"{path.name}.{number}")
        if old.exists():
            old.replace(path.with_name(f"{path.name}.{number + 1}"))
    path.replace(path.with_name(f"{path.name}.1"))


def _short(value: Any) -> str:
    return f"{value:.5g}" if isinstance(value, float) else str(value)
