"""All runs that a page shows: found in folders, read in one thread, with a version for those who wait.

Invariant: one thread reads all runs, whatever the number of readers of a page, so watching costs the same for
one and for a thousand. It makes way for requests, so that an answer does not wait while a long run is read.
"""

from __future__ import annotations

import hashlib
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from paceline.errors import DataError
from paceline.report.run_files import find_runs, is_run_folder
from paceline.watch.curves import NO_POINTS, CurvePoints, RunCurves
from paceline.watch.run_watch import RunWatch

_POLL_SECONDS = 0.4
_FIND_SECONDS = 2.0
_TURN_BYTES = 2**17  # of one run before another has its turn, or a request: some tens of milliseconds
_MAKE_WAY_SECONDS = 0.3  # for requests, each time that all runs are read
_MAKE_WAY_OF_HISTORY_SECONDS = 2.0  # the same while there is much to read, which may take longer
_MAX_PREVIEWS = 1000


class RunCollection:
    """The runs in some folders, kept up to date by a thread between `start` and `close`.

    Args:
        folders: run folders, or folders that contain some; they are searched again every two seconds.
    """

    def __init__(self, folders: Sequence[Path]) -> None:
        self._folders = folders
        self._runs: dict[str, RunWatch] = {}
        self._previews: dict[tuple[str, int, int, int | None, int], RunCurves] = {}
        self._lock = threading.RLock()
        self._requests: set[object] = set()  # those that are answered now
        self._has_more = True
        self._closed = threading.Event()
        self._thread = threading.Thread(target=self._follow, name="run-collection", daemon=True)
        self._listeners: list[Callable[[], None]] = []
        self.version = 0

    def start(self) -> None:
        """Find the runs, read what is quick to read, and begin to follow them."""
        self._find()
        self._thread.start()

    def read_all(self) -> None:
        """Find the runs and read all that is new, on this thread; instead of `start`."""
        self._find()
        while self._update_all():
            pass

    def close(self) -> None:
        """End the thread."""
        self._closed.set()
        if self._thread.is_alive():
            self._thread.join(10)

    def call_on_change(self, listener: Callable[[], None]) -> None:
        """Call a function, on the reading thread, after each change of any run."""
        self._listeners.append(listener)

    def summaries(self) -> list[Mapping[str, Any]]:
        """Return the state of each run, newest first, without its events."""
        with self._request():
            return [{"id": key, **run.state()} for key, run in reversed(self._runs.items())]

    def state(self, key: str) -> Mapping[str, Any] | None:
        """Return the state and details of a run; None if there is none of this id."""
        with self._request():
            run = self._runs.get(key)
            return None if run is None else {"id": key, **run.details()}

    def events(self, key: str, after: int, limit: int = 1000) -> list[Mapping[str, Any]]:
        """Return events of a run whose number is larger than `after`, the newest `limit` of them."""
        with self._request():
            run = self._runs.get(key)
            events = [] if run is None else [(n, event) for n, event in run.events if n > after]
        return [{"number": number, **event} for number, event in events[-limit:]]

    def points(
        self, keys: Sequence[str], names: Sequence[str], first: int, end: int | None, max_points: int
    ) -> list[tuple[str, str, CurvePoints]]:
        """Return a part of each curve of each run: key, name and points.

        They come from a sample of the files while a run has not been read to its end, and where its rows have
        been joined, but a part of it is looked at so closely that single steps can be seen.
        """
        with self._request():
            return [
                (key, name, self._points(key, name, first, end, max_points)) for key in keys for name in names
            ]

    def _points(self, key: str, name: str, first: int, end: int | None, max_points: int) -> CurvePoints:
        run = self._runs.get(key)
        if run is None:
            return NO_POINTS
        curves = run.curves
        if curves.is_sampled(name):
            return curves.points(name, first, end, max_points)
        if run.is_complete:
            found = curves.points(name, first, end, max_points)
            is_coarse = curves.stride > 1 and len(found.steps) <= max_points // 2
            if not is_coarse or curves.has_repeated_steps or name.startswith("evaluation."):
                return found
        # All steps of a part that is so small, else a sample.
        preview_key = (key, run.version if run.is_complete else -1, first, end, max_points)
        if preview_key not in self._previews:
            if len(self._previews) >= _MAX_PREVIEWS:
                self._previews.clear()
            self._previews[preview_key] = run.preview(first, end, max_points)
        return self._previews[preview_key].points(name, first, end, max_points)

    @contextmanager
    def _request(self) -> Iterator[None]:
        mark = object()
        self._requests.add(mark)
        try:
            with self._lock:
                yield
        finally:
            self._requests.discard(mark)

    def _follow(self) -> None:
        next_find = time.monotonic() + _FIND_SECONDS
        while not self._closed.is_set():
            if time.monotonic() >= next_find:
                self._find()
                next_find = time.monotonic() + _FIND_SECONDS
            has_more = self._update_all()
            # Reading a long run goes on without a pause, but leaves the lock to those who wait.
            self._closed.wait(0.001 if has_more else _POLL_SECONDS)

    def _update_all(self) -> bool:
        has_more = has_changed = False
        is_history = self._has_more
        expires = time.monotonic() + (_MAKE_WAY_OF_HISTORY_SECONDS if is_history else _MAKE_WAY_SECONDS)
        for key, run in list(self._runs.items()):
            self._make_way(expires)
            with self._lock:
                was_complete = run.is_complete
                has_changed |= run.update(_TURN_BYTES)
                has_more |= not run.is_complete
                if run.is_complete and not was_complete:
                    self._previews = {k: curves for k, curves in self._previews.items() if k[0] != key}
            if self._closed.is_set():
                return False
        if has_changed:
            self._notify()
        self._has_more = has_more
        return has_more

    def _make_way(self, expires: float) -> None:
        while self._requests and time.monotonic() < expires:
            self._closed.wait(0.001)

    def _find(self) -> None:
        found: list[Path] = []
        for folder in self._folders:
            with suppress(DataError, OSError):  # a folder that is not there yet has no runs
                found += [folder] if is_run_folder(folder) else find_runs([folder])
        keys = {_key_of(path): path for path in found}
        with self._lock:
            new = {key: path for key, path in keys.items() if key not in self._runs}
            gone = self._runs.keys() - keys.keys()
            self._runs |= {key: RunWatch(path) for key, path in new.items()}
            for key in gone:
                del self._runs[key]
        if new or gone:
            self._notify()

    def _notify(self) -> None:
        self.version += 1
        for listener in self._listeners:
            listener()


def _key_of(folder: Path) -> str:
    """Return an id of a run folder, which a URL can have."""
    return hashlib.sha256(str(folder.resolve()).encode()).hexdigest()[:12]
