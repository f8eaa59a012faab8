"""A sink of your own that writes in a thread of the job, so that a slow library never makes a step longer.

The sinks of this package that need a library write in a process of their own, `paceline.watch.sink_process`.

Invariant: `step` and `event` put a record into a queue and return; they never wait, never raise and call no
code of the writer. The queue is bounded: when it is full, steps are left out and counted. `close` waits for
the thread, for at most a deadline.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping
from queue import SimpleQueue
from typing import Any

from paceline.errors import format_count
from paceline.observe.file_writing import WarnFunction, warn_on_stderr
from paceline.observe.sinks import GuardedSink, Sink
from paceline.observe.step_stats import StepStats

CAPACITY = 10_000
"""Records that wait for the thread; a step of ten scalars takes about 2 kB."""
FLUSH_SECONDS = 120.0
"""The longest time that the end of a run waits for the thread."""

_Work = Callable[[Sink], object]


class BackgroundSink:
    """A sink around a writer that is opened, called and closed in one thread of its own.

    The first error of the writer, also one while it is opened, is one warning; the writer is closed then and
    receives nothing more.

    Args:
        word: the word of the sink in `log.sinks`, for the warnings.
        open_writer: returns the writer; called in the thread, where it may import a slow library.
        events: the events that the writer receives; others are ignored.
        warn: receives the warnings; those of the writer come from the thread.
        capacity: records that may wait. Steps that find the queue full are left out; events, which are few,
            have as much room again.
        flush_seconds: the longest time that `close` waits.
    """

    def __init__(
        self,
        word: str,
        open_writer: Callable[[], Sink],
        *,
        events: tuple[str, ...] = ("run", "resume", "evaluation", "error", "end"),
        warn: WarnFunction = warn_on_stderr,
        capacity: int = CAPACITY,
        flush_seconds: float = FLUSH_SECONDS,
    ) -> None:
        self._word, self._events, self._warn = word, events, warn
        self._capacity, self._flush_seconds = capacity, flush_seconds
        self._queue: SimpleQueue[_Work | None] = SimpleQueue()
        self._left_out = 0
        self._is_closed = False
        # A daemon: a writer that hangs must not keep the process alive.
        self._thread = threading.Thread(
            target=_write_all, args=(self._queue, word, open_writer, warn), name=f"sink-{word}", daemon=True
        )
        self._thread.start()

    def step(self, stats: StepStats) -> None:
        """Queue one step, or leave it out if the queue is full."""
        self._put(lambda writer: writer.step(stats), self._capacity)

    def event(self, name: str, record: Mapping[str, Any]) -> None:
        """Queue one event that the writer receives."""
        if name in self._events:
            kept = dict(record)
            self._put(lambda writer: writer.event(name, kept), 2 * self._capacity)

    def close(self) -> None:
        """Wait until everything is written and the writer is closed, for at most `flush_seconds`."""
        if self._is_closed:
            return
        self._is_closed = True
        self._queue.put(None)
        self._thread.join(self._flush_seconds)
        lost = ""
        if self._thread.is_alive():
            lost = f"it was still writing after {self._flush_seconds:g} s"
        elif self._left_out:
            lost = f"it was too slow for {format_count(self._left_out, 'record')}"
        if lost:
            self._warn(
                f"the sink '{self._word}' has not written everything: {lost}; metrics.jsonl has all records"
            )

    def _put(self, work: _Work, limit: int) -> None:
        if self._is_closed:
            return
        if self._queue.qsize() >= limit:
            self._left_out += 1
        else:
            self._queue.put(work)


class UnopenedWriter:
    """A writer that is opened by its first call, so that an error while opening is one of the writer."""

    def __init__(self, open_writer: Callable[[], Sink]) -> None:
        self._open, self._writer = open_writer, None

    _writer: Sink | None

    def step(self, stats: StepStats) -> None:
        """Pass on one step."""
        self._opened().step(stats)

    def event(self, name: str, record: Mapping[str, Any]) -> None:
        """Pass on one event."""
        self._opened().event(name, record)

    def close(self) -> None:
        """Close the writer, if it was opened."""
        if self._writer is not None:
            self._writer.close()

    def _opened(self) -> Sink:
        if self._writer is None:
            self._writer = self._open()
        return self._writer


def _write_all(
    queue: SimpleQueue[_Work | None], word: str, open_writer: Callable[[], Sink], warn: WarnFunction
) -> None:
    """Pass everything in the queue on to a writer, until None is in it."""
    writer = GuardedSink(word, UnopenedWriter(open_writer), warn)
    while (work := queue.get()) is not None:
        work(writer)
    writer.close()
