"""The engine of alerts: takes the records of a run in order and says when a rule begins and ceases to hold.

Invariant: the same records give the same alerts. Time is that of the records; only absence needs the time of
a reader. A series of a rule is pending while the rule is met for too short a time, then it fires once, and it
is resolved once, after some records in which the rule is not met.

Delivery to a webhook or a command never waits. A target that hangs is given up after a timeout, and holds up
neither the reader of the run nor the other target; what does not fit into its queue is reported as lost.
"""

from __future__ import annotations

import json
import math
import os
import queue
import shutil
import signal
import socket
import subprocess
import threading
import time
import urllib.error
import urllib.request
from bisect import bisect_left, insort
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from http.client import HTTPException
from pathlib import Path
from typing import Any, Literal, NamedTuple, Protocol

from paceline.report.number_format import format_duration, format_number, format_percent
from paceline.watch.alert_rules import NORMAL_IQR, SHIPPED_RULES, AlertRule, Selector
from paceline.watch.metric_values import values_in

AlertState = Literal["pending", "firing", "resolved"]
_RESOLVE_RECORDS = 5  # in a row: one that is barely beyond the limit would fire again and again
_MAX_SERIES = 2000  # a task with thousands of metrics would fill the memory
_MAX_CHANGES, _MAX_HISTORY = 1000, 200
_SAMPLES = ("process", "system")  # records that the job itself does not write


class Alert(NamedTuple):
    """A change of a series of a rule.

    Args:
        rule: the rule.
        labels: labels of the series that the rule does not fix.
        state: pending, firing or resolved.
        step, time: of the record with which this state began; -1 before the first step.
        score: what was compared with the limit, see `AlertRule.kind`.
    """

    rule: AlertRule
    labels: Mapping[str, str]
    state: AlertState
    step: int
    time: float
    score: float

    def record(self) -> dict[str, Any]:
        """Return the alert as plain values for JSON; a score that is not finite is a string."""
        rule = self.rule
        return {
            "alert": rule.name,
            "state": self.state,
            "severity": rule.severity,
            "labels": dict(self.labels),
            "step": self.step,
            "time": self.time,
            "score": self.score if math.isfinite(self.score) else str(self.score),
            "limit": rule.limit,
            "text": self.text,
            "advice": rule.advice,
        }

    @property
    def text(self) -> str:
        """One sentence without a full stop: what it means, where, and the numbers."""
        where = "".join(f", {name} {value}" for name, value in self.labels.items())
        return f"{self.rule.summary or self.rule.name}{where} ({_describe_score(self.rule, self.score)})"


def _describe_score(rule: AlertRule, score: float) -> str:
    limit = f"the limit is {rule.limit:g}"
    match rule.kind:
        case "z-score":
            if not math.isfinite(score):
                return "not finite"
            return f"{format_number(score, 3)} standard deviations from the median of {rule.window}; {limit}"
        case "plateau":
            return f"{format_percent(max(0.0, score))} lower than {rule.window} steps before; {limit}"
        case "absence":
            return f"silent for {format_duration(score)}"
        case "rate":
            return f"{format_number(score)} a second; {limit}"
        case _:
            return f"{format_number(score)}; {limit}"


class AlertEngine:
    """Judges the records of one run.

    Args:
        rules: what is judged.
    """

    def __init__(self, rules: Sequence[AlertRule] = SHIPPED_RULES) -> None:
        self._rules_by_event: dict[str, list[AlertRule]] = {}
        for rule in rules:
            self._rules_by_event.setdefault(rule.signal.spec.event, []).append(rule)
        self._absence = [rule for rule in rules if rule.kind == "absence"]
        self._series: dict[tuple[str, tuple[Any, ...]], _Series] = {}
        self._seen: dict[str, float] = {}  # time of the newest record by event; "" of any
        self._changes: deque[Alert] = deque(maxlen=_MAX_CHANGES)
        self._history: deque[Alert] = deque(maxlen=_MAX_HISTORY)
        self._step, self._time = -1, 0.0
        self._rates: list[tuple[_Series, _Rate]] = []
        self._step_times: deque[float] = deque(
            maxlen=max((rule.window for rule in rules if rule.kind == "rate"), default=1)
        )

    def take(self, records: Iterable[Mapping[str, Any]]) -> None:
        """Judge records, in the order in which they were written."""
        for record in records:
            event = record["event"]
            if event not in _SAMPLES:  # which do not show that the job goes on, and may be of another clock
                moment = record.get("time", self._time)
                self._time = moment if event == "run" else max(self._time, moment)
                self._seen[""] = self._time
                self._end_silence(event)
            self._seen[event] = self._time
            if event == "step":
                self._step = record["step"]
            elif event in ("run", "end"):
                # A new start has new hosts, shares and compilation: nothing before says what is usual now.
                self._end_all()
            for rule in self._rules_by_event.get(event, ()):
                if rule.kind != "absence":
                    self._judge(rule, record)
            if event == "step":
                self._judge_rates()

    def check(self, now: float) -> None:
        """Judge absence; not to be called for a run that has ended.

        Args:
            now: seconds since the epoch by the clock of the records.
        """
        for rule in self._absence:
            last = self._seen.get(rule.signal.spec.event)
            if last is not None:
                series = self._series_of(rule, (), {})
                seconds = now - last
                self._note(series.update(seconds, rule.is_met(seconds), self._step, now))

    def drain(self) -> list[Alert]:
        """Return what began to fire or was resolved since the last call, at most 1,000 changes."""
        changes = list(self._changes)
        self._changes.clear()
        return changes

    @property
    def history(self) -> list[Alert]:
        """The last 200 changes: what began to fire or was resolved, oldest first."""
        return list(self._history)

    @property
    def firing(self) -> list[Alert]:
        """The alerts that fire now, critical ones first."""
        found = [series.alert("firing") for series in self._series.values() if series.state == "firing"]
        return sorted(found, key=lambda alert: (alert.rule.severity != "critical", alert.time))

    @property
    def pending(self) -> list[Alert]:
        """The alerts whose rule has been met for too short a time to fire."""
        return [series.alert("pending") for series in self._series.values() if series.state == "pending"]

    def _judge(self, rule: AlertRule, record: Mapping[str, Any]) -> None:
        divisors = dict(_selected(rule.per, record)) if rule.per is not None else {}
        for labels, value in _selected(rule.signal, record):
            key = tuple(labels)
            if rule.per is not None:
                divisor = divisors.get(labels, divisors.get((), 0.0))
                if divisor == 0:
                    continue
                value /= divisor
            series = self._series.get((rule.name, key)) or self._series_of(rule, key, dict(labels))
            if series.detector is None:
                continue
            score = series.detector.score(value, self._time)
            if score is not None:
                self._note(series.update(score, rule.is_met(score), self._step, self._time))

    def _series_of(self, rule: AlertRule, key: tuple[Any, ...], labels: Mapping[str, str]) -> _Series:
        series = self._series.get((rule.name, key))
        if series is None:
            series = _Series(rule, labels, self._step_times)
            if isinstance(series.detector, _Rate):
                self._rates.append((series, series.detector))
            if len(self._series) < _MAX_SERIES:
                self._series[rule.name, key] = series
        return series

    def _end_silence(self, event: str) -> None:
        for rule in self._absence:
            is_seen = rule.signal.spec.event in ("", event)
            if is_seen and (series := self._series.get((rule.name, ()))) is not None:
                self._note(series.update(series.score, False, self._step, self._time, at_once=True))

    def _judge_rates(self) -> None:
        """Judge the changes per second: also of what has no record of its own in this step."""
        self._step_times.append(self._time)
        for series, rate in self._rates:
            score = rate.end_step(self._time)
            if score is not None:
                self._note(series.update(score, series.rule.is_met(score), self._step, self._time))

    def _note(self, alert: Alert | None) -> None:
        if alert is not None:
            self._changes.append(alert)
            self._history.append(alert)

    def _end_all(self) -> None:
        for series in self._series.values():
            self._note(series.update(series.score, False, self._step, self._time, at_once=True))
        self._series.clear()
        self._rates.clear()
        self._step_times.clear()


def _selected(
    selector: Selector, record: Mapping[str, Any]
) -> list[tuple[tuple[tuple[str, str], ...], float]]:
    """Return the values of a record that a selector takes, by the labels that it does not fix."""
    spec, where = selector.spec, selector.where
    if spec.field and spec.labels == tuple(where) and spec.labels not in (("rank",), ("host",)):
        # One number of each step: reading a run should not take much longer for its alerts.
        value: Any = record.get(spec.field)
        for key in where.values():
            value = value.get(key) if isinstance(value, Mapping) else None
        with suppress(TypeError, ValueError):
            return [((), float(value))]
        return []
    found = []
    for labels, value in values_in(spec, record):
        named = dict(zip(spec.labels, labels, strict=True))
        if all(named[name] == wanted for name, wanted in where.items()):
            found.append((tuple(item for item in named.items() if item[0] not in where), value))
    return found


class _Series:
    """The state of a rule for one combination of labels."""

    def __init__(self, rule: AlertRule, labels: Mapping[str, str], step_times: Iterable[float]) -> None:
        self.rule, self.labels = rule, labels
        builder = _DETECTORS.get(rule.kind)
        self.detector: _Detector | None = None if builder is None else builder(rule, step_times)
        self.state: Literal["", "pending", "firing"] = ""
        self.score = 0.0
        self._since: tuple[int, float] = (0, 0.0)
        self._num_calm = 0

    def alert(self, state: AlertState, step: int | None = None, time: float | None = None) -> Alert:
        since_step, since_time = self._since
        shown = since_step if step is None else step, since_time if time is None else time
        return Alert(self.rule, self.labels, state, *shown, self.score)

    def update(
        self, score: float, is_met: bool, step: int, time: float, *, at_once: bool = False
    ) -> Alert | None:
        """Take a score into account; return the change, if it begins to fire or is resolved."""
        if not is_met:
            self._num_calm += 1
            if self.state == "firing" and not at_once and self._num_calm < _RESOLVE_RECORDS:
                return None
            was_firing, self.state = self.state == "firing", ""
            return self.alert("resolved", step, time) if was_firing else None
        self.score, self._num_calm = score, 0
        if not self.state:
            self.state, self._since = "pending", (step, time)
        held_steps, held_seconds = step - self._since[0] + 1, time - self._since[1]
        if self.state == "firing" or held_steps < self.rule.for_steps or held_seconds < self.rule.for_seconds:
            return None
        self.state = "firing"
        return self.alert("firing", step, time)


class _Detector(Protocol):
    def score(self, value: float, time: float) -> float | None:
        """Return what is compared with the limit; None while that is not known."""


class _Value:
    def __init__(self, rule: AlertRule, step_times: Iterable[float]) -> None:
        pass

    def score(self, value: float, time: float) -> float | None:
        return value


class _Rate:
    """Change per second over the last steps; a counter is the sum of its records, 0 before the first one."""

    def __init__(self, rule: AlertRule, step_times: Iterable[float]) -> None:
        self._window, self._is_counter = rule.window, rule.signal.spec.kind == "counter"
        self._total = 0.0
        earlier = ((time, 0.0) for time in step_times) if self._is_counter else ()
        self._points: deque[tuple[float, float]] = deque(earlier, maxlen=rule.window)

    def score(self, value: float, time: float) -> float | None:
        self._total = self._total + value if self._is_counter else value
        return None

    def end_step(self, time: float) -> float | None:
        self._points.append((time, self._total))
        first_time, first = self._points[0]
        if len(self._points) < self._window or time <= first_time:
            return None
        return (self._total - first) / (time - first_time)


class _ZScore:
    """Distance from the median; values beyond the limit are no part of what is usual."""

    def __init__(self, rule: AlertRule, step_times: Iterable[float]) -> None:
        self._rule, self._usual = rule, _RollingQuantiles(rule.window)

    def score(self, value: float, time: float) -> float | None:
        if not math.isfinite(value):
            return math.inf if self._rule.direction == "above" else -math.inf
        if not self._usual.is_full:
            self._usual.push(value)
            return None
        low, middle, high = (self._usual.quantile(q) for q in (0.25, 0.5, 0.75))
        spread = (high - low) / NORMAL_IQR + self._rule.floor * abs(middle)
        distance = value - middle
        score = distance / spread if spread > 0 else math.copysign(math.inf, distance) if distance else 0.0
        if not self._rule.is_met(score):
            self._usual.push(value)
        return score


class _Plateau:
    """Relative decrease between two blocks of steps; medians, so that a spike does not count."""

    def __init__(self, rule: AlertRule, step_times: Iterable[float]) -> None:
        size = rule.window // 8
        self._recent, self._before = _RollingQuantiles(size), _RollingQuantiles(size)
        self._between: deque[float] = deque()
        self._num_between = rule.window - 2 * size

    def score(self, value: float, time: float) -> float | None:
        if not math.isfinite(value):
            return None
        left = self._recent.push(value)
        if left is not None:
            self._between.append(left)
        if len(self._between) > self._num_between:
            self._before.push(self._between.popleft())
        before = self._before.quantile(0.5) if self._before.is_full else 0.0
        return (before - self._recent.quantile(0.5)) / abs(before) if before else None


_DETECTORS: Mapping[str, Callable[[AlertRule, Iterable[float]], _Detector]] = {
    "threshold": _Value,
    "rate": _Rate,
    "z-score": _ZScore,
    "plateau": _Plateau,
}


class _RollingQuantiles:
    """The last values in order, so that a quantile costs nothing."""

    def __init__(self, size: int) -> None:
        self._size = size
        self._values: deque[float] = deque()
        self._sorted: list[float] = []

    @property
    def is_full(self) -> bool:
        return len(self._values) == self._size

    def push(self, value: float) -> float | None:
        """Add a value; return the oldest one if it had to leave."""
        left = None
        if self.is_full:
            left = self._values.popleft()
            del self._sorted[bisect_left(self._sorted, left)]
        self._values.append(value)
        insort(self._sorted, value)
        return left

    def quantile(self, q: float) -> float:
        """Return a quantile, interpolated as `quantile_over_time` of Prometheus does."""
        position = q * (len(self._sorted) - 1)
        below = math.floor(position)
        above = min(below + 1, len(self._sorted) - 1)
        return self._sorted[below] + (position - below) * (self._sorted[above] - self._sorted[below])


def read_host(folder: Path, *, with_memory: bool) -> dict[str, Any]:
    """Return a `system` record of this host, as far as rules need one, for runs without a system sampler.

    Args:
        folder: the run folder, whose disk is looked at.
        with_memory: the run is on this host, so its memory counts.
    """
    record: dict[str, Any] = {"event": "system", "host": socket.gethostname(), "time": time.time()}
    with suppress(OSError):
        usage = shutil.disk_usage(folder)
        record["folder_bytes"] = {"total": usage.total, "free": usage.free}
    if with_memory:
        with suppress(OSError, ValueError, KeyError):
            lines = Path("/proc/meminfo").read_text("ascii").splitlines()
            kib = {name: int(text.split()[0]) for name, _, text in (line.partition(":") for line in lines)}
            record["memory_bytes"] = {
                "total": 1024 * kib["MemTotal"],
                "available": 1024 * kib["MemAvailable"],
            }
            record["cores"] = os.cpu_count() or 1
    return record


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
