"""The log of a study, from which everything else follows, and the log of its leases. Torch-free.

`study.jsonl` has one line per event of a trial: proposed, measured at a rung, stopped, ended; then confirmed
and tested. Lines are appended in the order of trial numbers within a rung, so the logs of two studies with
different numbers of workers are equal except for the field `at`. `leases.jsonl` has what ran when: a line
when a slot takes a run, and one when the run ends.

Invariants: files are only appended to. A last line that a crash has torn is cut off before the next one is
written; any other line that cannot be read is an error.
"""

from __future__ import annotations

import fcntl
import json
import math
import os
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal

from paceline.errors import DataError, RecipeError
from paceline.observe.file_writing import explain_os_errors
from paceline.search.space import Params, first_difference

STUDY_LOG, LEASE_LOG, LOCK = "study.jsonl", "leases.jsonl", "study.lock"
_VERSION = 1

TrialStatus = Literal["proposed", "stopped", "complete", "failed", "diverged", "refused", "duplicate"]
Event = dict[str, Any]


class EventFile:
    """A file of JSON lines to which whole events are appended.

    Args:
        path: made if it does not exist; its folder exists.
    Attributes:
        events: all events, in order.
        torn: the last line was torn by a crash, and was left out.
    Raises:
        DataError: a line that is not the last one is no event.
        RunFolderError: the file cannot be read or written.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        with explain_os_errors(path):
            flags = os.O_RDWR | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC | os.O_NOFOLLOW
            self._file = os.open(path, flags, 0o666)
            data = path.read_bytes()
            whole = data[: data.rfind(b"\n") + 1]
            self.torn = len(whole) < len(data)
            if self.torn:
                os.ftruncate(self._file, len(whole))
        self.events: list[Event] = [
            _read_event(line, f"{path}:{number}") for number, line in enumerate(whole.splitlines(), 1)
        ]

    def append(self, events: Iterable[Event]) -> None:
        """Append events with the time; they are on the disk when this returns.

        Raises:
            RunFolderError: the file cannot be written.
        """
        stamped = [{**event, "at": round(time.time(), 3)} for event in events]
        if not stamped:
            return
        text = "".join(json.dumps(event, separators=(",", ":"), allow_nan=False) + "\n" for event in stamped)
        with explain_os_errors(self._path):
            remaining = memoryview(text.encode())
            while remaining:
                remaining = remaining[os.write(self._file, remaining) :]
            os.fdatasync(self._file)
        self.events += stamped

    def close(self) -> None:
        """Close the file."""
        os.close(self._file)


def _read_event(line: bytes, where: str) -> Event:
    try:
        event = json.loads(line)
    except ValueError:
        event = None
    if not isinstance(event, dict) or not isinstance(event.get("event"), str):
        raise DataError(
            "the log of the study has a line that is no event",
            where=where,
            next_step="restore the file from a copy; only a torn last line can be left out",
        )
    return event


def finite(value: float | None) -> float | None:
    """Return a value as JSON can hold it: None in place of one that is not finite."""
    return value if value is not None and math.isfinite(value) else None


@dataclass
class Trial:
    """A trial as the log describes it.

    Args:
        number: from 0.
        batch: number of the batch in which it was proposed.
        params: its values by recipe key.
        identity: hash of its resolved recipe; empty if there is none.
        status: "proposed": it has not ended.
        value: its objective, the mean over seeds; None without one.
        reason: why it was refused or failed, or which trial it equals.
        step: at which it stopped.
        rungs: the metric at each rung, the mean over seeds.
        planned_steps, planned_samples: length of its run; 0: not known.
    """

    number: int
    batch: int
    params: Params
    identity: str = ""
    status: TrialStatus = "proposed"
    value: float | None = None
    reason: str = ""
    step: int | None = None
    rungs: list[float] = field(default_factory=list)
    planned_steps: int = 0
    planned_samples: int = 0

    @property
    def name(self) -> str:
        """The name of its run folder, for its first seed."""
        return f"trial-{self.number:04d}"

    @property
    def has_ended(self) -> bool:
        """Return whether nothing will be added to it."""
        return self.status != "proposed"


class StudyLog:
    """The log of a study and the trials that follow from it.

    Args:
        folder: of the study; made if it does not exist. It is locked until `close`.
    Attributes:
        trials: by number.
        confirmed: scores of new seeds by trial.
        tested: the event of the test set; None: it was not opened.
    Raises:
        DataError: another process writes to the folder, or the log is damaged.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        with explain_os_errors(folder):
            folder.mkdir(parents=True, exist_ok=True)
            self._lock = os.open(folder / LOCK, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666)
        try:
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            os.close(self._lock)
            raise DataError(
                "another process works on this study", where=str(folder), next_step="wait for it, or stop it"
            ) from error
        self._file = EventFile(folder / STUDY_LOG)
        self.leases = LeaseLog(folder)
        self.trials: list[Trial] = []
        self.confirmed: dict[int, list[float | None]] = {}
        self.tested: Event | None = None
        for event in self._file.events:
            self._apply(event)

    @property
    def events(self) -> Sequence[Event]:
        """All events, in order."""
        return self._file.events

    @property
    def torn(self) -> bool:
        """True if the last line was torn by a crash and left out."""
        return self._file.torn

    def begin(self, values: Mapping[str, Any], recipe: Mapping[str, Any]) -> None:
        """Write the header of a new study, or compare that of an earlier call.

        Args:
            values: of the study file.
            recipe: the base recipe, resolved, as plain values.
        Raises:
            RecipeError: the folder holds another study; names the first difference.
        """
        header = {"event": "study", "version": _VERSION, "study": values, "recipe": recipe}
        header = json.loads(json.dumps(header, default=str))
        if not self.events:
            self._file.append([header])
            return
        before = self.events[0]
        difference = first_difference(
            {key: before.get(key) for key in ("version", "study", "recipe")},
            {key: header[key] for key in ("version", "study", "recipe")},
        )
        if difference:
            raise RecipeError(
                f"the folder holds a study of another space or recipe: {difference}",
                where=str(self.folder / STUDY_LOG),
                next_step="choose another --out, or use the same files and settings as the first time",
            )

    def append(self, *events: Event) -> None:
        """Append events, and apply them to the trials."""
        self._file.append(events)
        for event in events:
            self._apply(event)

    def close(self) -> None:
        """Close the files and unlock the folder."""
        self._file.close()
        self.leases.close()
        os.close(self._lock)

    def batches(self) -> Iterator[list[Trial]]:
        """Yield the trials of each batch, in order."""
        number = 0
        while batch := [trial for trial in self.trials if trial.batch == number]:
            yield batch
            number += 1

    def _apply(self, event: Event) -> None:
        kind = event["event"]
        if kind == "proposed":
            trial = Trial(event["trial"], event["batch"], event["params"], event.get("identity", ""))
            trial.planned_steps, trial.planned_samples = event.get("steps", 0), event.get("samples", 0)
            self.trials.append(trial)
        elif kind == "confirmed":
            self.confirmed[event["trial"]] = event["values"]
        elif kind == "tested":
            self.tested = event
        elif kind in ("measured", "stopped", "ended"):
            self._apply_to_trial(self.trials[event["trial"]], event)

    def _apply_to_trial(self, trial: Trial, event: Event) -> None:
        value = event.get("value")
        if event["event"] == "measured":
            trial.rungs.append(math.nan if value is None else value)
            trial.step = event["step"]
        elif event["event"] == "stopped":
            trial.status, trial.step = "stopped", event["step"]
        else:
            trial.status, trial.value = event["status"], value
            trial.reason = event.get("reason", "")


def without_times(events: Iterable[Mapping[str, Any]]) -> list[Event]:
    """Return events without what depends on the clock, to compare two studies."""
    return [{name: value for name, value in event.items() if name != "at"} for event in events]


LeaseEnd = Literal["done", "paused", "failed", "diverged", "refused", "killed", "stopped", "lost"]


@dataclass(frozen=True)
class Lease:
    """One run of a folder by a slot.

    Args:
        number: from 0.
        run: name of the run folder.
        until: rung at which it pauses; None: the end.
        end: how it ended; None: it has not. "killed": a process of it, or the slot, was killed. "stopped": by
            the user. "lost": the coordinator ended before it, or its worker left.
        reason: of an end that is no success.
        seconds: between the two lines.
        load: the machine's load when it began, without it.
        slot: that ran it.
        began: seconds since the epoch.
    """

    number: int
    run: str
    until: str | None
    end: LeaseEnd | None = None
    reason: str = ""
    seconds: float = 0.0
    load: float = 0.0
    slot: int = 0
    began: float = 0.0


class LeaseLog:
    """The leases of a study.

    Invariant: every lease of an earlier process has an end, since those without one are "lost" now.

    Attributes:
        leases: by number.
    """

    def __init__(self, folder: Path) -> None:
        self._file = EventFile(folder / LEASE_LOG)
        self.leases: list[Lease] = []
        for event in self._file.events:
            self._apply(event)
        open_leases = [lease.number for lease in self.leases if lease.end is None]
        self._append({"event": "end", "lease": number, "end": "lost", "reason": ""} for number in open_leases)

    def begin(self, run: str, until: str | None, slot: int) -> Lease:
        """Give a run to a slot; returns the lease."""
        number, load = len(self.leases), round(os.getloadavg()[0], 2)
        event = {"event": "lease", "lease": number, "run": run, "until": until, "slot": slot, "load": load}
        self._append([event])
        return self.leases[number]

    def finish(self, number: int, end: LeaseEnd, reason: str) -> None:
        """Record the end of a lease."""
        self._append([{"event": "end", "lease": number, "end": end, "reason": reason}])

    def of(self, run: str) -> list[Lease]:
        """Return the leases of a run, in order."""
        return [lease for lease in self.leases if lease.run == run]

    def close(self) -> None:
        """Close the file."""
        self._file.close()

    def _append(self, events: Iterable[Event]) -> None:
        first = len(self._file.events)
        self._file.append(events)
        for event in self._file.events[first:]:
            self._apply(event)

    def _apply(self, event: Event) -> None:
        if event["event"] == "lease":
            lease = Lease(
                event["lease"],
                event["run"],
                event["until"],
                load=event["load"],
                slot=event["slot"],
                began=event["at"],
            )
            self.leases.append(lease)
            return
        lease = self.leases[event["lease"]]
        seconds = event["at"] - lease.began
        self.leases[lease.number] = replace(lease, end=event["end"], reason=event["reason"], seconds=seconds)
