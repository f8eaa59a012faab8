"""The schema of `metrics.jsonl`: which events there are, how grave each is, and what its fields mean.

Invariant: what a run writes is what stands here; `docs/reference/metrics.md` lists the same fields, and tests
hold a real run and the page against this table. An event that is not in the table is written as "info".
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any, NamedTuple

from paceline.observe.layout_events import RECOMPUTE, STAGES
from paceline.observe.machine_events import COMPILE, OPTIMIZER, PRECISION, THREADS
from paceline.observe.schema_of_health import LOWER_RATE, ROLL_BACK, SKIP
from paceline.observe.schema_of_speed import GAIN, RECOVERED, SAMPLES, SERVERS, SHARES, STRAGGLER, SYNC
from paceline.observe.wire_events import BUCKETS, CODEC, ROUTE

SCHEMA = 1
LEVELS = ("debug", "info", "warning", "error")

COMMON: Mapping[str, str] = MappingProxyType(
    {
        "event": "str: the name of the event",
        "level": "str: debug, info, warning or error",
        "rank": "int: global rank that the record is about",
        "time": "float: when it was written, seconds since the epoch",
    }
)


class Event(NamedTuple):
    """One kind of record.

    Args:
        level: how grave it is.
        spoken: whether the terminal shows it as a line of its own.
        fields: by name "type: meaning and unit", beside the common ones.
    """

    level: str
    spoken: bool
    fields: Mapping[str, str]


_STEP = {
    "step": "int: index of the last step of the round, from 0",
    "epoch": "int: index of the epoch",
    "loss": "float: mean over the items of the round, all replicas",
    "metrics": "table: means of the task's metrics over the same items",
    "num_samples": "int: samples of the round, all replicas",
    "num_items": "float: what the loss counts (samples, tokens), all replicas",
    "grad_norm": "float: global norm of the mean gradient before the clip",
    "lr": "float: learning rate of the update, of the first parameter group",
    "rates": "table: learning rate of every parameter group, by its name or number",
    "applied": "bool: false if the update was skipped: an overflow in fp16, or a step that health left out",
    "loss_scale": "float: factor of the loss, 1 unless fp16",
    "stops": "int: ranks that were asked to stop",
    "seconds": "float: wall time of the round on rank 0",
    "phases": "table: its seconds on rank 0 by phase",
    "sent_bytes": "float: bytes that rank 0 sent since it started, by the closed form",
    "samples_per_second": "float: num_samples / seconds",
}
_RANKS = {
    "step": "int: last step of the window",
    "rounds": "int: rounds in the window",
    "seconds": "float: wall time of these rounds on this rank",
    "slowest_seconds": "float: wall time of the slowest of them on this rank",
    "phases": "table: seconds by phase; they add up to `seconds` with what belongs to no phase",
    "waiting_seconds": "float: part of communication in which this rank waited for slower ones",
    "hidden_seconds": "float: communication that went on while this rank did something else",
    "sent_bytes": "float: bytes that this rank sent in the window, by the closed form",
    "cpu_seconds": "float: processor time of this rank's process",
    "peak_bytes": "float: largest memory of this rank's process so far",
}
_RUN = {
    "schema": "int: version of this table",
    "step": "int: steps taken before",
    "num_steps": "int: length of the run in steps",
    "task": "str: as in the recipe",
    "strategy": "str: with its replicas filled in",
    "ordered": "bool: shards are added in one order, whoever holds them",
    "ranks": "int: processes",
    "devices": "str: type of the device of each rank",
    "precision": "str: number format of forward and backward: fp32, bf16 or fp16",
    "threads": "int: intra-op threads of each rank",
    "host": "str: of rank 0",
    "pid": "int: process of rank 0",
    "process_start": "int: when that process began, in clock ticks of its host; 0: unknown",
    "versions": "table: of paceline, torch and Python",
    "parameters": "int: trained numbers of the model",
    "gradient_bytes": "int: bytes of one whole gradient",
    "tally_bytes": "int: bytes of what ranks agree on in a step",
    "tokens_per_sample": "int: 0 if the task has no tokens",
}
_EVALUATION = {
    "step": "int: steps taken before it",
    "loss": "float: mean over held-out items",
    "metrics": "table: further means",
    "num_samples": "int: held-out samples, each used once",
    "num_items": "float: what the loss counts",
}
_WORK = {
    "step": "int: steps taken before",
    "taken": "int: parts of batches that workers were given, since the run began",
    "applied": "int: of these, applied",
    "dropped": "int: of these, left out; applied and dropped are all",
    "staleness": "table: how many of the applied were so many updates old",
}
_ARRIVALS = {
    "step": "int: steps taken before",
    "senders": "list: rank of every message that the server has heard since the last such record",
}
_SWITCH = {
    "step": "int: index of the first step under another rule",
    "sync": "str: this rule",
}
_LOST = {
    "step": "int: index of the step that was open",
    "reason": "str: how the rank was lost",
    "workers_left": "int: that go on",
}
_ERROR = {
    "text": "str: what happened, one line",
    "kind": "str: error, signal, connection, stopped or left (before the first step)",
    "exit_code": "int: of the job, if this is the cause",
}

EVENTS: Mapping[str, Event] = MappingProxyType(
    {
        "run": Event("info", False, _RUN),
        "precision": Event("info", False, PRECISION),
        "threads": Event("info", False, THREADS),
        "optimizer": Event("info", False, OPTIMIZER),
        "compile": Event("info", True, COMPILE),
        "stages": Event("info", False, STAGES),
        "recompute": Event("info", False, RECOMPUTE),
        "servers": Event("info", False, SERVERS),
        "route": Event("info", False, ROUTE),
        "buckets": Event("info", False, BUCKETS),
        "codec": Event("info", False, CODEC),
        "resume": Event("info", True, {"step": "int: goes on from here", "checkpoint": "str: its name"}),
        "step": Event("info", False, _STEP),
        "ranks": Event("info", False, _RANKS),
        "evaluation": Event("info", True, _EVALUATION),
        "early-stop": Event(
            "info",
            True,
            {
                "step": "int: steps taken before it",
                "metric": "str: evaluate.metric",
                "best": "float: its best value",
                "best_step": "int: steps taken before that",
            },
        ),
        "stop": Event(
            "info",
            True,
            {"step": "int: steps taken before it", "reason": "str: what the callback that asked said"},
        ),
        "checkpoint": Event("info", True, {"step": "int: saved state", "path": "str: where it is"}),
        "hash": Event(
            "info",
            True,
            {
                "step": "int: index of the last step before it",
                "sha256": "str: of the whole state, in hex",
                "equal": "bool: ranks hold the same bits of what they have in common",
            },
        ),
        "divergence": Event(
            "error",
            True,
            {
                "step": "int: index of the last step before it",
                "tensor": "str: the first that differs",
                "ranks": "list: those that differ from the others",
            },
        ),
        "communication": Event(
            "info", False, {"rows": "table: by operation and group: calls, bytes, seconds"}
        ),
        "cache": Event(
            "debug", False, {"hits": "int: samples from memory", "lookups": "int: samples asked for"}
        ),
        "skip": Event("warning", True, SKIP),
        "lower-rate": Event("warning", True, LOWER_RATE),
        "roll-back": Event("warning", True, ROLL_BACK),
        "lost": Event("warning", True, _LOST),
        "sync": Event("info", False, SYNC),
        "switch": Event("info", True, _SWITCH),
        "shares": Event("info", True, SHARES),
        "samples": Event("info", False, SAMPLES),
        "gain": Event("info", True, GAIN),
        "straggler": Event("warning", True, STRAGGLER),
        "recovered": Event("info", True, RECOVERED),
        "work": Event("info", False, _WORK),
        "arrivals": Event("debug", False, _ARRIVALS),
        "warning": Event("warning", True, {"text": "str: what the user should know"}),
        "error": Event("error", True, _ERROR),
        "end": Event(
            "info",
            False,
            {"step": "int: steps taken", "stopped": "bool: a signal ended it before its last step"},
        ),
    }
)


def level_of(event: str) -> str:
    """How grave an event is."""
    return EVENTS[event].level if event in EVENTS else "info"


def spoken(event: str) -> bool:
    """Whether a person should see it as it happens."""
    return EVENTS[event].spoken if event in EVENTS else True


def passes(event: str, lowest: str) -> bool:
    """Whether a file that begins at level `lowest` holds an event."""
    return LEVELS.index(level_of(event)) >= LEVELS.index(lowest)


def mistakes(record: Mapping[str, Any]) -> list[str]:
    """What a record lacks or has too much, by the schema; empty if it fits."""
    name = str(record.get("event"))
    if name not in EVENTS:
        return [f"unknown event {name}"]
    fields = {**COMMON, **EVENTS[name].fields}
    found = [f"{name} lacks {field}" for field in fields if field not in record]
    found += [
        f"{name} has {field}, which the schema does not know" for field in record if field not in fields
    ]
    return found + [
        f"{name}.{field} is no {fields[field].partition(':')[0]}: {value!r}"
        for field, value in record.items()
        if field in fields and not _fits(value, fields[field].partition(":")[0])
    ]


def _fits(value: Any, kind: str) -> bool:
    """Numbers that are not finite are written as their names."""
    if kind == "float":
        return type(value) in (int, float) or value in ("nan", "inf", "-inf")
    return type(value) is {"int": int, "str": str, "bool": bool, "table": dict, "list": list}[kind]
