"""The queries of Prometheus: the alert rules and the Grafana dashboard, rendered from their tables.

Invariant: a query names metrics of the catalog and labels that they have, and the dashboard has a panel for
every metric. Nothing is sent anywhere: both are files that Prometheus and Grafana load. Imports no torch.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any, Literal, NamedTuple

from paceline.watch.alert_rules import NORMAL_IQR, SHIPPED_RULES, AlertRule
from paceline.watch.metric_catalog import METRICS_BY_NAME, STATUS, UPDATED, MetricSpec

_SCRAPE_SECONDS = 15.0
_MIN_SCRAPES = 20  # in a window of Prometheus: a median of fewer says little
_STARTS = METRICS_BY_NAME["paceline_starts_total"].name


def render_prometheus(rules: Sequence[AlertRule] = SHIPPED_RULES, step_seconds: float = 1.0) -> str:
    """Return the rules as a file for `rule_files` of Prometheus.

    Args:
        step_seconds: seconds of a step: Prometheus knows no steps, so windows and durations are in seconds.
    """
    lines = ["groups:", "- name: paceline", "  rules:"]
    for rule in rules:
        held = max(rule.for_seconds, (rule.for_steps - 1) * step_seconds)
        lines += [
            f"  - alert: {alert_name(rule)}",
            f"    expr: {json.dumps(render_expression(rule, step_seconds))}",
            f"    for: {round(held)}s",
            f"    labels: {{severity: {rule.severity}}}",
            "    annotations:",
            f"      summary: {json.dumps(rule.summary or rule.name)}",
            f"      description: {json.dumps(rule.advice)}",
        ]
    return "\n".join(lines) + "\n"


def alert_name(rule: AlertRule) -> str:
    """Return the name of a rule in Prometheus: "loss-spike" is PacelineLossSpike."""
    return "Paceline" + "".join(word.capitalize() for word in rule.name.split("-"))


def render_expression(rule: AlertRule, step_seconds: float) -> str:
    """Return the condition of a rule in PromQL; series differ by `run` and the labels of the metric.

    A z-score is silent until its window is full, and for a window after each start, as in the engine.
    """
    signal, score = str(rule.signal), render_score(rule, step_seconds)
    met = f"{score} {'>' if rule.direction == 'above' else '<'} {rule.limit:g}"
    seconds = _window_seconds(rule, step_seconds)
    settled = f"{signal} offset {seconds}s unless on (run) changes({_STARTS}[{seconds}s]) > 0"
    match rule.kind:
        case "z-score":
            # NaN is neither above nor below anything.
            return f"{met} and {settled} or {signal} != {signal}"
        case "absence" if rule.signal.metric == UPDATED.name:
            return f'{met} and on (run) {STATUS.name}{{status="running"}} == 1'
        case "absence":
            held = round(rule.limit)
            running = f'{STATUS.name}{{status="running"}} == 1'
            return f"{score} == 0 and {signal} offset {held}s and on (run) {running}"
        case _:
            return met


def render_score(rule: AlertRule, step_seconds: float) -> str:
    """Return what a rule compares with its limit in PromQL; absence of another metric: its changes."""
    signal, seconds = str(rule.signal), _window_seconds(rule, step_seconds)
    match rule.kind:
        case "threshold":
            if rule.per is None:
                return signal
            names = ", ".join(sorted({*rule.signal.where, *rule.per.where}))
            return f"{signal} / ignoring({names}) {rule.per}"
        case "rate":
            is_counter = rule.signal.spec.kind == "counter"
            return f"rate({signal}[{seconds}s])" if is_counter else f"delta({signal}[{seconds}s]) / {seconds}"
        case "z-score":
            low, middle, high = (f"quantile_over_time({q}, {signal}[{seconds}s])" for q in (0.25, 0.5, 0.75))
            spread = f"(({high} - {low}) / {NORMAL_IQR} + {rule.floor:g} * abs({middle}))"
            return f"({signal} - {middle}) / {spread}"
        case "plateau":
            offset = round(max(seconds, rule.window * step_seconds - seconds))
            recent = f"quantile_over_time(0.5, {signal}[{seconds}s])"
            before = f"quantile_over_time(0.5, {signal}[{seconds}s] offset {offset}s)"
            return f"({before} - {recent}) / abs({before})"
        case "absence" if rule.signal.metric == UPDATED.name:
            return f"time() - {signal}"
        case "absence":
            return f"changes({signal}[{round(rule.limit)}s])"


def _window_seconds(rule: AlertRule, step_seconds: float) -> int:
    """Return the range over which a rule looks back; of a plateau an eighth of its window."""
    steps = max(1, rule.window // 8) if rule.kind == "plateau" else rule.window
    return round(max(_MIN_SCRAPES * _SCRAPE_SECONDS, steps * step_seconds))


# Grafana

PanelForm = Literal["lines", "stack", "total", "age", "state"]
"""lines, stack: gauges, and counters per second. total: counters as they are. age: seconds since a timestamp.
state: the labels of the series that are 1."""


class Panel(NamedTuple):
    """A panel of the dashboard.

    Args:
        title: its title.
        metrics: names in the catalog, all of one unit.
        form: how they are drawn.
    """

    title: str
    metrics: tuple[str, ...]
    form: PanelForm = "lines"


DASHBOARD: tuple[tuple[str, tuple[Panel, ...]], ...] = (
    (
        "Run",
        (
            Panel("State", ("paceline_status",), "state"),
            Panel("Step", ("paceline_step", "paceline_planned_steps")),
            Panel("Since the newest record", ("paceline_updated_timestamp_seconds",), "age"),
            Panel("Loss", ("paceline_loss", "paceline_evaluation_loss")),
            Panel("Metrics", ("paceline_metric", "paceline_evaluation_metric")),
            Panel("Samples per second", ("paceline_samples_per_second",)),
            Panel("Rank 0 by phase", ("paceline_phase_seconds",), "stack"),
            Panel("Time of a round", ("paceline_step_seconds",)),
            Panel("Gradient norm", ("paceline_gradient_norm",)),
            Panel("Learning rate", ("paceline_learning_rate",)),
            Panel("Loss scale", ("paceline_loss_scale",)),
            Panel("Epoch", ("paceline_epoch",)),
            Panel("Rounds", ("paceline_rounds_total",)),
            Panel("Samples and items", ("paceline_samples_total", "paceline_items_total")),
            Panel("Share of time in rounds", ("paceline_step_seconds_total",)),
        ),
    ),
    (
        "Ranks",
        (
            Panel("Time by phase", ("paceline_rank_phase_seconds_total",)),
            Panel("Waiting for slower ranks", ("paceline_rank_waiting_seconds_total",)),
            Panel(
                "Communication",
                ("paceline_rank_exposed_seconds_total", "paceline_rank_hidden_seconds_total"),
            ),
            Panel("Bytes sent", ("paceline_rank_sent_bytes_total",)),
            Panel("Slowest round", ("paceline_rank_slowest_seconds",)),
            Panel("Memory", ("paceline_rank_proportional_bytes", "paceline_rank_peak_bytes")),
            Panel("CPUs in rounds", ("paceline_rank_cpu_seconds_total",)),
            Panel("Share of time in rounds of a rank", ("paceline_rank_seconds_total",)),
            Panel("Rounds of a rank", ("paceline_rank_rounds_total",)),
        ),
    ),
    (
        "Events",
        (
            Panel("Starts and ends", ("paceline_starts_total", "paceline_ends_total"), "total"),
            Panel(
                "Evaluations and checkpoints",
                ("paceline_evaluations_total", "paceline_checkpoints_total"),
                "total",
            ),
            Panel("Newest checkpoint", ("paceline_checkpoint_step",)),
            Panel("Warnings and errors", ("paceline_warnings_total", "paceline_errors_total"), "total"),
            Panel(
                "Health",
                ("paceline_skipped_updates_total", "paceline_roll_backs_total", "paceline_divergences_total"),
                "total",
            ),
            Panel("Copies equal", ("paceline_copies_equal",)),
            Panel(
                "Stragglers and lost workers",
                ("paceline_stragglers_total", "paceline_lost_workers_total"),
                "total",
            ),
            Panel("Number of ranks", ("paceline_ranks",)),
            Panel("Damaged lines", ("paceline_damaged_lines",)),
        ),
    ),
    (
        "Processes",
        (
            Panel("CPUs of a rank", ("paceline_process_cpu_seconds_total",)),
            Panel("Memory of a rank", ("paceline_process_memory_bytes",)),
            Panel("Disk of a rank", ("paceline_process_disk_bytes_total",)),
            Panel("Threads", ("paceline_process_threads",)),
            Panel("Links", ("paceline_link_sent_bytes_total", "paceline_link_received_bytes_total")),
            Panel("Retransmits of links", ("paceline_link_retransmits_total",)),
            Panel("Round trip of links", ("paceline_link_round_trip_seconds",)),
        ),
    ),
    (
        "Hosts",
        (
            Panel("Load", ("paceline_host_load", "paceline_host_cores")),
            Panel("CPUs", ("paceline_host_cpu_seconds_total",)),
            Panel("Memory of the host", ("paceline_host_memory_bytes",)),
            Panel("Stalls", ("paceline_host_stalled_seconds_total",)),
            Panel(
                "Network",
                ("paceline_host_network_sent_bytes_total", "paceline_host_network_received_bytes_total"),
            ),
            Panel("TCP retransmits", ("paceline_host_tcp_retransmits_total",)),
            Panel("Disks", ("paceline_host_disk_read_bytes_total", "paceline_host_disk_written_bytes_total")),
            Panel("Space of the run folder", ("paceline_host_folder_bytes",)),
            Panel("Temperature", ("paceline_host_temperature_celsius",)),
            Panel("Power by RAPL", ("paceline_host_energy_joules_total",)),
        ),
    ),
    (
        "GPUs",
        (
            Panel("Utilization", ("paceline_gpu_utilization",)),
            Panel("GPU memory", ("paceline_gpu_memory_bytes",)),
            Panel("GPU temperature", ("paceline_gpu_temperature_celsius",)),
            Panel("Power", ("paceline_gpu_power_watts",)),
            Panel("Power by energy", ("paceline_gpu_energy_joules_total",)),
        ),
    ),
)
"""The rows of the dashboard; a metric that is in none of them has a panel of its own in the last row."""

_UNITS = {
    "": "short",
    "seconds": "s",
    "bytes": "bytes",
    "celsius": "celsius",
    "joules": "joule",
    "watts": "watt",
}
_UNITS_PER_SECOND = {"": "cps", "seconds": "short", "bytes": "Bps", "joules": "watt"}
"""Units of Grafana by those of the catalog; seconds per second are a plain number: a share, or CPUs."""

_SOURCE = {"type": "prometheus", "uid": "${datasource}"}
_WIDTH, _HEIGHT, _COLUMNS = 8, 7, 24


def render_dashboard() -> str:
    """Return the Grafana dashboard of all metrics as JSON, for its import page or for provisioning.

    Its variables choose the data source, the runs and the ranks.
    """
    drawn = {name for _, panels in DASHBOARD for panel in panels for name in panel.metrics}
    more = tuple(Panel(name, (name,)) for name in METRICS_BY_NAME if name not in drawn)
    rows = (*DASHBOARD, ("More", more)) if more else DASHBOARD
    panels: list[dict[str, Any]] = []
    y = 0
    for title, members in rows:
        head = {"type": "row", "title": title, "collapsed": False, "panels": []}
        panels.append(head | {"gridPos": _place(0, y, _COLUMNS, 1)})
        y += 1
        for start in range(0, len(members), _COLUMNS // _WIDTH):
            for column, panel in enumerate(members[start : start + _COLUMNS // _WIDTH]):
                panels.append(_render_panel(panel) | {"gridPos": _place(column * _WIDTH, y, _WIDTH, _HEIGHT)})
            y += _HEIGHT
    for number, entry in enumerate(panels, 1):
        entry["id"] = number
    dashboard = {
        "uid": "paceline",
        "title": "Paceline",
        "description": "Written by `paceline watch --grafana` from the catalog of metrics.",
        "tags": ["paceline"],
        "schemaVersion": 38,
        "version": 1,
        "editable": True,
        "graphTooltip": 1,
        "refresh": "10s",
        "time": {"from": "now-1h", "to": "now"},
        "templating": {"list": _variables()},
        "annotations": {"list": []},
        "panels": panels,
    }
    return json.dumps(dashboard, indent=1) + "\n"


def _place(x: int, y: int, width: int, height: int) -> dict[str, int]:
    return {"x": x, "y": y, "w": width, "h": height}


def _variables() -> list[dict[str, Any]]:
    several = {"type": "query", "datasource": _SOURCE, "multi": True, "includeAll": True, "allValue": ".*"}
    several |= {"refresh": 2, "sort": 3, "current": {"selected": True, "text": ["All"], "value": ["$__all"]}}
    rounds = METRICS_BY_NAME["paceline_rank_rounds_total"].name
    queries = {
        "run": f"label_values({STATUS.name}, run)",
        "rank": f'label_values({rounds}{{run=~"$run"}}, rank)',
    }
    return [
        {"name": "datasource", "label": "Data source", "type": "datasource", "query": "prometheus"},
        *(
            several
            | {"name": name, "label": name.capitalize(), "definition": query}
            | {"query": {"query": query, "refId": f"variable-{name}"}}
            for name, query in queries.items()
        ),
    ]


def _render_panel(panel: Panel) -> dict[str, Any]:
    specs = [METRICS_BY_NAME[name] for name in panel.metrics]
    targets = [
        {
            "refId": chr(ord("A") + number),
            "datasource": _SOURCE,
            "expr": render_query(spec, panel.form),
            "legendFormat": _legend(spec, is_named=len(specs) > 1),
            "instant": panel.form == "state",
        }
        for number, spec in enumerate(specs)
    ]
    defaults: dict[str, Any] = {"unit": grafana_unit(specs[0], panel.form)}
    legend = {"displayMode": "list", "placement": "bottom"}
    options: dict[str, Any] = {"legend": legend, "tooltip": {"mode": "multi"}}
    if panel.form == "state":
        options = {"textMode": "name", "graphMode": "none", "reduceOptions": {"calcs": ["lastNotNull"]}}
    else:
        stacking = "normal" if panel.form == "stack" else "none"
        fill = 40 if panel.form == "stack" else 0
        defaults["custom"] = {"stacking": {"mode": stacking, "group": "A"}, "fillOpacity": fill}
    return {
        "type": "stat" if panel.form == "state" else "timeseries",
        "title": panel.title,
        "description": "\n\n".join(f"{spec.name}: {spec.meaning}" for spec in specs),
        "datasource": _SOURCE,
        "targets": targets,
        "fieldConfig": {"defaults": defaults, "overrides": []},
        "options": options,
    }


def render_query(spec: MetricSpec, form: PanelForm) -> str:
    """Return the query of a metric, with the variables of the dashboard."""
    ranks = ',rank=~"$rank"' if "rank" in spec.labels else ""
    series = f'{spec.name}{{run=~"$run"{ranks}}}'
    match form:
        case "state":
            return f"{series} == 1"
        case "age":
            return f"time() - {series}"
        case "lines" | "stack" if spec.kind == "counter":
            return f"rate({series}[$__rate_interval])"
        case _:
            return series


def grafana_unit(spec: MetricSpec, form: PanelForm) -> str:
    """Return Grafana's word for the unit of a query."""
    is_rate = spec.kind == "counter" and form in ("lines", "stack")
    return (_UNITS_PER_SECOND if is_rate else _UNITS)[spec.unit]


def _legend(spec: MetricSpec, *, is_named: bool) -> str:
    name = [spec.name.removeprefix("paceline_").removesuffix("_total").replace("_", " ")] if is_named else []
    return " ".join([*name, "{{run}}", *(f"{{{{{label}}}}}" for label in spec.labels)])
