"""The process that writes the sinks of a run that need a library: it follows `metrics.jsonl`.

A run whose `log.sinks` has such a sink starts it beside rank 0, as `python -m paceline.watch.sink_process`.
Each sink has a thread here that reads the file at its own pace, so a slow one loses nothing and holds up no
other. The process ends when the end of the run is written, when it receives SIGTERM, or when the process that
started it is gone; after the last records, but at the latest after a deadline.

Invariant: a step never waits for it, and nothing that a library does here reaches the job.
"""

from __future__ import annotations

import fcntl
import json
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields, replace
from functools import partial
from pathlib import Path
from typing import Any

from paceline.observe.background_sink import UnopenedWriter
from paceline.observe.file_writing import WarnFunction, warn_on_stderr
from paceline.observe.metrics_schema import COMMON_FIELDS, EVENT_SCHEMAS
from paceline.observe.sinks import GuardedSink, Sink, SinkSite
from paceline.observe.step_stats import StepStats
from paceline.recipe.registry import parse_word
from paceline.recipe.registry.sink_specs import SinkSpec
from paceline.watch.run_tail import RunTail

_POLL_SECONDS = 0.25
_LOCK = ".sinks.lock"
_STEP_FIELDS = tuple(field.name for field in fields(StepStats))
_NON_FINITE = ("nan", "inf", "-inf")


@dataclass(frozen=True)
class SinkJob:
    """The work of the process, which is its standard input as JSON.

    Args:
        words: the sinks, as in `log.sinks`.
        start_bytes: size of the records of the run before this start of it.
        parent: process id of rank 0.
        end_seconds: the longest time that it lives after the end of the run.
        site: the fields of the `SinkSite`, without those that are functions or objects.
    """

    words: tuple[str, ...]
    start_bytes: int
    parent: int
    end_seconds: float
    site: Mapping[str, Any]


class SinkFollower(threading.Thread):
    """A thread that passes the records of this start of a run on to one sink.

    Args:
        word: of the sink, for warnings.
        open_sink: opens it, in this thread.
        site: the run.
        start_bytes: size of the records before this start.
        ending: set when no more records will be written.

    Attributes:
        is_complete: the sink has everything and is closed, or it has failed, with a warning.
        is_over: the end of the run was read.
        num_steps: the steps taken after the last step that was passed on; None before the first one.
    """

    def __init__(
        self,
        word: str,
        open_sink: Callable[[SinkSite], Sink],
        site: SinkSite,
        start_bytes: int,
        ending: threading.Event,
    ) -> None:
        # A daemon: a library that hangs must not keep the process alive.
        super().__init__(name=f"sink-{word}", daemon=True)
        self.word, self._warn, self._ending = word, site.warn, ending
        self.is_complete = self.is_over = self._has_begun = self._has_failed = False
        self.num_steps: int | None = None
        self._tail = RunTail(site.run_dir, start_bytes=start_bytes)
        self._time, self._num_restarts, self._after = time.time(), 0, 0.0
        site = replace(site, now=lambda: self._time, warn=self._fail)
        self._sink = GuardedSink(word, UnopenedWriter(lambda: open_sink(site)), self._fail)

    def run(self) -> None:
        """Follow the records to their end."""
        while not self._has_failed:
            is_ending = self._ending.is_set()  # before the file is read, so that nothing is after its end
            before = self._tail.num_bytes_read
            records = self._tail.read()
            if not all(map(self._pass_on, records)):
                break
            if self._tail.num_bytes_read == before:
                if is_ending or self.is_over:
                    break
                self._ending.wait(_POLL_SECONDS)
        self._sink.close()
        self.is_complete = True

    def _fail(self, text: str) -> None:
        self._has_failed = True
        self._warn(text)

    def _pass_on(self, record: Mapping[str, Any]) -> bool:
        """Pass a record on; return False if it is of another start of the run, or if the sink has failed."""
        if self._tail.num_restarts > self._num_restarts:  # a copy of the file is read from its beginning
            self._num_restarts, self._after = self._tail.num_restarts, self._time
        moment = float(record.get("time", self._time))
        if moment <= self._after:
            return True
        name = record["event"]
        if name == "run":
            if self._has_begun:
                return False
            self._has_begun = True
        self._time = moment
        if name == "step":
            stats = step_of_record(record)
            if stats is not None:
                self._sink.step(stats)
                self.num_steps = stats.step + 1
        else:
            self._sink.event(name, _with_floats(name, record))
        self.is_over |= name == "end"
        return not self._has_failed


def step_of_record(record: Mapping[str, Any]) -> StepStats | None:
    """Return the step of a record of `metrics.jsonl`; None if a field is missing."""
    values = _with_floats("step", record)
    if any(name not in values for name in _STEP_FIELDS):
        return None
    return StepStats(**{name: values[name] for name in _STEP_FIELDS})


def _with_floats(event: str, record: Mapping[str, Any]) -> dict[str, Any]:
    """Return the fields of an event without those of every record, with the numbers that JSON has not."""
    types = EVENT_SCHEMAS[event].fields if event in EVENT_SCHEMAS else {}
    return {
        name: _as_float(value) if types.get(name, "").startswith(("float", "table")) else value
        for name, value in record.items()
        if name not in COMMON_FIELDS or (name == "rank" and value)
    }


def _as_float(value: Any) -> Any:
    if type(value) is dict:
        return {name: _as_float(inside) for name, inside in value.items()}
    return float(value) if value in _NON_FINITE else value


def follow(job: SinkJob, ending: threading.Event, warn: WarnFunction = warn_on_stderr) -> None:
    """Write all sinks until the run has ended; warn about those that have not written everything.

    Args:
        ending: set from outside when no more records will be written.
    """
    site = SinkSite(**{**job.site, "run_dir": Path(job.site["run_dir"])}, warn=warn)
    followers = []
    for text in job.words:
        spec, argument = parse_word(SinkSpec, text)
        open_sink = partial(_open, spec, argument)
        followers.append(SinkFollower(spec.word, open_sink, site, job.start_bytes, ending))
    lock = os.open(site.run_dir / _LOCK, os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o666)
    has_started, expires = False, None
    while not has_started or any(follower.is_alive() for follower in followers):
        if os.getppid() != job.parent:
            ending.set()
        if expires is None and (ending.is_set() or any(follower.is_over for follower in followers)):
            expires = time.monotonic() + job.end_seconds
        if expires is not None and time.monotonic() > expires:
            break
        if not has_started and _take_lock(lock):
            has_started = True
            for follower in followers:
                follower.start()
        time.sleep(0.02 if ending.is_set() else 0.1)
    for follower in followers:
        if not follower.is_complete:
            place = "the start of its library" if follower.num_steps is None else f"step {follower.num_steps}"
            reason = f"it was still at {place} after {job.end_seconds:g} s"
            if not has_started:
                reason = "the process of an earlier start of the run was still writing"
            elif not follower.is_alive():
                reason = "its library has ended the thread"
            warn(
                f"the sink '{follower.word}' has not written everything: {reason};"
                " metrics.jsonl has all records"
            )


def _open(spec: SinkSpec, argument: object, site: SinkSite) -> Sink:
    sink: Sink = spec.load()(site, argument)
    return sink


def _take_lock(file: int) -> bool:
    """Try to lock the sinks, which the process of an earlier start of the run may still be writing."""
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError:  # the file system has no locks
        return True
    return True


def main() -> None:
    """Run the process with a `SinkJob` as its standard input."""
    ending = threading.Event()
    signal.signal(signal.SIGTERM, lambda *_: ending.set())
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, [signal.SIGTERM])
    follow(SinkJob(**json.load(sys.stdin)), ending)
    # Without the clean-up of libraries, which can wait for a server or for a thread that hangs.
    os._exit(0)


if __name__ == "__main__":
    main()
