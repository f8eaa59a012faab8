"""A run as it is now, from its folder: curves, metrics, ranks, events and whether its process lives."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from paceline.observe.rank_activity import RankOperation, read_operations
from paceline.observe.sinks import system_files
from paceline.report.rank_balance import rank_times_of_records
from paceline.report.run_files import CERTIFICATE, is_run_folder
from paceline.report.run_reader import is_run_alive, read_certificate
from paceline.watch.alert_rules import SHIPPED_RULES, AlertRule
from paceline.watch.alerts import AlertEngine, read_host
from paceline.watch.curves import RunCurves, rank_cpu_cores
from paceline.watch.metric_values import MetricValues
from paceline.watch.run_tail import RunTail, preview_records

_MAX_EVENTS = 5000
_ROWS = ("step", "ranks", "process", "system")
_MIN_SAMPLES, _MAX_SAMPLES = 60, 400  # of a preview
_MAX_CHECKPOINTS = 50
_MAX_RANKS = 1024  # whose problems are listed
_SILENT_SECONDS, _SILENT_STEPS = 30.0, 20
_CHECK_SECONDS = 1.0
_CHECK_HOST_SECONDS = 5.0


class RunWatch:
    """A run that is read again and again; `update` takes what was written since the last call.

    Args:
        folder: the run folder.
        rules: of alerts.

    Attributes:
        curves, values, alerts: from all records read so far.
        events: the newest records that are no rows, each with a number that only rises.
        ranks: the newest window of each rank.
        operations: what each rank does now, of a run that goes on.
        processes, hosts: the newest sample of each rank and of each host, if the run has a system sampler.
        version: rises with every change.
    """

    def __init__(self, folder: Path, rules: Sequence[AlertRule] = SHIPPED_RULES) -> None:
        self.folder, self._rules = folder, rules
        self.version = 0
        self._reset()
        self._alive: bool | None = None
        self._alive_checked = self._samples_checked = self._host_checked = -_CHECK_HOST_SECONDS
        self._operations_checked = -_CHECK_SECONDS
        self.operations: list[RankOperation] = []
        self._heard = time.monotonic()  # when something new was read

    def _reset(self) -> None:
        self._tail = RunTail(self.folder)
        self._sample_tails: dict[str, RunTail] = {}
        self.curves, self.values = RunCurves(), MetricValues()
        self.alerts = AlertEngine(self._rules)
        self.events: deque[tuple[int, Mapping[str, Any]]] = deque(maxlen=_MAX_EVENTS)
        self.ranks: dict[int, Mapping[str, Any]] = {}
        self.processes: dict[int, Mapping[str, Any]] = {}
        self.hosts: dict[str, Mapping[str, Any]] = {}
        self._checkpoints: deque[Mapping[str, Any]] = deque(maxlen=_MAX_CHECKPOINTS)
        self._lost: dict[int, str] = {}  # what happened to ranks since the last start
        self._sampler_of_rank: dict[int, str] = {}  # the file that has its samples
        self._newest_samples: dict[str, Mapping[str, Any]] = {}  # of hosts, by file
        self._num_events = 0
        self._has_begun = self._has_sampler = False
        self._start: Mapping[str, Any] = {}
        self._end: Mapping[str, Any] | None = None
        self._error: Mapping[str, Any] | None = None
        self._last_step: Mapping[str, Any] = {}
        self._last_time = 0.0

    def update(self, max_bytes: int = 2**22) -> bool:
        """Read what is new, up to about `max_bytes`; return whether anything changed."""
        records, samples = self._tail.read(max_bytes), self._read_samples(max_bytes)
        if any(tail.num_restarts for tail in self._tails):
            self._reset()
            records, samples = self._tail.read(max_bytes), self._read_samples(max_bytes)
        before, self._has_begun = self.status, True
        self.curves.add(records)
        self.values.add([*records, *samples])
        self.alerts.take([*records, *samples])
        self.curves.add(samples)
        for record in (*records, *samples):
            self._note(record)
        if records:  # a sample does not show that the job goes on
            self._last_time = max(self._last_time, float(records[-1].get("time", 0.0)))
            self._heard = time.monotonic()
        self._check_process()
        num_firing = len(self.alerts.firing)
        self._check_alerts()
        changed = bool(records or samples) or self.status != before or len(self.alerts.firing) != num_firing
        changed |= self._check_operations()
        self.version += changed
        return changed

    @property
    def _tails(self) -> list[RunTail]:
        return [self._tail, *self._sample_tails.values()]

    def _read_samples(self, max_bytes: int) -> list[Mapping[str, Any]]:
        """Read what the system samplers have written, one on each host; they begin after the run."""
        now = time.monotonic()
        if now - self._samples_checked >= _CHECK_SECONDS or not self._has_begun:
            self._samples_checked = now
            for name in system_files(self.folder):
                self._sample_tails.setdefault(name, RunTail(self.folder, name))
        samples = []
        for name, tail in self._sample_tails.items():
            for record in tail.read(max_bytes):
                if record["event"] == "process":
                    self._sampler_of_rank[record.get("rank", 0)] = name
                elif record["event"] == "system":
                    self._newest_samples[name] = record
                else:
                    continue
                samples.append(record)
        return samples

    def _note(self, record: Mapping[str, Any]) -> None:
        event = record["event"]
        if event == "run":
            self._start, self._end, self._error = record, None, None
            self.ranks, self._lost = {}, {}
        elif event == "step":
            self._last_step = record
        elif event == "ranks":
            self.ranks[record["rank"]] = record
        elif event == "process":
            self.processes[record.get("rank", 0)] = record
        elif event == "system":
            self.hosts[record.get("host", "")] = record
            self._has_sampler = True
        elif event == "checkpoint":
            self._checkpoints.append({name: record.get(name) for name in ("step", "path", "time")})
        elif event == "lost":
            self._lost[record.get("rank", 0)] = f"lost: {record.get('reason', '')}"
        elif event == "end":
            self._end = record
        elif event == "error":
            self._error = self._error or record
            self._lost.setdefault(record.get("rank", 0), f"failed: {record.get('text', '')}")
        if event not in _ROWS:
            self.events.append((self._num_events, record))
            self._num_events += 1

    def _check_process(self) -> None:
        now = time.monotonic()
        if self._start and now - self._alive_checked >= _CHECK_SECONDS:
            self._alive, self._alive_checked = is_run_alive(self._start), now

    def _check_operations(self) -> bool:
        """Look what the ranks do; return whether they do something else than before."""
        now = time.monotonic()
        if now - self._operations_checked < _CHECK_SECONDS:
            return False
        self._operations_checked, before = now, self.operations
        goes_on = self.status in ("running", "unknown", "lost")
        self.operations = read_operations(self.folder) if goes_on else []
        return [one.text for one in self.operations] != [one.text for one in before]

    def _check_alerts(self) -> None:
        """Judge what no record says: silence, and the host as it is now."""
        status, now = self.status, time.monotonic()
        if (
            status not in ("running", "unknown")
            or not self.is_complete
            or now - self._host_checked < _CHECK_HOST_SECONDS
        ):
            return
        self._host_checked = now
        is_here = status == "running"
        if not self._has_sampler:
            self.alerts.take([read_host(self.folder, with_memory=is_here)])
        # The clock of another host may differ, so its silence is measured from when this one has last read.
        self.alerts.check(time.time() if is_here else self._last_time + now - self._heard)

    @property
    def status(self) -> str:
        """The state of the run: new, running, finished, stopped, failed or lost, as in `RecordedRun`, or
        unknown for a run without an end on another host.
        """
        if self._error is not None:
            return "failed"
        if self._end is not None:
            return "stopped" if self._end.get("stopped") else "finished"
        if not self._start:
            return "new"
        return "unknown" if self._alive is None else "running" if self._alive else "lost"

    @property
    def is_complete(self) -> bool:
        """True if all that is in the file has been read."""
        return self._has_begun and all(tail.num_bytes_read >= tail.num_bytes for tail in self._tails)

    def preview(self, first: int = 0, end: int | None = None, max_points: int = 800) -> RunCurves:
        """Return curves of some steps from a sample of the files, for a run that was not read to its end."""
        curves = RunCurves()
        num_samples = max(_MIN_SAMPLES, min(_MAX_SAMPLES, max_points // 2))
        curves.add(preview_records(self.folder, num_samples, first, end))
        return curves

    def state(self) -> dict[str, Any]:
        """Return what a page shows of this run, as plain values for JSON; numbers may be NaN."""
        step = self._last_step
        num_bytes = self._tail.num_bytes
        return {
            "name": self.folder.resolve().name,
            "folder": str(self.folder),
            "version": self.version,
            "status": self.status,
            "is_run": is_run_folder(self.folder),
            "read": min(1.0, self._tail.num_bytes_read / num_bytes) if num_bytes else 1.0,
            "damaged_lines": sum(tail.num_damaged for tail in self._tails),
            "started": self._start.get("time"),
            "updated": self._last_time or None,
            "silent_seconds": self.silent_seconds,
            "is_silent": self.is_silent,
            "task": self._start.get("task", ""),
            "strategy": self._start.get("strategy", ""),
            "host": self._start.get("host", ""),
            "precision": self._start.get("precision", ""),
            "num_ranks": self._start.get("ranks", 0),
            "steps_done": int(step.get("step", self._start.get("step", 0) - 1)) + 1,
            "num_steps": self._start.get("num_steps", 0),
            "loss": _number(step.get("loss")),
            "samples_per_second": _number(step.get("samples_per_second")),
            "step_seconds": _number(step.get("seconds")),
            "curves": self.curves.names,
            "ranks": [_rank_state(record) for _, record in sorted(self.ranks.items())],
            "operations": [one.record() for one in self.operations],
            "processes": [self.processes[rank] for rank in sorted(self.processes)],
            "hosts": [self.hosts[host] for host in sorted(self.hosts)],
            "alerts": [alert.record() for alert in self.alerts.firing],
            "error": self._error,
            "certificate": read_certificate(self.folder / CERTIFICATE),
            "num_events": self._num_events,
        }

    def details(self) -> dict[str, Any]:
        """Return the state, and what a page shows of one run only."""
        return {
            **self.state(),
            "alert_history": [alert.record() for alert in self.alerts.history],
            "checkpoints": list(self._checkpoints),
            "rank_problems": self._rank_problems(),
        }

    @property
    def silent_seconds(self) -> float | None:
        """Time since the newest record, if the run has not ended; by the clock of this host only.

        The clock of another host may differ, so its silence is counted from when something was read here.
        """
        if not self._last_time or self.status not in ("running", "unknown"):
            return None
        if self._alive is None:
            return time.monotonic() - self._heard
        return max(0.0, time.time() - self._last_time)

    @property
    def is_silent(self) -> bool:
        """True if there should have been a record: none for 30 seconds, or 20 steps if these take longer."""
        step_seconds = _number(self._last_step.get("seconds")) or 0.0
        return (self.silent_seconds or 0.0) > max(_SILENT_SECONDS, _SILENT_STEPS * step_seconds)

    def _rank_problems(self) -> dict[int, str]:
        """Return what is wrong with ranks: lost, failed, gone, or perhaps hung."""
        status, problems = self.status, dict(self._lost)
        num_ranks = int(self._start.get("ranks", 0))
        if status not in ("running", "unknown", "lost"):
            return problems
        for rank in range(min(num_ranks, _MAX_RANKS)):
            process = self.processes.get(rank)
            host = self._newest_samples.get(self._sampler_of_rank.get(rank, ""), {})
            age = host.get("time", 0.0) - process.get("time", 0.0) if process is not None else 0.0
            if status == "lost":
                problems.setdefault(rank, "gone: the job has ended without a record of its end")
            elif age > 0.5 * host.get("seconds", 0.0):
                problems.setdefault(rank, f"gone: process {(process or {}).get('pid')} has ended")
            elif self.is_silent:
                cores = f", uses {rank_cpu_cores(process):.2f} cores" if process is not None else ""
                problems.setdefault(rank, f"hung? no record for {self.silent_seconds:.0f} s{cores}")
        return problems


def _number(value: Any) -> float | None:
    return None if value is None else float(value)


def _rank_state(record: Mapping[str, Any]) -> dict[str, Any]:
    times = rank_times_of_records(record["rank"], [record])
    return {
        "rank": times.rank,
        "step": record["step"],
        "round_seconds": times.seconds / times.rounds,
        "slowest_seconds": times.slowest_seconds,
        "shares": {part: times.share(part) for part in times.parts},
        "hidden_fraction": times.hidden_fraction,
        "cpu_cores": times.cpu_seconds / times.seconds if times.seconds else 0.0,
        "peak_bytes": times.peak_bytes,
        "sent_bytes": record["sent_bytes"] / times.rounds,
    }
