"""Stop requests from signals to any rank, and from preemption notices of the machine.

The first signal (SIGTERM, SIGUSR1, SIGINT) is a request: the sync rule shares it with all ranks in the
next step, and all save the same step. A second signal at least `SAME_REQUEST_SECONDS` later ends the
process at once, also while it waits inside a collective. Batch systems signal the launcher and its
workers, so signals that arrive sooner count as the same request. Before the first step there is nothing to
save, and the first signal ends the process.

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
    """Flag of a request to stop this process; calling it returns whether there is one.

    Args:
        setting_up: no step has begun, so a request need not wait for one.
        has_launcher: the launcher prints that there was nothing to save.
    """

    requested: bool = False
    setting_up: bool = False
    has_launcher: bool = False
    _first_request_seconds: float = field(default=0.0, repr=False)

    def __call__(self) -> bool:
        return self.requested

    def request(self, now: float) -> bool:
        """Register a request; return False if it is a second one and the process must end at once."""
        if not self.requested:
            self.requested, self._first_request_seconds = True, now
        return now - self._first_request_seconds < SAME_REQUEST_SECONDS

    def leave_setup(self) -> None:
        """Raise a SetupStoppedError while there is nothing to save; called by signal handlers."""
        if self.setting_up:
            raise SetupStoppedError(NOTHING_TO_SAVE)


@contextmanager
def stop_on_signals(stop: StopRequest) -> Iterator[StopRequest]:
    """Turn signals into stop requests inside of the block; enter it in the main thread."""
    read_end, write_end = os.pipe()
    os.set_blocking(write_end, False)
    over = threading.Event()
    listener = threading.Thread(
        target=_read_signals, args=(read_end, stop, over), name="signals", daemon=True
    )
    before = {number: signal.signal(number, lambda *_: stop.leave_setup()) for number in SIGNALS}
    # The C handler writes to the pipe at once; a Python handler would wait until the main thread
    # leaves C code.
    woken = signal.set_wakeup_fd(write_end, warn_on_full_buffer=False)
    # A forked child inherits the wakeup file descriptor, and its signals would be written to the same
    # pipe.
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
    """Detach a forked child, such as a loader worker, so that its signals do not stop this process."""
    signal.set_wakeup_fd(-1)


def _read_signals(read_end: int, stop: StopRequest, over: threading.Event) -> None:
    """Read signal numbers, which Python writes to the pipe whatever the main thread is doing."""
    while numbers := os.read(read_end, 16):
        for number in numbers:
            if number in SIGNALS and not stop.request(time.monotonic()):
                # The main thread may be inside of a collective, where no exception
                # reaches it.
                os._exit(INTERRUPTED_EXIT_CODE)
            if number in SIGNALS and stop.setting_up:
                _end_setup(stop, over)


def _end_setup(stop: StopRequest, over: threading.Event) -> None:
    """Print that nothing is saved; exit if the main thread does not unwind, as inside a collective."""
    if not stop.has_launcher:
        sys.stderr.write(f"{NOTHING_TO_SAVE}\n")
        sys.stderr.flush()
    if not over.wait(SAME_REQUEST_SECONDS) and stop.setting_up:
        os._exit(SetupStoppedError.exit_code)


@contextmanager
def stop_on_notice(source: str | None, stop: StopRequest) -> Iterator[None]:
    """Check for a preemption notice every two seconds inside of the block; request a stop if there is one.

    Args:
        source: a file, or an http(s) URL that answers 200 once there is a notice (spot instances); None:
            no check.
    """
    if source is None:
        yield
        return
    over, has_notice = threading.Event(), _notice_check(source)

    def watch() -> None:
        while not over.wait(_NOTICE_SECONDS):
            if has_notice():
                stop.requested = True
                return

    watcher = threading.Thread(target=watch, name="notice", daemon=True)
    # A notice that is there already must not wait for the first interval.
    stop.requested = stop.requested or has_notice()
    watcher.start()
    try:
        yield
    finally:
        over.set()
        watcher.join()


def _notice_check(source: str) -> Callable[[], bool]:
    if source.startswith(("http://", "https://")):
        return _UrlNotice(source)
    return Path(source).exists


class _UrlNotice:
    """Check of a URL; a response that never completes blocks only one thread, and counts as no notice."""

    def __init__(self, url: str) -> None:
        self._url, self._responses = url, list[bool]()
        self._thread: threading.Thread | None = None

    def __call__(self) -> bool:
        if self._thread is None or not self._thread.is_alive():
            self._thread = threading.Thread(target=self._fetch, name="notice-question", daemon=True)
            self._thread.start()
        self._thread.join(2 * _NOTICE_SECONDS)
        return any(self._responses)

    def _fetch(self) -> None:
        try:
            with urllib.request.urlopen(self._url, timeout=_NOTICE_SECONDS) as response:
                self._responses.append(response.status == 200)
        except (OSError, ValueError, http.client.HTTPException):
            return  # 404, no server or no HTTP: no notice
