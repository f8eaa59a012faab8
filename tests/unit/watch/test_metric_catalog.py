"""One catalog has every number of the rows, and every name that begins as its names do."""

from __future__ import annotations

import math
import re
from pathlib import Path

import pytest

from paceline.observe.metrics_schema import EVENT_SCHEMAS
from paceline.watch.metric_catalog import (
    METRICS,
    METRICS_BY_NAME,
    NOT_EXPORTED,
    SERVER_METRICS,
    STATE_METRICS,
)
from paceline.watch.metric_values import MetricValues
from tests.unit.watch.records import rank_records, run_record, step_record

ROOT = Path(__file__).parents[3]
METRICS_PAGE = ROOT / "docs" / "reference" / "exported-metrics.md"


@pytest.mark.capability("P3", clause="a catalog has all names")
def test_names_have_the_form_that_prometheus_expects() -> None:
    assert len(METRICS_BY_NAME) == len(METRICS) + len(STATE_METRICS)
    for metric in (*METRICS_BY_NAME.values(), *SERVER_METRICS):
        assert re.fullmatch(r"paceline_[a-z_]+", metric.name)
        assert metric.name.endswith("_total") == (metric.kind == "counter"), metric
        assert not metric.unit or metric.name.removesuffix("_total").endswith(metric.unit), metric
        assert metric.meaning and (
            metric in (*STATE_METRICS, *SERVER_METRICS) or metric.event in EVENT_SCHEMAS
        )


def test_every_field_of_a_row_is_a_metric_or_is_left_out_for_a_reason() -> None:
    for event in ("step", "ranks", "evaluation", "process", "system"):
        used = {metric.field for metric in METRICS if metric.event == event}
        left_out = set(NOT_EXPORTED[event])
        assert used - {""} <= set(EVENT_SCHEMAS[event].fields)
        assert (used - {""}) | left_out == set(EVENT_SCHEMAS[event].fields) and not used & left_out


OTHER_NAMES = re.compile(r"paceline_(?:batches|side|top|largest|scaled_draw|[a-z0-9]+_(?:en|de)code)")
"""What begins like a metric and is none: a module, functions in C, and attributes of other libraries."""


@pytest.mark.capability("Z22", clause="no name outside of the catalog")
def test_no_module_spells_a_name_that_is_not_in_the_catalog() -> None:
    """Nor does a page, a rule, a dashboard or a test."""
    found: dict[str, set[str]] = {}
    folders = ("src", "docs", "benchmarks", "tools", "examples", "recipes")
    for path in (path for folder in folders for path in (ROOT / folder).rglob("*.*")):
        if path.suffix in (".py", ".js", ".html", ".json", ".toml", ".yml", ".md"):
            for name in re.findall(r"\bpaceline_[a-z0-9_]+", path.read_text("utf-8")):
                found.setdefault(name, set()).add(path.name)
    known = {*METRICS_BY_NAME, *(metric.name for metric in SERVER_METRICS)}
    unknown = {name: where for name, where in found.items() if name not in known}
    assert {name: where for name, where in unknown.items() if not OTHER_NAMES.fullmatch(name)} == {}
    assert found.keys() >= known
    table = METRICS_PAGE.read_text("utf-8")
    for metric in (*METRICS_BY_NAME.values(), *SERVER_METRICS):
        assert f"| `{metric.name}` | {metric.kind} |" in table and not OTHER_NAMES.fullmatch(metric.name)


def test_counters_continue_across_a_resume_and_gauges_are_the_newest() -> None:
    values = MetricValues()
    values.add([run_record(), *(step_record(k, loss=3.0 - k, f1=0.5) for k in range(4))])
    values.add(rank_records(3, (1.0, 2.0)))
    before = {(s.metric.name, s.labels): s.value for s in values.samples() if s.metric.kind == "counter"}
    assert values.value("paceline_samples_total") == 32
    assert values.value("paceline_rank_phase_seconds_total", "1", "backward") == 2.0
    values.add([run_record(step=2), step_record(2, loss="nan"), *rank_records(2, (1.0, 1.0))])
    assert values.value("paceline_samples_total") == 40 and values.value("paceline_step") == 2
    assert values.value("paceline_starts_total") == 2
    assert math.isnan(values.value("paceline_loss") or 0.0)
    assert values.value("paceline_rank_seconds_total", "1") == 6.0
    for sample in values.samples():
        if sample.metric.kind == "counter":
            assert sample.value >= before.get((sample.metric.name, sample.labels), 0.0)
    assert values.value("paceline_metric", "f1") == 0.5 and values.value("paceline_evaluation_loss") is None
