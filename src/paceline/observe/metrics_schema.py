"""The schema of `metrics.jsonl`: all events, the level of each, and the type and meaning of their fields.

Invariant: a run writes exactly these fields; `docs/reference/metrics.md` is generated from this table, and
tests check real runs and the page against it. An event that is not in the table has level "info".
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any, NamedTuple

_STAGES = {
    "stages": "str: modules of each stage, by measured time",
    "link_seconds": "list: forward and backward of each module",
    "stage_seconds": "list: seconds of each stage",
    "stage_bytes": "list: planned peak of each stage; empty without memory.budget",
    "fastest": "str: modules of each stage of the fastest cut if it exceeds the budget, else empty",
    "imbalance": "float: seconds of the slowest stage / mean of all stages",
}
_RECOMPUTE = {
    "recompute": "str: what backward computes again: none, blocks, segments, or indices of blocks",
    "peak_bytes": "int: planned peak of the largest rank",
    "budget_bytes": "int: memory.budget",
    "without_bytes": "int: the same without recomputation",
    "block_seconds": "list: measured forward of each block; empty if no measurement was needed",
    "seconds": "float: extra time of a micro-batch",
}

_PRECISION = {"compute": "str: number format that was chosen", "reason": "str: why, with the measurements"}
_THREADS = {"number": "int: intra-op threads of each process on the host of rank 0", "reason": "str: why"}
_OPTIMIZER = {
    "name": "str: as in the recipe",
    "fused": "bool: whether PyTorch's fused kernel is used",
    "reason": "str: why or why not",
}
_COMPILE = {
    "seconds": "float: time of the first step beyond that of a later one",
    "steps": "int: number of later steps that take the same time",
}

_SKIP = {
    "step": "int: index of the step that was skipped",
    "reason": "str: what was wrong, and on which rank",
}
_LOWER_RATE = {
    "step": "int: index of the step at which divergence was detected",
    "multiplier": "float: factor of every learning rate from now on",
    "reason": "str: what was wrong, and on which rank",
}
_ROLL_BACK = {
    "step": "int: index of the step that went wrong",
    "checkpoint": "str: name of the checkpoint that was loaded",
    "left_out": "list: first and last index of the steps that are skipped",
    "reason": "str: what was wrong, and on which rank",
}

_SERVERS = {
    "partition": "str: how tensors are split among servers",
    "bytes": "list: bytes of parameters, by server",
}

_SHARES = {
    "step": "int: index of the first step with these shares",
    "shares": "list: shards of a batch that each replica runs",
    "seconds": "list: seconds of a shard on each replica",
}
_SAMPLES = {
    "step": "int: steps taken before",
    "taken": "int: samples that all replicas have processed since the run was started or resumed",
    "applied": "int: those whose update was applied",
    "dropped": "int: those whose update was dropped; applied + dropped = taken",
}
_GAIN = {
    "step": "int: steps taken before",
    "before": "float: seconds of a step on this rank with the shares or the rule before",
    "after": "float: the same with the current ones",
    "times": "float: speed-up in items per second",
}
_STRAGGLER = {
    "step": "int: steps taken before",
    "cause": "str: data, compute or communication",
    "seconds": "float: time of a micro-batch, or of a message to it",
    "usual": "float: median of the other ranks",
}
_RECOVERED = {
    "step": "int: steps taken before",
    "seconds": "float: median time of an answer to the server, or of a micro-batch, now",
    "usual": "float: the same of the other ranks",
}
_SYNC = {
    "step": "int: steps taken before",
    "sync": "str: the rule from here on, chosen from those that the strategy allows",
    "reason": "str: why, with the measurements",
    "compute_seconds": "float: computation of a step on the slowest rank",
    "exchange_seconds": "float: an all_reduce of all gradients without overlap",
    "message_seconds": "float: sending all parameters from each rank to the next; 0 if no rule needs it",
    "bits_per_second": "float: bandwidth of the links in that all_reduce",
    "step_seconds": "table: measured or expected time of a step, by rule",
    "break_even": "table: bits per second below which it pays off, by rule",
}

_ROUTE = {
    "group": "str: name of the group",
    "ranks": "list: ranks of this group",
    "choice": "str: route by buffer size",
    "choices": "table: the same by collective; those that were not measured are predicted",
    "source": "str: measured, measured before, or the file of a link profile",
    "routes": "table: alpha, beta and measurements of an all_reduce, by route",
}
_BUCKETS = {
    "bucket_bytes": "int: size of a bucket of gradients",
    "reason": "str: why, with alpha and beta of the links",
    "source": "str: measured, or the file of a link profile",
}
_CODEC = {
    "codec": "str: chosen from those that the strategy allows; fp32 if none pays off",
    "reason": "str: why, with the measurements",
    "compute_seconds": "float: forward and backward of a step on the slowest rank",
    "bits_per_second": "float: bandwidth of the links in an all_reduce",
    "step_seconds": "table: expected time of a step, by codec",
    "break_even": "table: bits per second below which it pays off, by codec",
}

_TIMELINE = {
    "step": "int: index of the step, from 0",
    "planned": "list: of the table: time, stage, operation, micro-batch, chunk, part, duration; in forwards",
    "measured": "list: the same as it ran, on the first replica; in seconds",
    "planned_idle": "float: share of the time in which stages are idle, of the table",
    "measured_idle": "float: the same as it ran",
}
_PROFILE = {
    "step": "int: index of the first step that was recorded",
    "end": "int: index of the one after the last",
    "path": "str: folder of the profiles of all ranks; with runtime.profile also rank-N.json, Chrome traces",
}
_TRACE = {
    "step": "int: index of the first step that was recorded",
    "end": "int: index of the one after the last",
    "spans": "int: spans of rank 0",
    "dropped": "int: spans of rank 0 that were not kept",
    "path": "str: folder of the spans, rank-N.json for each rank, which `paceline trace` merges",
}

_PROCESS = {
    "seconds": "float: time since the sample before, to which counters refer",
    "pid": "int: process of this rank",
    "processes": "int: this one and those that it has started",
    "threads": "int: of these processes",
    "cpu_seconds": "table: CPU time of these processes: user and system",
    "memory_bytes": "table: rss, and where the kernel shows it pss, in which shared pages count in part",
    "disk_bytes": "table: bytes read from and written to disks; not what the page cache had",
    "link_sent_bytes": "table: bytes of TCP by peer: a rank of this host, or the address of a host",
    "link_received_bytes": "table: the same, received",
    "link_retransmits": "table: TCP segments sent again, by peer",
    "link_round_trip_seconds": "table: smoothed round-trip time of the busiest connection, by peer",
}
_SYSTEM = {
    "host": "str: its name",
    "seconds": "float: time since the sample before, to which counters refer",
    "cores": "int: cores of the host",
    "load": "float: load average of a minute",
    "cpu_seconds": "table: CPU time by mode: user, system, idle, iowait, steal, ...",
    "memory_bytes": "table: total, available and swap in use",
    "stalled_seconds": "table: time in which some process waited for cpu, memory or io",
    "network_sent_bytes": "table: by interface",
    "network_received_bytes": "table: by interface",
    "tcp_retransmits": "float: TCP segments sent again by any process",
    "disk_read_bytes": "table: by disk",
    "disk_written_bytes": "table: by disk",
    "folder_bytes": "table: total and free space where the run folder is",
    "temperature_celsius": "table: by sensor",
    "energy_joules": "table: by RAPL domain",
    "gpu_utilization": "table: fraction of time in which a kernel ran, by GPU",
    "gpu_memory_bytes": "table: in use, by GPU",
    "gpu_temperature_celsius": "table: by GPU",
    "gpu_power_watts": "table: by GPU",
    "gpu_energy_joules": "table: by GPU",
    "unavailable": "table: why a part is missing, by its name",
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
    """The schema of one kind of record.

    Args:
        level: one of `LEVELS`.
        on_terminal: whether the terminal shows it as a line of its own.
        fields: "type: meaning and unit" by name, in addition to `COMMON_FIELDS`.
    """

    level: str
    on_terminal: bool
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
    "applied": "bool: false if the update was skipped: an overflow in fp16, or a step that health skipped",
    "loss_scale": "float: factor of the loss, 1 unless fp16",
    "stops": "int: ranks that received a request to stop",
    "seconds": "float: wall time of the round on rank 0",
    "phases": "table: its seconds on rank 0 by phase",
    "sent_bytes": "float: bytes that rank 0 has sent since it started, by the closed form",
    "samples_per_second": "float: num_samples / seconds",
}
_RANKS = {
    "step": "int: last step of the window",
    "rounds": "int: rounds in the window",
    "seconds": "float: wall time of these rounds on this rank",
    "slowest_seconds": "float: wall time of the slowest of them on this rank",
    "phases": "table: seconds by phase; `seconds` also has time that belongs to no phase",
    "waiting_seconds": "float: part of communication in which this rank waited for slower ones",
    "exposed_seconds": "float: time in which this rank waited for collectives; the rest of the phase"
    " communication is work of its own, such as encoding",
    "hidden_seconds": "float: communication that overlapped with other work of this rank",
    "sent_bytes": "float: bytes that this rank sent in the window, by the closed form",
    "cpu_seconds": "float: CPU time of this rank's process",
    "proportional_bytes": "float: memory of this rank's process now; a page of n processes counts 1 / n",
    "peak_bytes": "float: peak resident memory of this rank's process so far, shared pages in full",
}
_RUN = {
    "schema": "int: version of this table",
    "step": "int: steps taken before",
    "num_steps": "int: length of the run in steps",
    "task": "str: as in the recipe",
    "strategy": "str: with its replicas filled in",
    "ordered": "bool: whether shards are added in the same order on any number of ranks",
    "ranks": "int: number of processes",
    "devices": "str: type of the device of each rank",
    "precision": "str: number format of forward and backward: fp32, bf16 or fp16",
    "threads": "int: intra-op threads of each rank",
    "host": "str: host of rank 0",
    "pid": "int: process of rank 0",
    "process_start": "int: start of that process in clock ticks of its host; 0 if unknown",
    "versions": "table: versions of paceline, torch and Python",
    "parameters": "int: trainable parameters of the model",
    "gradient_bytes": "int: bytes of one whole gradient",
    "tally_bytes": "int: bytes of losses and counts that ranks sum in a step",
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
    "taken": "int: micro-batch groups given to workers since the run began",
    "applied": "int: those whose gradients were applied",
    "dropped": "int: those that were dropped; applied + dropped = taken",
    "staleness": "table: number of applied gradients by staleness, in updates",
}
_ARRIVALS = {
    "step": "int: steps taken before",
    "senders": "list: sender of every message that the server has received since the last such record",
}
_SWITCH = {
    "step": "int: index of the first step with another rule",
    "sync": "str: this rule",
}
_LOST = {
    "step": "int: index of the step that was open",
    "reason": "str: how the rank was lost",
    "workers_left": "int: workers that go on",
}
_MEMBERS = {
    "step": "int: steps taken before the job continued",
    "lost": "list: numbers of the processes that were lost",
    "joined": "list: numbers of the processes that joined; a process keeps its number",
    "ranks": "int: number of processes from here on",
    "takes_over": "bool: another process is rank 0 from here on, and writes the files",
    "seconds": "float: from the failed collective until the job continued",
    "cause": "str: the error with which it was noticed",
}
_PARTITION = {
    "how": "str: federated.partition",
    "clients": "int: number of clients",
    "samples": "int: samples of all clients",
    "smallest": "int: samples of the client with fewest",
    "largest": "int: samples of the client with most",
    "redraws": "int: Dirichlet draws that left a client without samples",
    "names": "list: of the first 50 clients",
    "sizes": "list: samples of the same clients",
    "labels": "list: the first 50 labels; empty if the data shows none",
    "table": "list: of the same clients, a list with the samples of each label",
}
_COHORT = {
    "step": "int: index of the round",
    "clients": "list: names of the clients of the round, by position",
    "left_out": "table: why, by the name of each client that returned no update",
    "samples": "int: samples that the other clients hold",
    "down_bytes": "int: bytes of the weights that the cohort receives",
    "up_bytes": "int: bytes of the updates that it returns",
    "bytes": "table: bytes that each network client received and sent; empty if clients are simulated",
}
_PRIVACY = {
    "secure": "str: federated.secure",
    "released": "list: what the server of a round learns",
    "warning": "str: why there is no privacy at all; empty: nothing of the kind is known",
}
_BUFFER = {
    "step": "int: index of the round",
    "clients": "list: names of the clients whose updates were applied, in this order",
    "works": "list: which of its works each client returned, from 0",
    "ages": "list: by how many rounds each update was late",
    "dropped": "list: client, work and age of each update that was too old",
}
_WIRE = {
    "direction": "str: sent or received",
    "client": "str: name of the client",
    "kind": "str: of the message",
    "fields": "table: its fields",
    "tensors": "list: dtype and shape of each of its tensors",
    "bytes": "int: of the whole message",
}
_ROLLOUT = {
    "step": "int: index of the first update with these rows",
    "environment_steps": "int: steps of all environments so far",
    "episodes": "int: episodes that ended in this iteration",
    "mean_return": "float: their mean return, without a discount; NaN if none ended",
    "mean_length": "float: their mean length in steps",
    "recent_return": "float: mean return of the last 100 episodes that ended",
    "terminated": "int: those that ended by themselves",
    "truncated": "int: those that a time limit ended",
    "version": "int: updates of the weights with which the rows were made",
    "ages": "table: number of rows by their age, in versions of the weights",
    "not_equal": "int: rows of the first minibatch whose log-probability has other bits in the learner than"
    " in the actor; -1 if the loss does not count them",
    "seconds": "table: on rank 0, of policy and environments, and of the exchange of rows",
    "sha256": "str: hash of all rows, in hex",
}
_ERROR = {
    "text": "str: what happened, one line",
    "kind": "str: error, signal, connection, stopped or left (before the first step)",
    "exit_code": "int: exit code of the job if this is the cause",
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
            "info", True, {"step": "int: steps taken before", "checkpoint": "str: its name"}
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
        "plateau": EventSchema(
            "info",
            True,
            {
                "step": "int: steps taken before it",
                "metric": "str: schedule.metric",
                "best": "float: its best value",
                "multiplier": "float: factor of the schedule's rates from here on",
            },
        ),
        "stop": EventSchema(
            "info",
            True,
            {"step": "int: steps taken before it", "reason": "str: as the callback gave it"},
        ),
        "checkpoint": EventSchema("info", True, {"step": "int: saved state", "path": "str: where it is"}),
        "hash": EventSchema(
            "info",
            True,
            {
                "step": "int: index of the last step before it",
                "sha256": "str: hash of the whole state, in hex",
                "equal": "bool: whether all ranks have the same bits of the state that they share",
            },
        ),
        "divergence": EventSchema(
            "error",
            True,
            {
                "step": "int: index of the last step before it",
                "tensor": "str: the first tensor that differs",
                "ranks": "list: ranks that differ from the others",
            },
        ),
        "timeline": EventSchema("info", False, _TIMELINE),
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
        "members": EventSchema("warning", True, _MEMBERS),
        "sync": EventSchema("info", False, _SYNC),
        "switch": EventSchema("info", True, _SWITCH),
        "shares": EventSchema("info", True, _SHARES),
        "samples": EventSchema("info", False, _SAMPLES),
        "gain": EventSchema("info", True, _GAIN),
        "straggler": EventSchema("warning", True, _STRAGGLER),
        "recovered": EventSchema("info", True, _RECOVERED),
        "partition": EventSchema("info", False, _PARTITION),
        "cohort": EventSchema("info", False, _COHORT),
        "privacy": EventSchema("info", False, _PRIVACY),
        "rollout": EventSchema("info", False, _ROLLOUT),
        "buffer": EventSchema("info", False, _BUFFER),
        "wire": EventSchema("debug", False, _WIRE),
        "work": EventSchema("info", False, _WORK),
        "arrivals": EventSchema("debug", False, _ARRIVALS),
        "exporter": EventSchema("info", True, {"address": "str: where Prometheus scrapes"}),
        "profile": EventSchema("info", True, _PROFILE),
        "trace": EventSchema("info", True, _TRACE),
        "process": EventSchema("info", False, _PROCESS),
        "system": EventSchema("info", False, _SYSTEM),
        "warning": EventSchema("warning", True, {"text": "str: the warning"}),
        "error": EventSchema("error", True, _ERROR),
        "end": EventSchema(
            "info",
            False,
            {"step": "int: steps taken", "stopped": "bool: a signal ended it before its last step"},
        ),
    }
)


def event_level(event: str) -> str:
    """Return the level of an event."""
    return EVENT_SCHEMAS[event].level if event in EVENT_SCHEMAS else "info"


def shows_on_terminal(event: str) -> bool:
    """Return whether the terminal shows an event as it happens."""
    return EVENT_SCHEMAS[event].on_terminal if event in EVENT_SCHEMAS else True


def passes_level(event: str, lowest: str) -> bool:
    """Return whether an event has at least level `lowest`."""
    return LEVELS.index(event_level(event)) >= LEVELS.index(lowest)


def find_schema_errors(record: Mapping[str, Any]) -> list[str]:
    """Return what is wrong with a record: missing, unknown and badly typed fields; empty if it fits."""
    name = str(record.get("event"))
    if name not in EVENT_SCHEMAS:
        return [f"unknown event {name}"]
    fields = {**COMMON_FIELDS, **EVENT_SCHEMAS[name].fields}
    missing = [f"{name} lacks {field}" for field in fields if field not in record]
    unknown = [
        f"{name} has {field}, which the schema does not know" for field in record if field not in fields
    ]
    types = {field: text.partition(":")[0] for field, text in fields.items()}
    badly_typed = [
        f"{name}.{field} is no {types[field]}: {value!r}"
        for field, value in record.items()
        if field in fields and not _has_type(value, types[field])
    ]
    return missing + unknown + badly_typed


def _has_type(value: Any, kind: str) -> bool:
    if kind == "float":  # JSON has no NaN and no infinities: sinks write them as strings
        return type(value) in (int, float) or value in ("nan", "inf", "-inf")
    return type(value) is {"int": int, "str": str, "bool": bool, "table": dict, "list": list}[kind]
