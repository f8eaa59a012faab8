"""A real Prometheus scrapes a job: every query of the dashboard and of the alert rules returns data."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import time
import urllib.parse
import urllib.request
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

from paceline.observe.metrics_schema import EVENT_SCHEMAS, find_schema_errors
from paceline.session.companion_processes import MetricsExporter
from paceline.watch.alert_rules import SHIPPED_RULES
from paceline.watch.metric_catalog import METRICS, METRICS_BY_NAME
from paceline.watch.promql import alert_name, render_dashboard, render_prometheus, render_score
from tests import command_jobs
from tests.ports import free_port
from tests.unit.watch.records import append, rank_records, run_record, step_record

pytest.importorskip("prometheus_client", reason="needs paceline[prometheus]")

ROOT = Path(__file__).parents[2]
SECONDS = 180.0
STEPS = 45
TASK = """
import time
from pathlib import Path

import torch
from torch import nn
from paceline import Loss, Task

HOLD = Path(__file__).parent / "hold"

def build():
    calls = []
    def loss(model, batch):
        if model.training:
            calls.append(1)
            while len(calls) > 30 and HOLD.exists():  # until it was scraped
                time.sleep(0.05)
        return Loss((model(batch) ** 2).sum(), len(batch), {"size": batch.abs().sum()})
    data = torch.rand(64, 4)
    return Task(nn.Linear(4, 1), data, loss, held_out=data[:8])
"""


def until(is_done: Callable[[], bool], what: str) -> None:
    expires = time.monotonic() + SECONDS
    while not is_done():
        assert time.monotonic() < expires, what
        time.sleep(0.2)


class Prometheus:
    """The HTTP interface of a server."""

    def __init__(self, address: str) -> None:
        self._url = f"http://{address}"

    def get(self, path: str, **parameters: str) -> Any:
        url = f"{self._url}{path}?{urllib.parse.urlencode(parameters)}"
        with urllib.request.urlopen(url, timeout=SECONDS) as answer:
            return answer.read()

    def is_ready(self) -> bool:
        try:
            return bool(self.get("/-/ready"))
        except OSError:
            return False

    def data(self, path: str, **parameters: str) -> Any:
        return json.loads(self.get(f"/api/v1/{path}", **parameters))["data"]

    def query(self, expression: str, after_seconds: float = 0.0) -> list[tuple[Mapping[str, str], float]]:
        """Return the labels and values of an instant query."""
        now = f"{time.time() + after_seconds:.3f}"
        found = self.data("query", query=expression, time=now)["result"]
        return [(series["metric"], float(series["value"][1])) for series in found]

    def value(self, expression: str) -> float:
        """Return the only value; 0 if there is none."""
        return sum(value for _, value in self.query(expression))


def promtool(*words: str | Path, text: str | None = None) -> str:
    """Run it; an error or a remark fails the test."""
    done = subprocess.run(
        ["promtool", *map(str, words)], input=text, capture_output=True, text=True, timeout=100, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout + done.stderr


def documented_config(targets: str, rules: Path) -> str:
    """The configuration of docs/howto/watch.md, with other places."""
    text = (ROOT / "docs" / "howto" / "watch.md").read_text("utf-8")
    (config,) = re.findall(r"```yaml\n(global:.*?)```", text, re.DOTALL)
    for old, new in {
        "5s": "1s",
        "[paceline-rules.yml]": f"[{rules}]",
        '["127.0.0.1:9400"]': targets,
    }.items():
        assert old in config
        config = config.replace(old, new)
    return config


@contextmanager
def running_prometheus(folder: Path, targets: list[str]) -> Iterator[Prometheus]:
    for name in ("prometheus", "promtool"):
        if shutil.which(name) is None:
            pytest.skip(f"needs {name}: apt-get install prometheus, or `make system` as root")
    rules, config = folder / "rules.yml", folder / "prometheus.yml"
    rules.write_text(render_prometheus())
    config.write_text(documented_config(json.dumps(targets), rules))
    promtool("check", "rules", rules)
    promtool("check", "config", config)
    address = f"127.0.0.1:{free_port()}"
    words = [f"--config.file={config}", f"--storage.tsdb.path={folder / 'data'}", "--log.level=error"]
    with (folder / "prometheus.log").open("w") as log:
        process = subprocess.Popen(
            ["prometheus", *words, f"--web.listen-address={address}"], stdout=log, stderr=log
        )
        try:
            server = Prometheus(address)
            until(lambda: server.is_ready() or process.poll() is not None, "it does not start")
            assert process.poll() is None, (folder / "prometheus.log").read_text()
            yield server
        finally:
            process.terminate()
            try:
                process.wait(60)
            finally:
                process.kill()


TABLE = {"total": 1.0, "available": 1.0, "free": 1.0}
EXAMPLES = {"int": 1, "float": 1.0, "bool": True, "str": "far", "table": TABLE, "list": []}


def write_every_metric(run: Path) -> None:
    """Write a run whose records have every field of their schema, also those of hardware that is not here."""
    run.mkdir()
    append(run, run_record(), *(step_record(k, f1=0.5) for k in range(3)), *rank_records(2, (1.0, 1.0)))
    for event in dict.fromkeys(metric.event for metric in METRICS):
        if event not in ("run", "step", "ranks"):
            fields = {k: text.partition(":")[0] for k, text in EVENT_SCHEMAS[event].fields.items()}
            values = {name: EXAMPLES[kind.removesuffix("?")] for name, kind in fields.items()}
            common = {"event": event, "level": "info", "rank": 1, "time": 1003.0}
            record = common | values
            assert find_schema_errors(record) == []
            append(run, record)


def train(folder: Path, address: str, steps: int, server: Prometheus, *words: str) -> None:
    """A job of two ranks, which ends after it was scraped."""
    hold = folder / "hold"
    hold.touch()
    sampled = ("--set", "log.sample_seconds=0.5") if find_spec("psutil") else ()
    more = ("-n", "2", "--set", f"steps={steps}", "--set", f"log.prometheus={address}", *sampled)
    wanted = f'paceline_rank_rounds_total{{run="run",rank="1"}} > {steps - STEPS}'
    with command_jobs.start(folder, "train", *words, *more) as job:
        until(lambda: bool(server.query(wanted)) or job.poll() is not None, "it was not scraped")
        text = urllib.request.urlopen(f"http://{address}/metrics", timeout=SECONDS).read().decode()
        promtool("check", "metrics", text=text)
        until(lambda: server.value('count_over_time(paceline_step{run="run"}[1m])') >= 3, "no more scrapes")
        hold.unlink()
        out, err = job.communicate()
    assert job.returncode == 0, out + err


def counters(server: Prometheus) -> dict[str, float]:
    """The sum of each counter of the job, as it was last scraped."""
    names = [metric.name for metric in METRICS if metric.kind == "counter"]
    return {name: server.value(f'last_over_time({name}{{run="run"}}[5m])') for name in names}


@pytest.mark.capability("P3", clause="a real Prometheus scrapes it")
@pytest.mark.capability("P4", clause="every query returns data from a real Prometheus")
@pytest.mark.capability("Z22", clause="dashboard and rules from the catalog, queried in a real Prometheus")
def test_prometheus_answers_every_query_of_the_dashboard_and_of_the_rules(tmp_path: Path) -> None:
    """Of a job on two ranks, which is resumed, and of a run that has every metric."""
    every = tmp_path / "every"
    write_every_metric(every)
    command_jobs.prepare(tmp_path, TASK)
    address = f"127.0.0.1:{free_port()}"
    exporter = MetricsExporter(every, "127.0.0.1:0")
    try:
        with running_prometheus(tmp_path, [address, exporter.address]) as server:
            train(tmp_path, address, STEPS, server, "recipe.toml")
            before = counters(server)
            assert before["paceline_rounds_total"] >= 30 and before["paceline_starts_total"] == 1
            train(tmp_path, address, 2 * STEPS, server, "--resume", "run")
            after = counters(server)
            for name, value in before.items():
                assert after[name] >= value
                assert server.value(f'resets({name}{{run="run"}}[5m])') == 0, name
            assert after["paceline_starts_total"] == 2
            assert after["paceline_samples_total"] > before["paceline_samples_total"]
            check_series(server)
            check_dashboard(server)
            check_rules(server)
    finally:
        exporter.close()


def check_series(server: Prometheus) -> None:
    """No rank has more than 200 series, nor has the run as a whole, and the catalog has every name."""
    names = {name for name in server.data("label/__name__/values") if name.startswith("paceline_")}
    assert names ^ METRICS_BY_NAME.keys() == set()
    for run in ("run", "every"):
        matched = f'last_over_time({{__name__=~"paceline_.+",run="{run}"}}[5m])'
        found = server.query(f"count by (rank) ({matched})")
        assert {labels.get("rank", "") for labels, _ in found} == {"", "0", "1"}
        for labels, number in found:
            assert 10 <= number <= 200, (run, labels, number)


def check_dashboard(server: Prometheus) -> None:
    dashboard = json.loads(render_dashboard())
    for variable in dashboard["templating"]["list"]:
        if variable["type"] == "query":
            found = re.fullmatch(r"label_values\((.+), (\w+)\)", variable["definition"])
            assert found is not None
            values = server.data(f"label/{found[2]}/values", **{"match[]": found[1].replace("$run", ".*")})
            assert {*values} >= ({"run", "every"} if found[2] == "run" else {"0", "1"})
    used = set()
    for panel in dashboard["panels"]:
        for target in panel.get("targets", ()):
            query = target["expr"]
            for name, value in {"$__rate_interval": "1m", "$rank": ".*", "$run": ".*"}.items():
                query = query.replace(name, value)
            assert "$" not in query and server.query(query), target["expr"]
            used |= {*re.findall(r"paceline_\w+", query)}
    assert used == METRICS_BY_NAME.keys()


def check_rules(server: Prometheus) -> None:
    """The rules are loaded without an error, and what each compares has a value."""
    (group,) = server.data("rules")["groups"]
    assert [rule["name"] for rule in group["rules"]] == [alert_name(rule) for rule in SHIPPED_RULES]
    until(lambda: not unknown_health(server), "the rules are not evaluated")
    for rule in group["rules"]:
        assert not rule.get("lastError"), rule
    for rule in SHIPPED_RULES:
        # A plateau compares with five minutes ago: seen from then, today's scrapes are that past.
        later = 295.0 if rule.kind == "plateau" else 0.0
        assert server.query(render_score(rule, 1.0), later), rule.name


def unknown_health(server: Prometheus) -> list[str]:
    (group,) = server.data("rules")["groups"]
    return [rule["name"] for rule in group["rules"] if rule["health"] != "ok"]
