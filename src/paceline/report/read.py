"""Read a run folder, whatever state it is in: under way, stopped, failed, resumed, cut short.

Invariant: reading never fails because of what a crash left behind. Lines that are no records are counted and
said, steps that were done again after a resume are counted once, as they were done last.
"""

from __future__ import annotations

import json
import socket
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise
from pathlib import Path
from typing import Any, Literal

from paceline.observe.process import process_start
from paceline.observe.sinks import full_files
from paceline.report.folder import CERTIFICATE, METRICS, RECIPE, checked_run
from paceline.report.sound import is_certificate, is_sound

Record = Mapping[str, Any]
_STEP = (
    *("event", "step", "loss", "metrics", "num_samples", "grad_norm", "lr", "applied", "seconds"),
    "samples_per_second",
)
"""What is kept of a step: there may be a million."""
Status = Literal["new", "running", "finished", "stopped", "failed", "lost"]


@dataclass(frozen=True)
class Run:
    """What a folder says of a run.

    Args:
        folder: of the run.
        recipe: plain values by key; empty if the file cannot be read.
        records: all of them, in the order in which they were written; of steps what a report needs.
        unreadable: number of lines that are no records.
        certificate: of `paceline verify`; None if there is none.
        running: whether the process that wrote last is still there; None: it is on another host.
    """

    folder: Path
    recipe: Record
    records: tuple[Record, ...]
    unreadable: int = 0
    certificate: Record | None = None
    running: bool | None = False

    @property
    def name(self) -> str:
        """The last part of the folder's path."""
        return self.folder.resolve().name

    def of(self, event: str) -> list[Record]:
        """The records of one event."""
        return [record for record in self.records if record.get("event") == event]

    @cached_property
    def starts(self) -> list[Record]:
        """One record for every time that the run was started or resumed."""
        return self.of("run")

    @cached_property
    def start(self) -> Record:
        """The last of them; empty if there is none."""
        return self.starts[-1] if self.starts else {}

    @cached_property
    def steps(self) -> list[Record]:
        """The steps that count, ascending."""
        return _newest(self.records, "step")

    @cached_property
    def evaluations(self) -> list[Record]:
        """The evaluations that count, ascending."""
        return _newest(self.records, "evaluation")

    @cached_property
    def last_start(self) -> tuple[Record, ...]:
        """All records since the run was started or resumed last."""
        begins = [i for i, record in enumerate(self.records) if record.get("event") == "run"]
        return self.records[begins[-1] :] if begins else self.records

    @cached_property
    def last_trained(self) -> tuple[Record, ...]:
        """All records of the last start that made a step; a resume that had none to make changes nothing."""
        begins = [i for i, record in enumerate(self.records) if record.get("event") == "run"]
        spans = [self.records[i:j] for i, j in pairwise([*begins, len(self.records)])]
        made = [span for span in spans if any(record.get("event") in ("step", "ranks") for record in span)]
        return made[-1] if made else self.last_start

    @property
    def end(self) -> Record | None:
        """How the last start ended; None if it does not say."""
        return next((r for r in reversed(self.last_start) if r.get("event") == "end"), None)

    @property
    def error(self) -> Record | None:
        """What ended the last start, the cause; None if nothing did."""
        return next((r for r in self.last_start if r.get("event") == "error"), None)

    @property
    def status(self) -> Status:
        """In one word. Lost: it neither ended nor said why, as after kill -9 or a power cut."""
        if self.error is not None:
            return "failed"
        if self.end is not None:
            return "stopped" if self.end.get("stopped") else "finished"
        if self.running or (self.running is None and self.starts):
            return "running"
        return "lost" if self.starts else "new"

    @property
    def ranks(self) -> int:
        """Processes of the last start; 0: unknown."""
        return int(self.start.get("ranks", 0))

    @property
    def tokens_per_sample(self) -> int:
        """0 if the task has no tokens."""
        return int(self.start.get("tokens_per_sample", 0))

    @property
    def done(self) -> int:
        """Steps taken."""
        ends = [r["step"] for r in self.of("end")]
        last = int(self.steps[-1]["step"]) + 1 if self.steps else int(self.start.get("step", 0))
        return max([last, *ends[-1:]]) if self.end is not None else last


def read_run(folder: Path) -> Run:
    """Read a run folder, or the one around a checkpoint.

    Raises:
        DataError: it is no run folder.
    """
    folder = checked_run(folder)
    records, unreadable = _records(folder / METRICS)
    starts = [record for record in records if record.get("event") == "run"]
    return Run(
        folder=folder,
        recipe=_recipe(folder / RECIPE),
        records=tuple(records),
        unreadable=unreadable,
        certificate=_certificate(folder / CERTIFICATE),
        running=_running(starts[-1]) if starts else False,
    )


def number(value: Any) -> float:
    """A number of a record; those that are not finite are written as their names."""
    return float(value)


def _records(path: Path) -> tuple[list[Record], int]:
    found: list[Record] = []
    unreadable = 0
    for file in [*full_files(path), path]:
        lines = file.read_text(encoding="utf-8", errors="replace").splitlines() if file.is_file() else []
        for line in filter(None, lines):
            record = _parse(line)
            if record is None:
                unreadable += 1
            else:
                found.append(record)
    return found, unreadable


def _parse(line: str) -> Record | None:
    try:
        record = json.loads(line)
    except (ValueError, RecursionError):
        return None
    if not isinstance(record, dict) or not is_sound(record):
        return None
    return {key: record[key] for key in _STEP if key in record} if record["event"] == "step" else record


def _newest(records: tuple[Record, ...], event: str) -> list[Record]:
    """Going back to a step undoes what was recorded from there on."""
    found: list[Record] = []
    for record in records:
        if record.get("event") == "run":
            first = record.get("step", 0) + (event == "evaluation")
            found = [old for old in found if old["step"] < first]
        elif record.get("event") == event:
            found = found if not found or found[-1]["step"] < record["step"] else _before(found, record)
            found.append(record)
    return found


def _before(found: list[Record], record: Record) -> list[Record]:
    return [old for old in found if old["step"] < record["step"]]


def _recipe(path: Path) -> Record:
    from paceline.recipe.toml_text import parse_toml  # the room of recipes imports pydantic

    try:
        return parse_toml(path.read_text(encoding="utf-8")) if path.is_file() else {}
    except (OSError, ValueError):
        return {}


def _certificate(path: Path) -> Record | None:
    try:
        found = json.loads(path.read_text(encoding="utf-8")) if path.is_file() else None
    except (OSError, ValueError, RecursionError):
        return None
    return found if isinstance(found, dict) and is_certificate(found) else None


def _running(start: Record) -> bool | None:
    """Whether the process of a start is there; None if only its own host could tell."""
    if start.get("host") != socket.gethostname():
        return None
    begun = process_start(int(start.get("pid", 0)))
    return begun != 0 and begun == start.get("process_start")
