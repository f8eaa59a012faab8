"""Asked to stop: by a signal to any rank, or by a notice that the machine will be taken away.

The first signal (SIGTERM, SIGUSR1, SIGINT) asks; the rule tells all ranks in the step that follows, and
all save the same step. A second one, `SAME_REQUEST_SECONDS` later or more, ends the process at once, also
while it waits inside a collective. Batch systems signal the launcher and its workers: what comes sooner is
the same one. Before the first step there is nothing to save, and the first signal ends the process.

Invariant: signals are received by a thread, and the main thread only reads a flag between two steps.
"""

from __future__ import annotations

import http.client
import os
import signal
import sys
import threading
import time
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

from paceline.errors import SetupStoppedError
from paceline.job.launcher_reports import NOTHING_TO_SAVE

SIGNALS = (signal.SIGTERM, signal.SIGUSR1, signal.SIGINT)
SAME_REQUEST_SECONDS = 1.0
INTERRUPTED_EXIT_CODE = 130
_NOTICE_SECONDS = 2.0


@dataclass
class StopRequest:
    """Whether this process was asked to stop; call it to know.

    Args:
        setting_up: no step has begun, so a request need not wait for one.
        has_launcher: it tells the user that there was nothing to save.
    """

    requested: bool = False
    setting_up: bool = False
    has_launcher: bool = False
    _first_request_seconds: float = field(default=0.0, repr=False)

    def __call__(self) -> bool:
        return self.requested

    def ask(self, now: float) -> bool:
        """Take a request; False if it is a second one, and the process must end at once."""
        if not self.requested:
            self.requested, self._first_request_seconds = True, now
        return now - self._first_request_seconds < SAME_REQUEST_SECONDS

    def leave_setup(self) -> None:
        """Called in the main thread by a signal: unwind, if there is nothing to save.

        Raises:
            SetupStoppedError: there is nothing to save.
        """
        if self.setting_up:
            raise SetupStoppedError(NOTHING_TO_SAVE)


@contextmanager
def stop_on_signals(stop: StopRequest) -> Iterator[StopRequest]:
    """Turn signals into requests, in the main thread."""
    read_end, write_end = os.pipe()
    os.set_blocking(write_end, False)
    over = threading.Event()
    listener = threading.Thread(
        target=_read_signals, args=(read_end, stop, over), name="signals", daemon=True
    )
    before = {number: signal.signal(number, lambda *_: stop.leave_setup()) for number in SIGNALS}
    woken = signal.set_wakeup_fd(write_end, warn_on_full_buffer=False)
    os.register_at_fork(after_in_child=lambda: None if over.is_set() else _detach_signals_in_child())
    listener.start()
    try:
        yield stop
    finally:
        over.set()
        signal.set_wakeup_fd(woken)
        for number, handler in before.items():
            signal.signal(number, handler)
        os.close(write_end)
        listener.join()
        os.close(read_end)


def _detach_signals_in_child() -> None:
    """In a child, such as a loader worker: what is sent to it asks nobody else to stop."""
    signal.set_wakeup_fd(-1)


def _read_signals(read_end: int, stop: StopRequest, over: threading.Event) -> None:
    """The system writes the number of every signal to the pipe, whatever the main thread is doing."""
    while numbers := os.read(read_end, 16):
        for number in numbers:
            if number in SIGNALS and not stop.ask(time.monotonic()):
                os._exit(INTERRUPTED_EXIT_CODE)
            if number in SIGNALS and stop.setting_up:
                _end_setup(stop, over)


def _end_setup(stop: StopRequest, over: threading.Event) -> None:
    """Say so, and give the main thread a moment to unwind: it cannot while it waits inside a collective."""
    if not stop.has_launcher:
        sys.stderr.write(f"{NOTHING_TO_SAVE}\n")
        sys.stderr.flush()
    if not over.wait(SAME_REQUEST_SECONDS) and stop.setting_up:
        os._exit(SetupStoppedError.exit_code)


@contextmanager
def stop_on_notice(where: str | None, stop: StopRequest) -> Iterator[None]:
    """Look for a notice every two seconds, and ask when it is there.

    Args:
        where: a file, or an http(s) URL that answers 200 once there is a notice (spot instances); None: none.
    """
    if where is None:
        yield
        return
    over, found = threading.Event(), _notice_check(where)

    def watch() -> None:
        while not over.wait(_NOTICE_SECONDS):
            if found():
                stop.requested = True
                return

    watcher = threading.Thread(target=watch, name="notice", daemon=True)
    stop.requested = stop.requested or found()
    watcher.start()
    try:
        yield
    finally:
        over.set()
        watcher.join()


def _notice_check(where: str) -> Callable[[], bool]:
    if not where.startswith(("http://", "https://")):
        return Path(where).exists

    return _UrlNotice(where)


class _UrlNotice:
    """Asks a URL. An answer that trickles in for ever is waited for once, in a thread, and is no notice."""

    def __init__(self, url: str) -> None:
        self._url, self._answers = url, list[bool]()
        self._asking: threading.Thread | None = None

    def __call__(self) -> bool:
        if self._asking is None or not self._asking.is_alive():
            self._asking = threading.Thread(target=self._ask, name="notice-question", daemon=True)
            self._asking.start()
        self._asking.join(2 * _NOTICE_SECONDS)
        return any(self._answers)

    def _ask(self) -> None:
        try:
            with urllib.request.urlopen(self._url, timeout=_NOTICE_SECONDS) as answer:
                self._answers.append(answer.status == 200)
        except (OSError, ValueError, http.client.HTTPException):
            return  # 404, nobody there, or no HTTP: no notice
