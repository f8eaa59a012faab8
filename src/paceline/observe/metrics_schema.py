"""The schema of `metrics.jsonl`: which events there are, how grave each is, and what its fields mean.

Invariant: what a run writes is what stands here; `docs/reference/metrics.md` lists the same fields, and tests
hold a real run and the page against this table. An event that is not in the table is written as "info".

What is told of how a model was cut, and of the memory that a run keeps to: fields of two events.

Fields of the events that say what was left to the machine, and why it is so; see `schema`.

Fields of the records about numbers that went wrong, and what was done; see `schema`.

Fields of the records about who is slow, what was done, and who serves what; see `schema`.

What is told of the choices of the wire: fields of the events `route`, `buckets` and `codec`.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any, NamedTuple

_STAGES = {
    "stages": "str: modules of each stage, by measured time",
    "link_seconds": "list: of forward and backward of each module",
    "stage_seconds": "list: of each stage",
    "stage_bytes": "list: planned peak of each stage; empty without memory.budget",
    "fastest": "str: modules of each stage that would be faster and need more than the budget, or empty",
    "imbalance": "float: slowest stage over the mean",
}
_RECOMPUTE = {
    "recompute": "str: none, blocks, segments, or numbers of blocks: what backward computes again",
    "peak_bytes": "int: planned for the largest rank",
    "budget_bytes": "int: memory.budget",
    "without_bytes": "int: planned for it if nothing were computed again",
    "block_seconds": "list: of a forward of each block, measured; empty if none had to be",
    "seconds": "float: that a micro-batch takes longer",
}

_PRECISION = {"compute": "str: chosen by the machine", "reason": "str: why, with what was measured"}
_THREADS = {"number": "int: intra-op threads of each process of rank 0's host", "reason": "str: why"}
_OPTIMIZER = {
    "name": "str: as in the recipe",
    "fused": "bool: one kernel updates many values",
    "reason": "str: why, or why not",
}
_COMPILE = {
    "seconds": "float: of the first step, beyond those of a later one",
    "steps": "int: that many later steps take as long",
}

_SKIP = {
    "step": "int: index of the step that was left out",
    "reason": "str: what was wrong, and on which rank",
}
_LOWER_RATE = {
    "step": "int: index of the step at which the loss was seen to diverge",
    "multiplier": "float: of every rate from now on",
    "reason": "str: what was wrong, and on which rank",
}
_ROLL_BACK = {
    "step": "int: index of the step that went wrong",
    "checkpoint": "str: name of the one that was loaded",
    "left_out": "list: first and last index of the steps that are not taken again",
    "reason": "str: what was wrong, and on which rank",
}

_SERVERS = {
    "partition": "str: how tensors are cut for several servers",
    "bytes": "list: of parameters, by server",
}

_SHARES = {
    "step": "int: index of the first step with these shares",
    "shares": "list: of each replica, how many shards of a batch it runs",
    "seconds": "list: of each, how long a shard has taken it",
}
_SAMPLES = {
    "step": "int: steps taken before",
    "taken": "int: samples that all replicas have taken since the run was started or resumed",
    "applied": "int: of these, applied",
    "dropped": "int: of these, in updates that were left out; applied and dropped are all",
}
_GAIN = {
    "step": "int: steps taken before",
    "before": "float: seconds of a step on this rank under the shares, or the rule, before",
    "after": "float: the same under the present ones",
    "times": "float: how many times as many items a second updates are made of now",
}
_STRAGGLER = {
    "step": "int: steps taken before",
    "cause": "str: data, compute or communication",
    "seconds": "float: that it takes for a micro-batch, or to be reached",
    "usual": "float: that others take, their median",
}
_RECOVERED = {
    "step": "int: steps taken before",
    "seconds": "float: in which it answers the server, or runs a micro-batch, now, its median",
    "usual": "float: in which others do",
}
_SYNC = {
    "step": "int: steps taken before",
    "sync": "str: the rule from here on, chosen among those that the strategy allows",
    "reason": "str: why, with what was measured",
    "compute_seconds": "float: of a step, on the slowest rank",
    "exchange_seconds": "float: of a sum of all gradients while nobody computes",
    "message_seconds": "float: of all parameters from each rank to the next; 0: nobody would send them",
    "bits_per_second": "float: of the links, in that sum",
    "step_seconds": "table: by rule, what a step takes or is expected to take",
    "break_even": "table: by rule, the bits per second below which it pays",
}

_ROUTE = {
    "group": "str: whose sums",
    "ranks": "list: of this group",
    "choice": "str: which route sums take up to which size of a buffer",
    "choices": "table: the same by collective; those that were not measured are foretold",
    "source": "str: measured, measured before, or the file of a link profile",
    "routes": "table: by route, what an all_reduce took: alpha, beta and the points that were measured",
}
_BUCKETS = {
    "bucket_bytes": "int: of gradients that are sent together",
    "reason": "str: why, with alpha and beta of the links",
    "source": "str: measured, or the file of a link profile",
}
_CODEC = {
    "codec": "str: chosen among those that the strategy allows; fp32: none of them pays",
    "reason": "str: why, with what was measured",
    "compute_seconds": "float: forward and backward of a step, on the slowest rank",
    "bits_per_second": "float: of the links, in an all_reduce",
    "step_seconds": "table: by codec, what a step is expected to take",
    "break_even": "table: by codec, the bits per second below which it pays",
}

SCHEMA_VERSION = 1
LEVELS = ("debug", "info", "warning", "error")

COMMON_FIELDS: Mapping[str, str] = MappingProxyType(
    {
        "event": "str: the name of the event",
        "level": "str: debug, info, warning or error",
        "rank": "int: global rank that the record is about",
        "time": "float: when it was written, seconds since the epoch",
    }
)


class EventSchema(NamedTuple):
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

EVENT_SCHEMAS: Mapping[str, EventSchema] = MappingProxyType(
    {
        "run": EventSchema("info", False, _RUN),
        "precision": EventSchema("info", False, _PRECISION),
        "threads": EventSchema("info", False, _THREADS),
        "optimizer": EventSchema("info", False, _OPTIMIZER),
        "compile": EventSchema("info", True, _COMPILE),
        "stages": EventSchema("info", False, _STAGES),
        "recompute": EventSchema("info", False, _RECOMPUTE),
        "servers": EventSchema("info", False, _SERVERS),
        "route": EventSchema("info", False, _ROUTE),
        "buckets": EventSchema("info", False, _BUCKETS),
        "codec": EventSchema("info", False, _CODEC),
        "resume": EventSchema(
            "info", True, {"step": "int: goes on from here", "checkpoint": "str: its name"}
        ),
        "step": EventSchema("info", False, _STEP),
        "ranks": EventSchema("info", False, _RANKS),
        "evaluation": EventSchema("info", True, _EVALUATION),
        "early-stop": EventSchema(
            "info",
            True,
            {
                "step": "int: steps taken before it",
                "metric": "str: evaluate.metric",
                "best": "float: its best value",
                "best_step": "int: steps taken before that",
            },
        ),
        "stop": EventSchema(
            "info",
            True,
            {"step": "int: steps taken before it", "reason": "str: what the callback that asked said"},
        ),
        "checkpoint": EventSchema("info", True, {"step": "int: saved state", "path": "str: where it is"}),
        "hash": EventSchema(
            "info",
            True,
            {
                "step": "int: index of the last step before it",
                "sha256": "str: of the whole state, in hex",
                "equal": "bool: ranks hold the same bits of what they have in common",
            },
        ),
        "divergence": EventSchema(
            "error",
            True,
            {
                "step": "int: index of the last step before it",
                "tensor": "str: the first that differs",
                "ranks": "list: those that differ from the others",
            },
        ),
        "communication": EventSchema(
            "info", False, {"rows": "table: by operation and group: calls, bytes, seconds"}
        ),
        "cache": EventSchema(
            "debug", False, {"hits": "int: samples from memory", "lookups": "int: samples asked for"}
        ),
        "skip": EventSchema("warning", True, _SKIP),
        "lower-rate": EventSchema("warning", True, _LOWER_RATE),
        "roll-back": EventSchema("warning", True, _ROLL_BACK),
        "lost": EventSchema("warning", True, _LOST),
        "sync": EventSchema("info", False, _SYNC),
        "switch": EventSchema("info", True, _SWITCH),
        "shares": EventSchema("info", True, _SHARES),
        "samples": EventSchema("info", False, _SAMPLES),
        "gain": EventSchema("info", True, _GAIN),
        "straggler": EventSchema("warning", True, _STRAGGLER),
        "recovered": EventSchema("info", True, _RECOVERED),
        "work": EventSchema("info", False, _WORK),
        "arrivals": EventSchema("debug", False, _ARRIVALS),
        "warning": EventSchema("warning", True, {"text": "str: what the user should know"}),
        "error": EventSchema("error", True, _ERROR),
        "end": EventSchema(
            "info",
            False,
            {"step": "int: steps taken", "stopped": "bool: a signal ended it before its last step"},
        ),
    }
)


def event_level(event: str) -> str:
    """How grave an event is."""
    return EVENT_SCHEMAS[event].level if event in EVENT_SCHEMAS else "info"


def shows_on_terminal(event: str) -> bool:
    """Whether a person should see it as it happens."""
    return EVENT_SCHEMAS[event].spoken if event in EVENT_SCHEMAS else True


def passes_level(event: str, lowest: str) -> bool:
    """Whether a file that begins at level `lowest` holds an event."""
    return LEVELS.index(event_level(event)) >= LEVELS.index(lowest)


def find_schema_errors(record: Mapping[str, Any]) -> list[str]:
    """What a record lacks or has too much, by the schema; empty if it fits."""
    name = str(record.get("event"))
    if name not in EVENT_SCHEMAS:
        return [f"unknown event {name}"]
    fields = {**COMMON_FIELDS, **EVENT_SCHEMAS[name].fields}
    found = [f"{name} lacks {field}" for field in fields if field not in record]
    found += [
        f"{name} has {field}, which the schema does not know" for field in record if field not in fields
    ]
    return found + [
        f"{name}.{field} is no {fields[field].partition(':')[0]}: {value!r}"
        for field, value in record.items()
        if field in fields and not _has_type(value, fields[field].partition(":")[0])
    ]


def _has_type(value: Any, kind: str) -> bool:
    """Numbers that are not finite are written as their names."""
    if kind == "float":
        return type(value) in (int, float) or value in ("nan", "inf", "-inf")
    return type(value) is {"int": int, "str": str, "bool": bool, "table": dict, "list": list}[kind]
