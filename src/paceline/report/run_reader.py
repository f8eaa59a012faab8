"""Reads the folder of a run in any state: running, stopped, failed, resumed, or cut short by a crash.

Invariant: reading never fails because of what a crash or a bad disk left behind. Lines that are no valid
records are counted and skipped, and of steps that were taken again after a resume the last ones count. A
valid record has every field that the report computes with, with the right type; other fields may be missing
or unknown, as in runs of an older or newer version.
"""

from __future__ import annotations

import json
import math
import socket
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cached_property, partial
from itertools import pairwise
from pathlib import Path
from typing import Any, Literal

from paceline.observe.metrics_schema import EVENT_SCHEMAS
from paceline.observe.process_info import process_start_ticks
from paceline.observe.sinks import METRICS, rotated_files
from paceline.observe.step_stats import PHASES
from paceline.report.run_files import CERTIFICATE, RECIPE, resolve_run_folder

_MAX_COUNT = 2**53
_MAX_TIME_SECONDS = 4e9  # seconds since the epoch
_MAX_TEXT_LENGTH = 10_000
_NON_FINITE_NAMES = ("nan", "inf", "-inf")

FieldCheck = Callable[[Any], bool]


def is_valid_record(record: Mapping[str, Any]) -> bool:
    """Return whether the report can use a record."""
    event = record.get("event")
    if type(event) is not str or not all(_is_bounded(value) for value in record.values()):
        return False
    if not (_is_absent_or(record, "time", _is_timestamp) and _is_absent_or(record, "rank", _is_count)):
        return False
    for name, check in _REQUIRED_FIELDS.get(event, {}).items():
        if not check(record.get(name)):
            return False
    checks = _SCHEMA_CHECKS.get(event, {})
    return all(checks[name](value) for name, value in record.items() if name in checks)


def is_valid_certificate(certificate: Mapping[str, Any]) -> bool:
    """Return whether the report can use a certificate."""
    conclusion = certificate.get("conclusion")
    return type(conclusion) is str and bool(conclusion.strip()) and _is_bounded(dict(certificate))


def _is_bounded(value: Any, depth: int = 6) -> bool:
    """Return whether a value has no huge integer, no huge text and no deep nesting."""
    if depth == 0:
        return False
    kind = type(value)
    if kind is float:
        return True
    if kind is str:
        return len(value) <= _MAX_TEXT_LENGTH
    if kind is int:
        return abs(value) < _MAX_COUNT
    if kind is dict or kind is list:
        for inside in value.values() if kind is dict else value:
            if not _is_bounded(inside, depth - 1):
                return False
    return True


def _is_absent_or(record: Mapping[str, Any], name: str, check: FieldCheck) -> bool:
    return name not in record or check(record[name])


def _is_count(value: Any) -> bool:
    return type(value) is int and 0 <= value < _MAX_COUNT


def _is_number(value: Any) -> bool:
    return type(value) in (int, float) and math.isfinite(value) and abs(value) < 1e100


def _is_amount(value: Any) -> bool:
    return _is_number(value) and value >= 0


def _is_timestamp(value: Any) -> bool:
    return _is_amount(value) and value < _MAX_TIME_SECONDS


def _is_float(value: Any) -> bool:
    return _is_number(value) or value in _NON_FINITE_NAMES


def _is_text(value: Any) -> bool:
    return type(value) is str


def _is_bool(value: Any) -> bool:
    return type(value) is bool


def _is_table(value: Any) -> bool:
    return type(value) is dict


def _is_list(value: Any) -> bool:
    return type(value) is list


def _is_list_of(check: FieldCheck, value: Any) -> bool:
    return _is_list(value) and all(map(check, value))


def _is_means(value: Any) -> bool:
    return _is_table(value) and all(map(_is_float, value.values()))


def _is_phase_table(value: Any) -> bool:
    return (
        _is_table(value)
        and all(_is_amount(value.get(phase)) for phase in PHASES)
        and all(map(_is_amount, value.values()))
    )


def _is_ledger(value: Any) -> bool:
    checks = {
        "calls": _is_count,
        "payload_bytes": _is_amount,
        "sent_bytes": _is_amount,
        "hidden_fraction": _is_amount,
    }
    return _is_table(value) and all(
        _is_table(row) and all(check(row.get(name)) for name, check in checks.items())
        for row in value.values()
    )


def _is_positive(value: Any) -> bool:
    return _is_count(value) and value > 0


_REQUIRED_FIELDS: Mapping[str, Mapping[str, FieldCheck]] = {
    "run": {
        **dict.fromkeys(("step", "num_steps", "parameters", "gradient_bytes", "tally_bytes"), _is_count),
        **dict.fromkeys(("strategy", "devices", "host"), _is_text),
        "ranks": _is_positive,
        "ordered": _is_bool,
        "versions": _is_table,
    },
    "step": {
        **dict.fromkeys(("step", "num_samples"), _is_count),
        **dict.fromkeys(("loss", "grad_norm", "lr"), _is_float),
        **dict.fromkeys(("seconds", "samples_per_second"), _is_amount),
        "metrics": _is_means,
        "applied": _is_bool,
    },
    "ranks": {
        **dict.fromkeys(("step", "rank"), _is_count),
        **dict.fromkeys(
            ("seconds", "slowest_seconds", "waiting_seconds", "hidden_seconds", "sent_bytes"), _is_amount
        ),
        **dict.fromkeys(("cpu_seconds", "peak_bytes"), _is_amount),
        "rounds": _is_positive,
        "phases": _is_phase_table,
    },
    "evaluation": {"step": _is_count, "loss": _is_float, "metrics": _is_means},
    "communication": {"rows": _is_ledger},
    "partition": {
        **dict.fromkeys(("clients", "samples", "smallest", "largest", "redraws"), _is_count),
        **dict.fromkeys(("names", "labels"), partial(_is_list_of, _is_text)),
        "how": _is_text,
        "sizes": partial(_is_list_of, _is_count),
        "table": partial(_is_list_of, partial(_is_list_of, _is_count)),
    },
    "cohort": {
        **dict.fromkeys(("step", "samples", "down_bytes", "up_bytes"), _is_count),
        "clients": partial(_is_list_of, _is_text),
        "left_out": lambda value: _is_table(value) and all(map(_is_text, value.values())),
    },
    "privacy": {"secure": _is_text, "released": partial(_is_list_of, _is_text), "warning": _is_text},
    "rollout": {
        **dict.fromkeys(("step", "environment_steps", "episodes", "terminated", "truncated"), _is_count),
        **dict.fromkeys(("mean_return", "recent_return"), _is_float),
        "not_equal": lambda value: type(value) is int,
        "ages": lambda value: _is_table(value) and all(map(_is_count, value.values())),
    },
    "end": {"step": _is_count},
}

_TYPE_CHECKS: Mapping[str, FieldCheck] = {
    "int": _is_count,
    "float": _is_float,
    "str": _is_text,
    "bool": _is_bool,
    "table": _is_table,
    "list": _is_list,
}
_SCHEMA_CHECKS: Mapping[str, Mapping[str, FieldCheck]] = {
    event: {
        name: _TYPE_CHECKS[text.partition(":")[0]]
        for name, text in schema.fields.items()
        if name not in _REQUIRED_FIELDS.get(event, {})
    }
    for event, schema in EVENT_SCHEMAS.items()
}

MetricsRecord = Mapping[str, Any]
_STEP_FIELDS = (
    *("event", "step", "loss", "metrics", "num_samples", "grad_norm", "lr", "applied", "seconds"),
    "samples_per_second",
)
"""The fields of a step that are kept in memory: a run may have a million steps."""
RunStatus = Literal["new", "running", "finished", "stopped", "failed", "lost"]


@dataclass(frozen=True)
class RecordedRun:
    """A run as its folder records it.

    Args:
        folder: the run folder.
        recipe: plain values by key; empty if the file cannot be read.
        records: all records in the order in which they were written; steps have only what a report needs.
        unreadable: number of lines that are no valid records.
        certificate: written by `paceline verify`; None if there is none.
        running: whether the process that wrote last still runs; None if it is on another host.
    """

    folder: Path
    recipe: MetricsRecord
    records: tuple[MetricsRecord, ...]
    unreadable: int = 0
    certificate: MetricsRecord | None = None
    running: bool | None = False

    @property
    def name(self) -> str:
        """The last part of the folder's path."""
        return self.folder.resolve().name

    def of(self, event: str) -> list[MetricsRecord]:
        """Return the records of one event."""
        return [record for record in self.records if record.get("event") == event]

    @cached_property
    def starts(self) -> list[MetricsRecord]:
        """One record for every time that the run was started or resumed."""
        return self.of("run")

    @cached_property
    def start(self) -> MetricsRecord:
        """The record of the last start; empty if there is none."""
        return self.starts[-1] if self.starts else {}

    @cached_property
    def steps(self) -> list[MetricsRecord]:
        """The last record of each step, ascending."""
        return _latest_by_step(self.records, "step")

    @cached_property
    def evaluations(self) -> list[MetricsRecord]:
        """The last record of each evaluation, ascending by step."""
        return _latest_by_step(self.records, "evaluation")

    @cached_property
    def last_start_records(self) -> tuple[MetricsRecord, ...]:
        """All records since the run was started or resumed last."""
        begins = [i for i, record in enumerate(self.records) if record.get("event") == "run"]
        return self.records[begins[-1] :] if begins else self.records

    @cached_property
    def last_training_records(self) -> tuple[MetricsRecord, ...]:
        """All records of the last start that took a step; a resume at the end of a run takes none."""
        begins = [i for i, record in enumerate(self.records) if record.get("event") == "run"]
        spans = [self.records[i:j] for i, j in pairwise([*begins, len(self.records)])]
        training = [span for span in spans if any(r.get("event") in ("step", "ranks") for r in span)]
        return training[-1] if training else self.last_start_records

    @property
    def end(self) -> MetricsRecord | None:
        """The end of the last start; None if there is no record of it."""
        return next((r for r in reversed(self.last_start_records) if r.get("event") == "end"), None)

    @property
    def error(self) -> MetricsRecord | None:
        """The error that ended the last start, the cause first; None if there was none."""
        return next((r for r in self.last_start_records if r.get("event") == "error"), None)

    @property
    def status(self) -> RunStatus:
        """The state of the run; "lost" if its process is gone without a record, as after kill -9."""
        if self.error is not None:
            return "failed"
        if self.end is not None:
            return "stopped" if self.end.get("stopped") else "finished"
        if self.running or (self.running is None and self.starts):
            return "running"
        return "lost" if self.starts else "new"

    @property
    def ranks(self) -> int:
        """Number of processes of the last start; 0 if unknown."""
        return int(self.start.get("ranks", 0))

    @property
    def tokens_per_sample(self) -> int:
        """Tokens of a sample; 0 if the task has none."""
        return int(self.start.get("tokens_per_sample", 0))

    @property
    def done(self) -> int:
        """Number of steps taken."""
        ends = [r["step"] for r in self.of("end")]
        last = int(self.steps[-1]["step"]) + 1 if self.steps else int(self.start.get("step", 0))
        return max([last, *ends[-1:]]) if self.end is not None else last


def read_run(folder: Path) -> RecordedRun:
    """Read a run folder, or the one around a checkpoint.

    Raises:
        DataError: it is no run folder.
    """
    folder = resolve_run_folder(folder)
    records, unreadable = _read_records(folder / METRICS)
    starts = [record for record in records if record.get("event") == "run"]
    return RecordedRun(
        folder=folder,
        recipe=_read_recipe(folder / RECIPE),
        records=tuple(records),
        unreadable=unreadable,
        certificate=read_certificate(folder / CERTIFICATE),
        running=is_run_alive(starts[-1]) if starts else False,
    )


def to_float(value: Any) -> float:
    """Return a number of a record; JSON has no NaN and no infinities, so records have them as strings."""
    return float(value)


def _read_records(path: Path) -> tuple[list[MetricsRecord], int]:
    records: list[MetricsRecord] = []
    num_unreadable = 0
    for file in [*rotated_files(path), path]:
        lines = file.read_text(encoding="utf-8", errors="replace").splitlines() if file.is_file() else []
        for line in filter(None, lines):
            record = parse_record(line)
            if record is None:
                num_unreadable += 1
            else:
                records.append(_without_unused_fields(record))
    return records, num_unreadable


def parse_record(line: str) -> MetricsRecord | None:
    """Return the record in a line of `metrics.jsonl`; None if it is no valid one."""
    try:
        record = json.loads(line)
    except (ValueError, RecursionError):
        return None
    return record if isinstance(record, dict) and is_valid_record(record) else None


def _without_unused_fields(record: MetricsRecord) -> MetricsRecord:
    if record["event"] != "step":
        return record
    return {key: record[key] for key in _STEP_FIELDS if key in record}


def _latest_by_step(records: tuple[MetricsRecord, ...], event: str) -> list[MetricsRecord]:
    """Return the records that count: a resume or roll-back to a step undoes those from there on."""
    latest: list[MetricsRecord] = []
    for record in records:
        if record.get("event") == "run":
            # An evaluation counts the steps before it, so the one at the step of the checkpoint stays.
            first_undone = record.get("step", 0) + (event == "evaluation")
            latest = [earlier for earlier in latest if earlier["step"] < first_undone]
        elif record.get("event") == event:
            # Copying the list for every one of a million steps would take hours.
            if latest and latest[-1]["step"] >= record["step"]:
                latest = [earlier for earlier in latest if earlier["step"] < record["step"]]
            latest.append(record)
    return latest


def _read_recipe(path: Path) -> MetricsRecord:
    from paceline.recipe.toml_text import parse_toml  # paceline.recipe imports pydantic, which is slow

    try:
        return parse_toml(path.read_text(encoding="utf-8")) if path.is_file() else {}
    except (OSError, ValueError):
        return {}


def read_certificate(path: Path) -> MetricsRecord | None:
    """Return the certificate in a file; None if there is none or it is no valid one."""
    try:
        certificate = json.loads(path.read_text(encoding="utf-8")) if path.is_file() else None
    except (OSError, ValueError, RecursionError):
        return None
    return certificate if isinstance(certificate, dict) and is_valid_certificate(certificate) else None


def is_run_alive(start: MetricsRecord) -> bool | None:
    """Return whether the process of a start still runs; None if it is on another host."""
    if start.get("host") != socket.gethostname():
        return None
    start_ticks = process_start_ticks(int(start.get("pid", 0)))
    return start_ticks != 0 and start_ticks == start.get("process_start")
