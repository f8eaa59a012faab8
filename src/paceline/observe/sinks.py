"""Sinks: the destinations of the steps and events of a run. Imports neither torch nor rich.

Only rank 0 of a run has sinks. `log.sinks` in a recipe names them; a `SinkSpec` describes each, and its
`build` receives a `SinkSite`. Here are `metrics.jsonl` for programs and `log.txt` for people; the terminal is
in `paceline.observe.progress`.

Invariant: a sink never changes the run. The sinks of this package handle a full or unwritable disk
themselves; `GuardedSink` removes any other sink that raises.
"""

from __future__ import annotations

import json
import math
import re
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from paceline.observe.file_writing import LineAppender, WarnFunction, warn_on_stderr
from paceline.observe.metrics_schema import LEVELS, event_level, passes_level, shows_on_terminal
from paceline.observe.step_stats import StepStats

if TYPE_CHECKING:
    from rich.console import Console

METRICS = "metrics.jsonl"
LOG = "log.txt"
WIRE = "wire.jsonl"


def system_file(rank: int | None = None) -> str:
    """Return the name of a file of the system sampler: of the host of rank 0, or of the one that begins with
    another rank.
    """
    return "system.jsonl" if rank is None else f"system-{rank}.jsonl"


def system_files(run_dir: Path) -> list[str]:
    """Return the names of the files of the system sampler that exist; of each host one, without full ones."""
    names = (path.name for path in run_dir.glob("system*.jsonl"))
    return sorted(name for name in names if re.fullmatch(r"system(-\d+)?\.jsonl", name))


_STRICT_JSON = json.JSONEncoder(allow_nan=False)

EventCallback = Callable[[str, Mapping[str, Any]], None]
"""Receives the name of an event and its record, which JSON can express."""


class Sink(Protocol):
    """A destination of steps and events, in order; `close` is called at the end, also after an error."""

    def step(self, stats: StepStats) -> None: ...
    def event(self, name: str, record: Mapping[str, Any]) -> None: ...
    def close(self) -> None: ...


@dataclass(frozen=True)
class SinkSite:
    """The run that a sink is built for.

    Args:
        run_dir: the folder of the run; it exists.
        level: the lowest level in `log.txt`, one of `LEVELS` (`log.level`).
        rotate_bytes: the size at which a new file begins; 0 for a single file (`log.rotate_bytes`).
        console: the terminal of rank 0; None if the run prints nothing.
        first_step, last_step: the steps of this run: `first_step` is the index of the first, from 0, and
            `last_step` is the number of steps at the end.
        tokens_per_sample: 0 if the task has no tokens.
        steps_per_epoch: 0 if it is not known.
        now: returns seconds since the epoch; in the process of the sinks, when the record was written that is
            being passed on.
        warn: prints a warning for the user.
        recipe: the values of the recipe by dotted key, without those that are left out.
    """

    run_dir: Path
    level: str = "info"
    rotate_bytes: int = 0
    console: Console | None = None
    first_step: int = 0
    last_step: int = 0
    tokens_per_sample: int = 0
    steps_per_epoch: int = 0
    now: Callable[[], float] = time.time
    warn: WarnFunction = warn_on_stderr
    recipe: Mapping[str, Any] = field(default_factory=dict)


class GuardedSink:
    """A sink whose errors do not reach the run: after the first one it is closed and receives nothing more.

    Args:
        word: the word of the sink in `log.sinks`, for the warning.
        sink: the sink that may raise.
        warn: receives one warning, with the error.
    """

    def __init__(self, word: str, sink: Sink, warn: WarnFunction = warn_on_stderr) -> None:
        self._word, self._warn = word, warn
        self._sink: Sink | None = sink

    def step(self, stats: StepStats) -> None:
        """Pass on one step."""
        self._call(lambda sink: sink.step(stats))

    def event(self, name: str, record: Mapping[str, Any]) -> None:
        """Pass on one event."""
        self._call(lambda sink: sink.event(name, record))

    def close(self) -> None:
        """Close the sink, unless an error has closed it."""
        self._call(lambda sink: sink.close())
        self._sink = None

    def _call(self, method: Callable[[Sink], object]) -> None:
        sink = self._sink
        if sink is None:
            return
        error = _call_guarded(method, sink)
        if error is not None:
            self._sink = None
            self._warn(
                f"the sink '{self._word}' failed and is off from now on: {type(error).__name__}: {error}"
            )
            # It may hold a file or a connection. A second error would only hide the first.
            _call_guarded(lambda failed: failed.close(), sink)


def _call_guarded(method: Callable[[Sink], object], sink: Sink) -> Exception | None:
    """Call a method of a sink, and return the error that it raises, if any."""
    try:
        method(sink)
    except Exception as error:  # noqa: BLE001, whatever a foreign sink raises, the run goes on
        return error
    return None


class JsonLinesSink:
    """A file with one JSON object per line, with the fields of `EVENT_SCHEMAS`.

    Nothing is discarded when the file is full: it is renamed to `NAME.0001.jsonl`, `NAME.0002.jsonl` and so
    on, and a new one begins.

    Args:
        path: appended to, so that a resumed run continues its file.
        level: the lowest level that is written.
        rotate_bytes: the size at which a new file begins; 0 for a single file.
        now: returns seconds since the epoch.
        warn: called if the file cannot be written; the run goes on, as described at `LineAppender`.
    """

    def __init__(
        self,
        path: Path,
        *,
        level: str = "debug",
        rotate_bytes: int = 0,
        now: Callable[[], float] = time.time,
        warn: WarnFunction = warn_on_stderr,
    ) -> None:
        self._level, self._now = level, now
        self._common_fields: dict[str, dict[str, Any] | None] = {}
        self._lines = LineAppender(path, _rotate_numbered, rotate_bytes, warn)

    def step(self, stats: StepStats) -> None:
        """Write one step."""
        self.event("step", stats.record())

    def event(self, name: str, record: Mapping[str, Any]) -> None:
        """Write one event; it is about rank 0 unless the record names another rank."""
        # A step costs microseconds here, so level and common fields are looked up once per kind of event.
        if name not in self._common_fields:
            fields = {"event": name, "level": event_level(name), "rank": 0}
            self._common_fields[name] = fields if passes_level(name, self._level) else None
        common = self._common_fields[name]
        if common is not None:
            self._lines.append(_encode_line({**common, "time": self._now(), **record}))

    def close(self) -> None:
        """Close the file."""
        self._lines.close()


class WireLogSink:
    """The file of the messages of network clients, one JSON object per line; other events are ignored.

    Args:
        path: appended to.
        warn: called if the file cannot be written.
    """

    def __init__(self, path: Path, warn: WarnFunction = warn_on_stderr) -> None:
        self._lines = JsonLinesSink(path, warn=warn)

    def step(self, stats: StepStats) -> None:
        """Ignore a step."""

    def event(self, name: str, record: Mapping[str, Any]) -> None:
        """Write a message."""
        if name == "wire":
            self._lines.event(name, record)

    def close(self) -> None:
        """Close the file."""
        self._lines.close()


def build_json_lines(site: SinkSite, argument: object) -> JsonLinesSink:
    """Build the sink of `metrics.jsonl`, which has steps at every level: other processes read them there."""
    level = min(site.level, "info", key=LEVELS.index)
    return JsonLinesSink(site.run_dir / METRICS, level=level, rotate_bytes=site.rotate_bytes, warn=site.warn)


def rotated_name(path: Path, number: int) -> Path:
    """Return the name of the n-th full file, counted from 1."""
    return path.with_name(f"{path.stem}.{number:04d}{path.suffix}")


def rotated_files(path: Path) -> list[Path]:
    """Return the full files of a sink that exist, oldest first."""
    return sorted(path.parent.glob(f"{path.stem}.[0-9][0-9][0-9][0-9]{path.suffix}"))


def _rotate_numbered(path: Path) -> None:
    path.rename(rotated_name(path, len(rotated_files(path)) + 1))


def _encode_line(record: Mapping[str, Any]) -> str:
    """Encode a record as strict JSON; NaN and infinities, which JSON does not have, become strings."""
    try:
        return _STRICT_JSON.encode(record) + "\n"
    except (TypeError, ValueError):  # a number that is not finite, or a mapping that is no dict
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


_SECONDS_BETWEEN_STEPS = 10.0
_NUM_OLD_LOGS = 3


class TextLogSink:
    """A text file for people: one line per event, with the time in UTC and the level.

    Steps are thinned out to one every ten seconds; all of them are in `metrics.jsonl`.

    Args:
        path: appended to.
        level: the lowest level that is written; with "debug" every step has its line.
        rotate_bytes: the size at which `log.txt` becomes `log.txt.1`, of which three are kept; 0 for a single
            file.
        now: returns seconds on a clock that never goes back.
        warn: called if the file cannot be written; the run goes on, as described at `LineAppender`.
    """

    def __init__(
        self,
        path: Path,
        *,
        level: str = "info",
        rotate_bytes: int = 0,
        now: Callable[[], float] = time.monotonic,
        warn: WarnFunction = warn_on_stderr,
    ) -> None:
        self._now, self._next_step_time, self._every_step = now, now(), level == "debug"
        self._lines = LineAppender(path, _rotate_log, rotate_bytes, warn)
        self._level = LEVELS.index(level)

    def step(self, stats: StepStats) -> None:
        """Write a step if the last one that was written is some seconds ago."""
        if self._every_step or self._now() >= self._next_step_time:
            self._next_step_time = self._now() + _SECONDS_BETWEEN_STEPS
            rate = f"{stats.samples_per_second:.0f} samples/s"
            self.write("info", f"step {stats.step}: loss {stats.loss:.5g}  lr {stats.lr:.3g}  {rate}")

    def event(self, name: str, record: Mapping[str, Any]) -> None:
        """Write an event, unless it is bookkeeping that only `metrics.jsonl` keeps."""
        if shows_on_terminal(name) or name in ("run", "end"):
            text = format_fields({**record, **record.get("metrics", {})})
            self.write(event_level(name), f"{name}: {text}")

    def write(self, level: str, text: str) -> None:
        """Write a text of any number of lines."""
        if LEVELS.index(level) >= self._level:
            seconds = time.time()
            clock = time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(seconds))
            for line in text.splitlines():
                self._lines.append(f"{clock}.{int(seconds % 1 * 1000):03d}Z {level.upper():<7} {line}\n")

    def close(self) -> None:
        """Close the file."""
        self._lines.close()


def build_text_log(site: SinkSite, argument: object) -> TextLogSink:
    """Build the sink of `log.txt`."""
    return TextLogSink(site.run_dir / LOG, level=site.level, rotate_bytes=site.rotate_bytes, warn=site.warn)


def _rotate_log(path: Path) -> None:
    """Rename `log.txt` to `log.txt.1`, that to `log.txt.2`, and so on; the oldest is overwritten."""
    for number in range(_NUM_OLD_LOGS - 1, 0, -1):
        old = path.with_name(f"{path.name}.{number}")
        if old.exists():
            old.replace(path.with_name(f"{path.name}.{number + 1}"))
    path.replace(path.with_name(f"{path.name}.1"))


def format_fields(record: Mapping[str, Any]) -> str:
    """Return the fields of an event as "name value" pairs; tables are left out."""
    return "  ".join(
        f"{name} {value:.5g}" if isinstance(value, float) else f"{name} {value}"
        for name, value in record.items()
        if not isinstance(value, Mapping)
    )
