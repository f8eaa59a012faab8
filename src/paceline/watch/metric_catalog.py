"""The catalog of metrics: the name, unit, kind, labels and meaning of every number that a run exports.

Each metric of a run is computed from the records of `metrics.jsonl` and of the system sampler; those of
`SERVER_METRICS` are kept by `paceline.serving.server`. The exporter, the dashboard, the alert rules, the
live page and docs/reference/exported-metrics.md are generated from this table. Invariant: no other module
spells a name that begins with `paceline_`; a test searches for one. Imports no torch.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal, NamedTuple

MetricKind = Literal["gauge", "counter"]


class MetricSpec(NamedTuple):
    """A metric and the records that it is computed from.

    A gauge is the newest value of a field. A counter is the sum of the field over all records, those of steps
    that were taken again after a resume included, so it never falls.

    Args:
        name: as Prometheus has it; a counter ends in `_total`.
        kind: gauge or counter.
        unit: "seconds", "bytes", ...; empty for a plain number.
        labels: names of labels; "rank" and "host" are those of the record, another one is the key of a table.
        meaning: one line.
        event: the records that it is computed from; empty for one of `STATE_METRICS`.
        field: the field of these records; a table gives one series per key. Empty: their number.
    """

    name: str
    kind: MetricKind
    unit: str
    labels: tuple[str, ...]
    meaning: str
    event: str
    field: str = ""


_RANK = ("rank",)

_SAMPLED: tuple[MetricSpec, ...] = (
    MetricSpec(
        "paceline_process_cpu_seconds_total",
        "counter",
        "seconds",
        ("rank", "mode"),
        "CPU time of a rank and of the processes that it started",
        "process",
        "cpu_seconds",
    ),
    MetricSpec(
        "paceline_process_memory_bytes",
        "gauge",
        "bytes",
        ("rank", "kind"),
        "memory of these processes",
        "process",
        "memory_bytes",
    ),
    MetricSpec(
        "paceline_process_disk_bytes_total",
        "counter",
        "bytes",
        ("rank", "direction"),
        "bytes that they read from and wrote to disks",
        "process",
        "disk_bytes",
    ),
    MetricSpec(
        "paceline_process_threads", "gauge", "", ("rank",), "threads of these processes", "process", "threads"
    ),
    MetricSpec(
        "paceline_link_sent_bytes_total",
        "counter",
        "bytes",
        ("rank", "peer"),
        "bytes sent by TCP",
        "process",
        "link_sent_bytes",
    ),
    MetricSpec(
        "paceline_link_received_bytes_total",
        "counter",
        "bytes",
        ("rank", "peer"),
        "bytes received by TCP",
        "process",
        "link_received_bytes",
    ),
    MetricSpec(
        "paceline_link_retransmits_total",
        "counter",
        "",
        ("rank", "peer"),
        "TCP segments sent again",
        "process",
        "link_retransmits",
    ),
    MetricSpec(
        "paceline_link_round_trip_seconds",
        "gauge",
        "seconds",
        ("rank", "peer"),
        "round-trip time of the busiest TCP connection",
        "process",
        "link_round_trip_seconds",
    ),
    MetricSpec("paceline_host_cores", "gauge", "", ("host",), "cores of the host", "system", "cores"),
    MetricSpec("paceline_host_load", "gauge", "", ("host",), "load average of a minute", "system", "load"),
    MetricSpec(
        "paceline_host_cpu_seconds_total",
        "counter",
        "seconds",
        ("host", "mode"),
        "CPU time of all processes",
        "system",
        "cpu_seconds",
    ),
    MetricSpec(
        "paceline_host_memory_bytes",
        "gauge",
        "bytes",
        ("host", "kind"),
        "memory of the host",
        "system",
        "memory_bytes",
    ),
    MetricSpec(
        "paceline_host_stalled_seconds_total",
        "counter",
        "seconds",
        ("host", "resource"),
        "time in which some process waited for cpu, memory or io",
        "system",
        "stalled_seconds",
    ),
    MetricSpec(
        "paceline_host_network_sent_bytes_total",
        "counter",
        "bytes",
        ("host", "interface"),
        "bytes sent",
        "system",
        "network_sent_bytes",
    ),
    MetricSpec(
        "paceline_host_network_received_bytes_total",
        "counter",
        "bytes",
        ("host", "interface"),
        "bytes received",
        "system",
        "network_received_bytes",
    ),
    MetricSpec(
        "paceline_host_tcp_retransmits_total",
        "counter",
        "",
        ("host",),
        "TCP segments sent again by any process",
        "system",
        "tcp_retransmits",
    ),
    MetricSpec(
        "paceline_host_disk_read_bytes_total",
        "counter",
        "bytes",
        ("host", "disk"),
        "bytes read from the disk",
        "system",
        "disk_read_bytes",
    ),
    MetricSpec(
        "paceline_host_disk_written_bytes_total",
        "counter",
        "bytes",
        ("host", "disk"),
        "bytes written to the disk",
        "system",
        "disk_written_bytes",
    ),
    MetricSpec(
        "paceline_host_folder_bytes",
        "gauge",
        "bytes",
        ("host", "kind"),
        "space where the run folder is",
        "system",
        "folder_bytes",
    ),
    MetricSpec(
        "paceline_host_temperature_celsius",
        "gauge",
        "celsius",
        ("host", "sensor"),
        "temperature",
        "system",
        "temperature_celsius",
    ),
    MetricSpec(
        "paceline_host_energy_joules_total",
        "counter",
        "joules",
        ("host", "domain"),
        "energy by RAPL",
        "system",
        "energy_joules",
    ),
    MetricSpec(
        "paceline_gpu_utilization",
        "gauge",
        "",
        ("host", "gpu"),
        "fraction of time in which a kernel ran",
        "system",
        "gpu_utilization",
    ),
    MetricSpec(
        "paceline_gpu_memory_bytes",
        "gauge",
        "bytes",
        ("host", "gpu"),
        "memory in use",
        "system",
        "gpu_memory_bytes",
    ),
    MetricSpec(
        "paceline_gpu_temperature_celsius",
        "gauge",
        "celsius",
        ("host", "gpu"),
        "temperature",
        "system",
        "gpu_temperature_celsius",
    ),
    MetricSpec(
        "paceline_gpu_power_watts", "gauge", "watts", ("host", "gpu"), "power", "system", "gpu_power_watts"
    ),
    MetricSpec(
        "paceline_gpu_energy_joules_total",
        "counter",
        "joules",
        ("host", "gpu"),
        "energy",
        "system",
        "gpu_energy_joules",
    ),
)
"""Metrics of the system sampler (`log.sample_seconds`)."""

METRICS: tuple[MetricSpec, ...] = (
    MetricSpec("paceline_planned_steps", "gauge", "", (), "length of the run in steps", "run", "num_steps"),
    MetricSpec("paceline_ranks", "gauge", "", (), "number of processes", "run", "ranks"),
    MetricSpec(
        "paceline_starts_total", "counter", "", (), "times that the run was started or resumed", "run"
    ),
    MetricSpec("paceline_step", "gauge", "", (), "index of the newest step, from 0", "step", "step"),
    MetricSpec("paceline_epoch", "gauge", "", (), "index of the epoch, from 0", "step", "epoch"),
    MetricSpec(
        "paceline_rounds_total", "counter", "", (), "rounds taken, those taken again included", "step"
    ),
    MetricSpec(
        "paceline_samples_total", "counter", "", (), "samples used, all replicas", "step", "num_samples"
    ),
    MetricSpec(
        "paceline_items_total",
        "counter",
        "",
        (),
        "samples or tokens, as the loss counts",
        "step",
        "num_items",
    ),
    MetricSpec("paceline_loss", "gauge", "", (), "mean loss of the newest step", "step", "loss"),
    MetricSpec(
        "paceline_metric", "gauge", "", ("metric",), "mean of a metric in the newest step", "step", "metrics"
    ),
    MetricSpec(
        "paceline_gradient_norm", "gauge", "", (), "norm of the gradient before the clip", "step", "grad_norm"
    ),
    MetricSpec("paceline_learning_rate", "gauge", "", (), "rate of the first parameter group", "step", "lr"),
    MetricSpec(
        "paceline_loss_scale", "gauge", "", (), "factor of the loss, 1 unless fp16", "step", "loss_scale"
    ),
    MetricSpec(
        "paceline_step_seconds", "gauge", "seconds", (), "wall time of the newest round", "step", "seconds"
    ),
    MetricSpec(
        "paceline_step_seconds_total", "counter", "seconds", (), "wall time of all rounds", "step", "seconds"
    ),
    MetricSpec(
        "paceline_phase_seconds",
        "gauge",
        "seconds",
        ("phase",),
        "the newest round on rank 0 by phase",
        "step",
        "phases",
    ),
    MetricSpec(
        "paceline_samples_per_second",
        "gauge",
        "",
        (),
        "samples per second of the newest round",
        "step",
        "samples_per_second",
    ),
    MetricSpec(
        "paceline_rank_seconds_total", "counter", "seconds", _RANK, "wall time of rounds", "ranks", "seconds"
    ),
    MetricSpec("paceline_rank_rounds_total", "counter", "", _RANK, "rounds", "ranks", "rounds"),
    MetricSpec(
        "paceline_rank_slowest_seconds",
        "gauge",
        "seconds",
        _RANK,
        "slowest round of the newest window",
        "ranks",
        "slowest_seconds",
    ),
    MetricSpec(
        "paceline_rank_phase_seconds_total",
        "counter",
        "seconds",
        ("rank", "phase"),
        "time by phase",
        "ranks",
        "phases",
    ),
    MetricSpec(
        "paceline_rank_waiting_seconds_total",
        "counter",
        "seconds",
        _RANK,
        "waiting for slower ranks",
        "ranks",
        "waiting_seconds",
    ),
    MetricSpec(
        "paceline_rank_exposed_seconds_total",
        "counter",
        "seconds",
        _RANK,
        "waiting for collectives",
        "ranks",
        "exposed_seconds",
    ),
    MetricSpec(
        "paceline_rank_hidden_seconds_total",
        "counter",
        "seconds",
        _RANK,
        "communication that overlapped with other work",
        "ranks",
        "hidden_seconds",
    ),
    MetricSpec(
        "paceline_rank_sent_bytes_total", "counter", "bytes", _RANK, "bytes sent", "ranks", "sent_bytes"
    ),
    MetricSpec(
        "paceline_rank_cpu_seconds_total",
        "counter",
        "seconds",
        _RANK,
        "CPU time in rounds",
        "ranks",
        "cpu_seconds",
    ),
    MetricSpec(
        "paceline_rank_proportional_bytes",
        "gauge",
        "bytes",
        _RANK,
        "memory of the process, shared pages in parts",
        "ranks",
        "proportional_bytes",
    ),
    MetricSpec(
        "paceline_rank_peak_bytes",
        "gauge",
        "bytes",
        _RANK,
        "peak memory of the process",
        "ranks",
        "peak_bytes",
    ),
    MetricSpec(
        "paceline_evaluations_total", "counter", "", (), "evaluations on held-out samples", "evaluation"
    ),
    MetricSpec("paceline_evaluation_loss", "gauge", "", (), "mean over held-out items", "evaluation", "loss"),
    MetricSpec(
        "paceline_evaluation_metric",
        "gauge",
        "",
        ("metric",),
        "mean of a metric over held-out items",
        "evaluation",
        "metrics",
    ),
    MetricSpec("paceline_checkpoints_total", "counter", "", (), "checkpoints saved", "checkpoint"),
    MetricSpec(
        "paceline_checkpoint_step", "gauge", "", (), "steps in the newest checkpoint", "checkpoint", "step"
    ),
    MetricSpec("paceline_skipped_updates_total", "counter", "", (), "updates that health skipped", "skip"),
    MetricSpec(
        "paceline_roll_backs_total", "counter", "", (), "returns to an earlier checkpoint", "roll-back"
    ),
    MetricSpec(
        "paceline_divergences_total",
        "counter",
        "",
        (),
        "checks in which copies of ranks differed",
        "divergence",
    ),
    MetricSpec(
        "paceline_copies_equal",
        "gauge",
        "",
        (),
        "1 if copies of ranks had equal bits when last checked",
        "hash",
        "equal",
    ),
    MetricSpec(
        "paceline_stragglers_total",
        "counter",
        "",
        _RANK,
        "times that the rank was named as slow",
        "straggler",
    ),
    MetricSpec("paceline_lost_workers_total", "counter", "", _RANK, "times that the rank was lost", "lost"),
    MetricSpec("paceline_warnings_total", "counter", "", (), "warnings", "warning"),
    MetricSpec("paceline_errors_total", "counter", "", (), "errors that ended the run", "error"),
    MetricSpec("paceline_ends_total", "counter", "", (), "starts that ended by themselves", "end"),
    *_SAMPLED,
)

STATUS = MetricSpec("paceline_status", "gauge", "", ("status",), "1 for the state of the run, else 0", "")
DAMAGED_LINES = MetricSpec("paceline_damaged_lines", "gauge", "", (), "lines that are no valid records", "")
UPDATED = MetricSpec(
    "paceline_updated_timestamp_seconds", "gauge", "seconds", (), "time of the newest record, since 1970", ""
)
STATE_METRICS = (STATUS, DAMAGED_LINES, UPDATED)
"""Metrics of the run as a whole, which no record has."""

_S = "seconds"
SERVER_REQUESTS = MetricSpec(
    "paceline_server_requests_total", "counter", "", ("status",), "answers by HTTP status", ""
)
SERVER_TOKENS = MetricSpec(
    "paceline_server_tokens_total", "counter", "", ("kind",), "tokens of prompts and generated ones", ""
)
SERVER_STEPS = MetricSpec("paceline_server_steps_total", "counter", "", (), "steps of the engine", "")
SERVER_STEP_SECONDS = MetricSpec(
    "paceline_server_step_seconds_total", "counter", _S, (), "time in steps of the engine", ""
)
SERVER_CANCELLED = MetricSpec(
    "paceline_server_cancelled_total", "counter", "", (), "texts that ended because their client left", ""
)
SERVER_SLOTS = MetricSpec("paceline_server_slots", "gauge", "", ("state",), "slots that are used or free", "")
SERVER_QUEUED = MetricSpec("paceline_server_queued", "gauge", "", (), "texts that wait for a slot", "")
SERVER_FIRST_TOKEN = MetricSpec(
    "paceline_server_first_token_seconds",
    "gauge",
    _S,
    ("quantile",),
    "time from a request to its first token, of the last 1,000 texts",
    "",
)
SERVER_BETWEEN_TOKENS = MetricSpec(
    "paceline_server_between_tokens_seconds",
    "gauge",
    _S,
    ("quantile",),
    "time between two tokens of a text, the last 1,000 of them",
    "",
)
SERVER_METRICS = (
    SERVER_REQUESTS,
    SERVER_TOKENS,
    SERVER_STEPS,
    SERVER_STEP_SECONDS,
    SERVER_CANCELLED,
    SERVER_SLOTS,
    SERVER_QUEUED,
    SERVER_FIRST_TOKEN,
    SERVER_BETWEEN_TOKENS,
)
"""Metrics of `paceline serve`, which belong to no run."""

METRICS_BY_NAME: Mapping[str, MetricSpec] = {metric.name: metric for metric in (*METRICS, *STATE_METRICS)}

NOT_EXPORTED: Mapping[str, Mapping[str, str]] = {
    "step": {
        "applied": "counted by paceline_skipped_updates_total, and by overflows in the loss scale",
        "sent_bytes": "a total of rank 0 that begins again with each start; ranks have theirs",
        "rates": "the first group is paceline_learning_rate; one series a group can be thousands",
        "stops": "the record `stop` says why",
    },
    "ranks": {"step": "is the newest step, up to the window"},
    "evaluation": {
        "step": "is the newest step",
        "num_samples": "does not change in a run",
        "num_items": "does not change in a run",
    },
    "process": {
        "seconds": "rate() of Prometheus knows the time",
        "pid": "differs with every start",
        "processes": "their threads are counted",
    },
    "system": {
        "host": "is the label of the host",
        "seconds": "rate() of Prometheus knows the time",
        "unavailable": "words",
    },
}
"""The fields of rows that no metric is computed from, and why; a test finds a field that is in neither."""
