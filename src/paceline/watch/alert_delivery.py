"""Delivery of alerts to a webhook or a command, each from a thread of its own.

Invariant: sending never waits. A target that hangs is given up after a timeout, and holds up neither the
reader of the run nor the other target; what does not fit into its queue is reported as lost.
"""

from __future__ import annotations

import json
import os
import queue
import signal
import subprocess
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from http.client import HTTPException
from typing import Any

_QUEUE_SIZE = 100
_CHUNK_SECONDS = 0.1


class DeliveryFailedError(Exception):
    """An alert that a target did not take; says why."""


class AlertTarget:
    """A thread that passes alerts to a function, one after another.

    Args:
        name: for messages.
        deliver: raises `DeliveryFailedError` if it fails; returns within a bounded time.
        report: receives a sentence about each alert that was not delivered; called from the thread.
        retries: further attempts after one that failed.
        pause_seconds: before the first further attempt; each later pause is twice as long.
    """

    def __init__(
        self,
        name: str,
        deliver: Callable[[Mapping[str, Any]], None],
        report: Callable[[str], None],
        *,
        retries: int = 2,
        pause_seconds: float = 1.0,
    ) -> None:
        self._name, self._deliver, self._report = name, deliver, report
        self._retries, self._pause_seconds = retries, pause_seconds
        self._queue: queue.Queue[Mapping[str, Any] | None] = queue.Queue(_QUEUE_SIZE)
        self._closed = threading.Event()
        self._thread = threading.Thread(target=self._run, name=f"alerts to {name}", daemon=True)
        self._thread.start()

    def send(self, record: Mapping[str, Any]) -> None:
        """Deliver an alert soon; one that does not fit into the queue is reported as lost."""
        try:
            self._queue.put_nowait(record)
        except queue.Full:
            self._report(f"an alert to {self._name} is lost: {_QUEUE_SIZE} others wait for delivery")

    def close(self, seconds: float) -> None:
        """Wait for what is in the queue, at most `seconds`, and report what is left."""
        expires = time.monotonic() + seconds
        with suppress(queue.Full):
            self._queue.put(None, timeout=seconds)
        self._thread.join(max(0.0, expires - time.monotonic()))
        if self._thread.is_alive():
            self._closed.set()  # no further attempts
            self._thread.join(_CHUNK_SECONDS)
            if self._thread.is_alive():
                self._report(f"{self._name} has not answered; alerts may not have been delivered")

    def _run(self) -> None:
        while not self._closed.is_set():
            record = self._queue.get()
            if record is None:
                return
            pause = self._pause_seconds
            for attempt in range(self._retries + 1):
                try:
                    self._deliver(record)
                    break
                except DeliveryFailedError as error:
                    if attempt == self._retries or self._closed.wait(pause):
                        self._report(
                            f"the alert {record.get('alert')} was not delivered to {self._name}: {error}"
                        )
                        break
                    pause *= 2


def webhook(url: str, timeout_seconds: float = 10.0) -> Callable[[Mapping[str, Any]], None]:
    """Return a function that posts an alert as JSON.

    Args:
        url: begins with http:// or https://.
        timeout_seconds: for each wait for the server.
    """

    def deliver(record: Mapping[str, Any]) -> None:
        body = json.dumps(record).encode()
        headers = {"Content-Type": "application/json", "User-Agent": "paceline-alerts"}
        request = urllib.request.Request(url, data=body, headers=headers, method="POST")
        try:
            # The body of the answer is not read: a server could go on with it forever.
            urllib.request.urlopen(request, timeout=timeout_seconds).close()
        except urllib.error.HTTPError as error:
            error.close()
            raise DeliveryFailedError(f"status {error.code}") from None
        except (OSError, HTTPException, ValueError) as error:
            raise DeliveryFailedError(str(error) or type(error).__name__) from None

    return deliver


def command(words: Sequence[str], timeout_seconds: float = 30.0) -> Callable[[Mapping[str, Any]], None]:
    """Return a function that runs a command for an alert, with the JSON on its standard input.

    Args:
        words: program and arguments; no shell is involved.
        timeout_seconds: after it, the command and all that it has started are killed.
    """

    def deliver(record: Mapping[str, Any]) -> None:
        try:
            process = subprocess.Popen(
                list(words),
                stdin=subprocess.PIPE,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
                start_new_session=True,
            )
        except OSError as error:
            raise DeliveryFailedError(str(error)) from None
        try:
            process.communicate((json.dumps(record) + "\n").encode(), timeout=timeout_seconds)
        except subprocess.TimeoutExpired:
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
            raise DeliveryFailedError(f"it ran longer than {timeout_seconds:g} s") from None
        if process.returncode != 0:
            raise DeliveryFailedError(f"exit code {process.returncode}")

    return deliver
