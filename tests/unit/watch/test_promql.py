"""The exported rules fire on recorded faults and on nothing else; the dashboard shows the whole catalog."""

from __future__ import annotations

import json
import math
import random
import re
import shutil
import subprocess
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
from typer.testing import CliRunner

from paceline.cli.main import build_app
from paceline.watch import promql
from paceline.watch.alert_rules import SHIPPED_RULES, AlertRule, Selector
from paceline.watch.metric_catalog import METRICS_BY_NAME, STATUS, UPDATED
from paceline.watch.metric_values import MetricValues
from paceline.watch.promql import (
    DASHBOARD,
    alert_name,
    render_dashboard,
    render_expression,
    render_prometheus,
)
from tests.unit.watch.records import run_record, step_record
from tests.unit.watch.test_alerts import FAULT_STEP, FAULT_STEPS, FAULTS, Row, rows

STEP_SECONDS = 15
NEEDS_PROMTOOL = pytest.mark.skipif(
    shutil.which("promtool") is None,
    reason="needs promtool: apt-get install prometheus, or `make system` as root",
)
SILENCE = AlertRule(
    "no-checkpoint", "absence", Selector("paceline_checkpoints_total"), 1800.0, summary="no checkpoint"
)
RATE = AlertRule("skips", "rate", Selector("paceline_skipped_updates_total"), 0.02, window=10)
USED = {
    name
    for rule in (*SHIPPED_RULES, SILENCE, RATE)
    for name in re.findall(r"paceline_\w+", render_expression(rule, 1.0))
}
"""The metrics in the conditions of the rules."""


def series(records: Iterable[Row], silent_from: int | None = None) -> list[dict[str, str]]:
    """Return what a scrape after each step has, as `input_series`."""
    values, found = MetricValues(), defaultdict[str, dict[int, float]](dict)
    step = -1
    for record in records:
        if record["event"] == "step":
            step += 1
        values.add([record])
        if record["event"] != "step":
            continue
        seen = step if silent_from is None else min(step, silent_from)
        state = [((UPDATED, ()), float(seen * STEP_SECONDS)), ((STATUS, ("running",)), 1.0)]
        samples = [((sample.metric, sample.labels), sample.value) for sample in values.samples()]
        for (metric, own), value in (*samples, *state):
            if metric.name in USED:
                labels = {"run": "gpt", **dict(zip(metric.labels, own, strict=True))}
                words = ",".join(f"{name}={json.dumps(text)}" for name, text in labels.items())
                found[f"{metric.name}{{{words}}}"][step] = value
    return [
        {"series": name, "values": " ".join(word(by_step.get(k)) for k in range(step + 1))}
        for name, by_step in found.items()
    ]


def word(value: float | None) -> str:
    return "_" if value is None else "NaN" if math.isnan(value) else repr(value)


def fired(at_step: int, steps: int, *names: str) -> dict[str, Any]:
    """Expect these alerts, and no other, to have fired in the steps up to `at_step`."""
    window = f"{steps * STEP_SECONDS}s"
    samples = [{"labels": f'{{alertname="{name}"}}', "value": 1} for name in names]
    return {
        "expr": f'group by (alertname) (max_over_time(ALERTS{{alertstate="firing"}}[{window}]))',
        "eval_time": f"{at_step * STEP_SECONDS}s",
        "exp_samples": samples,
    }


def run_promtool(folder: Path, rules: Iterable[AlertRule], cases: list[dict[str, Any]]) -> str:
    """Return its output; empty if all cases are as expected."""
    (folder / "rules.yml").write_text(render_prometheus(tuple(rules), STEP_SECONDS))
    (folder / "cases.yml").write_text(  # JSON is YAML
        json.dumps({"rule_files": ["rules.yml"], "evaluation_interval": f"{STEP_SECONDS}s", "tests": cases})
    )
    done = subprocess.run(
        ["promtool", "test", "rules", "cases.yml"],
        cwd=folder,
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    output = done.stdout + done.stderr
    assert (done.returncode == 0) == ("SUCCESS" in output), output
    return "" if done.returncode == 0 else output


def case(name: str, records: Iterable[Row], *expected: dict[str, Any], **more: int) -> dict[str, Any]:
    entry = {"name": name, "interval": f"{STEP_SECONDS}s", "input_series": series(records, **more)}
    return entry | {"promql_expr_test": list(expected)}


def faulty(fault: Callable[[Row], None]) -> Iterable[Row]:
    step = -1
    for row in rows(0, FAULT_STEP + FAULT_STEPS + 10):
        step = row.get("step", step)
        if FAULT_STEP <= step < FAULT_STEP + FAULT_STEPS:
            fault(row)
        yield row


def resumed() -> Iterable[Row]:
    """A clean run that is resumed, compiles again and first takes slow steps, on a slower host."""
    yield from rows(1, 400)
    for row in rows(2, 200):
        if row["event"] == "step":
            row["loss"] *= 0.6
            row["seconds"] *= 6.0 if row["step"] < 10 else 2.0
            row["phases"] = {"data": 0.1 * row["seconds"], "forward": 0.8 * row["seconds"]}
        yield row


def level_loss() -> Iterable[Row]:
    draw = random.Random(0)
    yield run_record()
    for step in range(1000):
        level = 4.0 - 0.002 * min(step, 500)
        yield step_record(step, level * math.exp(draw.gauss(0.0, 0.01)))


def cases() -> list[dict[str, Any]]:
    found = []
    for title, (name, fault) in FAULTS.items():
        names = {f"Paceline{''.join(map(str.capitalize, name.split('-')))}"}
        names |= {"PacelineBatchTime"} if name == "data-wait" else set()  # slow data makes rounds slow
        before, after = fired(FAULT_STEP - 1, FAULT_STEP), fired(FAULT_STEP + 10, 10, *sorted(names))
        found.append(case(title, faulty(fault), before, after))
    found.append(case("a plateau", level_loss(), fired(700, 700), fired(910, 410, "PacelinePlateau")))
    silent = [run_record(), *(step_record(k) for k in range(200))]
    ends = 100 + 600 // STEP_SECONDS
    found.append(
        case("silence", silent, fired(ends, ends), fired(ends + 10, 10, "PacelineSilence"), silent_from=100)
    )
    return found


@NEEDS_PROMTOOL
@pytest.mark.capability("Z11", clause="exported to Prometheus")
@pytest.mark.capability("P5", clause="exported as Prometheus rules")
def test_each_exported_rule_fires_within_ten_steps_of_its_fault_and_on_nothing_else(tmp_path: Path) -> None:
    """In recorded series, scraped once a step; a clean run and one that is resumed fire nothing."""
    recorded = cases()
    assert {
        re.findall(r'"(\w+)"', sample["labels"])[-1]
        for entry in recorded
        for test in entry["promql_expr_test"]
        for sample in test["exp_samples"]
    } == {alert_name(rule) for rule in SHIPPED_RULES}
    quiet = [case(f"clean {busy=}", rows(3, busy=busy), fired(999, 999)) for busy in (False, True)]
    quiet.append(case("resumed", resumed(), fired(599, 599)))
    assert run_promtool(tmp_path, SHIPPED_RULES, [*recorded, *quiet]) == ""


@NEEDS_PROMTOOL
def test_rules_of_other_kinds_fire_too_and_a_rule_that_lost_its_guard_is_found(tmp_path: Path) -> None:
    """Absence of a counter, a rate; without their guards rules fire in a run that is resumed."""
    events: dict[int, Row] = {k: {"event": "checkpoint", "step": k, "time": 0.0} for k in range(0, 200, 50)}
    skips = {k: {"event": "skip", "step": k, "reason": ""} for k in (5, *range(300, 320))}
    records: list[Row] = [run_record()]
    for step in range(400):
        records += [entry[step] for entry in (events, skips) if step in entry]
        records.append(step_record(step))
    absent = 150 + round(SILENCE.limit) // STEP_SECONDS
    found = case(
        "events",
        records,
        fired(absent - 1, absent),
        fired(absent + 2, 2, "PacelineNoCheckpoint"),
        fired(299, 10, "PacelineNoCheckpoint"),
        fired(320, 10, "PacelineNoCheckpoint", "PacelineSkips"),
    )
    assert run_promtool(tmp_path, (SILENCE, RATE), [found]) == ""
    guarded = render_expression

    def without_guard(rule: AlertRule, step_seconds: float) -> str:
        return guarded(rule, step_seconds).partition(" and ")[0]

    with patch.object(promql, "render_expression", without_guard):
        output = run_promtool(tmp_path, SHIPPED_RULES, [case("resumed", resumed(), fired(599, 599))])
    assert "PacelineBatchTime" in output


@pytest.mark.capability("P4", clause="every query names an exported metric")
def test_the_dashboard_shows_every_metric_in_its_unit() -> None:
    """It is what the command prints; a metric that the table of panels does not know has a panel too."""
    done = CliRunner().invoke(build_app(), ["watch", "--grafana"])
    assert done.exit_code == 0, done.output
    dashboard = json.loads(done.stdout)
    assert done.stdout == render_dashboard() and dashboard["schemaVersion"] >= 36
    panels = [panel for panel in dashboard["panels"] if panel["type"] != "row"]
    places = [tuple(panel["gridPos"].values()) for panel in dashboard["panels"]]
    numbers = {panel["id"] for panel in dashboard["panels"]}
    assert len({*places}) == len(places) == len(numbers)
    shown: set[str] = set()
    for panel in panels:
        names = [re.findall(r"paceline_\w+", target["expr"]) for target in panel["targets"]]
        assert all(len(found) == 1 and found[0] in METRICS_BY_NAME for found in names), panel["title"]
        assert len({METRICS_BY_NAME[name].unit for (name,) in names}) == 1, panel["title"]
        assert panel["fieldConfig"]["defaults"]["unit"] and panel["datasource"]["uid"] == "${datasource}"
        for target, (name,) in zip(panel["targets"], names, strict=True):
            spec = METRICS_BY_NAME[name]
            assert ('rank=~"$rank"' in target["expr"]) == ("rank" in spec.labels)
            assert {*re.findall(r"{{(\w+)}}", target["legendFormat"])} == {"run", *spec.labels}
            shown.add(name)
    assert shown == METRICS_BY_NAME.keys()
    variables = {entry["name"]: entry["type"] for entry in dashboard["templating"]["list"]}
    assert variables == {"datasource": "datasource", "run": "query", "rank": "query"}
    with patch.object(promql, "DASHBOARD", DASHBOARD[1:]):
        rest: Mapping[str, Any] = json.loads(render_dashboard())
    assert "More" in [panel["title"] for panel in rest["panels"]] and "paceline_loss" in json.dumps(rest)
