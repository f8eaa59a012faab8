"""Each shipped rule fires within ten steps of its fault, and none in clean steps; the score of both."""

from __future__ import annotations

import itertools
import math
import random
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest

from paceline.errors import DataError
from paceline.watch.alert_rules import SHIPPED_RULES, AlertRule, Selector, read_rules
from paceline.watch.alerts import AlertEngine
from paceline.watch.metric_catalog import METRICS_BY_NAME
from paceline.watch.promql import render_prometheus
from tests.unit.watch.records import rank_records, run_record, step_record

CLEAN_STEPS, FAULT_STEP, FAULT_STEPS, SEEDS = 1000, 600, 20, range(4)
Row = dict[str, Any]
Fault = Callable[[Row], None]


def rows(seed: int, num_steps: int = CLEAN_STEPS, *, busy: bool = False) -> Iterator[Row]:
    """Yield the records of a clean run: a loss that falls with the noise of batches, times with that of a
    machine (busy: of two cores with a load of 14), compilation in the first step, and evaluations,
    checkpoints, hashes and samples of the host in between.
    """
    draw = random.Random(seed)
    moment = 1000.0
    yield run_record(num_steps=num_steps) | {"time": moment}
    for step in range(num_steps):
        loss = (0.5 + 3.0 / (step + 20) ** 0.4) * math.exp(draw.gauss(0.0, 0.03))
        slow = 30.0 if step == 0 else 4.0 if step % 100 == 1 else draw.choice((1, 3)) if step < 5 else 1.0
        seconds = slow * 0.05 * math.exp(draw.gauss(0.0, 0.35 if busy else 0.04))
        if draw.random() < (0.04 if busy else 0.01):
            seconds *= draw.uniform(2.0, 8.0)
        data = draw.uniform(0.6, 0.9) if step in (0, 301) or draw.random() < 0.02 else draw.uniform(0.02, 0.3)
        moment += seconds
        shares = {"data": data, "forward": 0.9 - data}
        yield step_record(step, loss, seconds) | {
            "time": moment,
            "phases": {phase: share * seconds for phase, share in shares.items()},
        }
        if step % 20 == 19:
            yield from rank_records(step, (seconds, seconds * draw.uniform(0.9, 1.1)))
        if step % 100 == 0:
            moment += 20.0
            yield {"event": "evaluation", "step": step, "loss": loss, "metrics": {}, "time": moment}
            yield {"event": "checkpoint", "step": step, "path": "c", "time": moment}
            yield {"event": "hash", "step": step, "sha256": "", "equal": True, "time": moment}
        if step % 2 == 0:
            yield {
                "event": "system",
                "host": "far",
                "time": moment,
                "memory_bytes": {"total": 100.0, "available": draw.uniform(20.0, 60.0)},
                "folder_bytes": {"total": 100.0, "free": 30.0 - step / 100},
                "temperature_celsius": {"core 0": draw.uniform(50.0, 85.0)},
            }


def multiply(field: str, factor: float) -> Fault:
    def fault(row: Row) -> None:
        if row["event"] == "step":
            row[field] *= factor

    return fault


def wait_for_data(row: Row) -> None:
    if row["event"] == "step":
        row["phases"]["data"], row["seconds"] = 3 * row["seconds"], 4 * row["seconds"]


def not_finite(row: Row) -> None:
    if row["event"] == "step":
        row["loss"] = "nan"


def sample(field: str, **values: float) -> Fault:
    return lambda row: row[field].update(values) if row["event"] == "system" else None


def differ(row: Row) -> None:
    if row["event"] == "hash":
        row["equal"] = False


FAULTS: Mapping[str, tuple[str, Fault]] = {
    "a spike of the loss": ("loss-spike", multiply("loss", 4.0)),
    "a loss that is not finite": ("loss-spike", not_finite),
    "rounds that take 2.5 times as long": ("batch-time", multiply("seconds", 2.5)),
    "slow data": ("data-wait", wait_for_data),
    "copies that differ": ("divergence", differ),
    "little memory": ("memory", sample("memory_bytes", available=3.0)),
    "a full disk": ("disk", sample("folder_bytes", free=1.0)),
    "a hot host": ("temperature", sample("temperature_celsius", **{"core 0": 97.0})),
}


@pytest.mark.capability("Z11")
@pytest.mark.parametrize("busy", [False, True], ids=["idle", "busy"])
def test_no_rule_fires_in_a_thousand_clean_steps(busy: bool) -> None:
    for seed in SEEDS:
        engine = AlertEngine()
        clean = list(rows(seed, busy=busy))
        engine.take(clean)
        engine.check(max(row["time"] for row in clean) + 60)
        assert engine.drain() == [] and engine.firing == [], seed


@pytest.mark.capability("Z11")
@pytest.mark.parametrize("name", FAULTS)
def test_a_fault_fires_its_rule_alone_within_ten_steps(name: str) -> None:
    """One more resolves it once the fault is over; in between nothing is repeated."""
    wanted, fault = FAULTS[name]
    for seed in SEEDS:
        engine, step = AlertEngine(), 0
        for row in rows(seed, FAULT_STEP + 60):
            step = row.get("step", step)
            if FAULT_STEP <= step < FAULT_STEP + FAULT_STEPS:
                fault(row)
            engine.take([row])
        others = {"batch-time"} - {wanted}  # slow data makes rounds slow
        changes = [alert for alert in engine.drain() if alert.rule.name not in others]
        assert [alert.state for alert in changes] in (["firing"], ["firing", "resolved"]), (seed, changes)
        first = changes[0]
        assert first.rule.name == wanted and FAULT_STEP <= first.step <= FAULT_STEP + 10, (seed, first)
        assert (changes[-1].state == "resolved") == (name != "copies that differ") and first.record()["text"]


@pytest.mark.capability("Z11")
def test_a_plateau_fires_within_ten_steps_of_its_window() -> None:
    """A loss that still falls a little over the window is none."""
    (rule,) = (rule for rule in SHIPPED_RULES if rule.name == "plateau")
    for seed in SEEDS:
        draw, engine = random.Random(seed), AlertEngine([rule])
        for step in range(1100):
            level = 4.0 - 0.002 * min(step, 500)
            engine.take([step_record(step, level * math.exp(draw.gauss(0.0, 0.01)))])
        (alert,) = engine.firing
        assert 500 + rule.window // 2 < alert.step <= 500 + rule.window + 10, alert


def test_silence_is_an_alert_until_the_next_record() -> None:
    """Samples of the host do not end it: they go on while the job hangs."""
    engine = AlertEngine()
    engine.take([run_record(), step_record(0)])
    for now in (1400.0, 1590.0):
        engine.check(now)
        assert engine.firing == []
    engine.check(1601.0)
    engine.check(1602.0)
    engine.take([{"event": "system", "host": "far", "time": 1602.0}])
    assert [alert.rule.name for alert in engine.firing] == ["silence"]
    engine.take([step_record(1) | {"time": 1603.0}])
    assert [(alert.rule.name, alert.state) for alert in engine.drain()] == [
        ("silence", "firing"),
        ("silence", "resolved"),
    ]


def test_a_rate_is_judged_at_each_step_even_if_its_records_have_ended() -> None:
    """For a duration in steps and one in seconds; a resume ends it."""
    rule = AlertRule(
        "skips", "rate", Selector("paceline_skipped_updates_total"), 0.2, window=10, for_seconds=3.0
    )
    engine = AlertEngine([rule])
    for step in range(20, 60):
        skips = [{"event": "skip", "step": step, "reason": ""}] * (20 <= step - 20 < 28 - 3)
        engine.take([*skips, step_record(step)])
    changes = [(alert.state, alert.step) for alert in engine.drain()]
    assert [state for state, _ in changes] == ["firing", "resolved"]
    assert 41 < changes[0][1] <= 50 and changes[1][1] > 50
    engine.take(
        itertools.chain(
            *([{"event": "skip", "step": k, "reason": ""}, step_record(k)] for k in range(60, 80))
        )
    )
    engine.take([run_record(step=70)])
    assert engine.firing == [] and [alert.state for alert in engine.drain()] == ["firing", "resolved"]


def test_rules_of_a_file_change_and_add_rules(tmp_path: Path) -> None:
    path = tmp_path / "rules.toml"
    path.write_text(
        "[plateau]\noff = true\n[disk]\nbelow = 0.5\nfor_steps = 2\n"
        '[accuracy]\nmetric = "paceline_metric"\nlabels = {metric = "accuracy"}\n'
        'kind = "threshold"\nbelow = 0.1\n'
    )
    rules = {rule.name: rule for rule in read_rules(path)}
    assert "plateau" not in rules and rules["disk"].limit == 0.5 and rules["disk"].for_steps == 2
    engine = AlertEngine(list(rules.values()))
    engine.take([run_record(), step_record(0, accuracy=0.05, other=0.01)])
    (alert,) = engine.firing
    assert alert.rule.name == "accuracy" and alert.labels == {} and alert.score == 0.05
    for text, words in {
        '[a]\nmetric = "paceline_lost"\nkind = "threshold"\nabove = 1': "does not exist",
        '[a]\nmetric = "paceline_loss"\nkind = "steep"\nabove = 1': "is of kind 'steep'",
        '[a]\nmetric = "paceline_loss"\nkind = "threshold"': "one of `above` and `below`",
        '[a]\nmetric = "paceline_loss"\nkind = "threshold"\nabove = 1\nfor = 3': "unknown key 'for'",
        '[a]\nmetric = "paceline_loss"\nlabels = {rank = "0"}\nkind = "rate"\nabove = 1': "the label 'rank'",
        '[disk]\nbelow = "x"': "wrong type",
        "[disk": "cannot read",
    }.items():
        path.write_text(text)
        with pytest.raises(DataError, match=words):
            read_rules(path)


def test_the_rules_of_prometheus_are_those_of_the_table() -> None:
    """Every name is in the catalog, and windows and durations follow the time of a step."""
    text = render_prometheus(SHIPPED_RULES, step_seconds=60.0)
    assert text.count("- alert: Paceline") == len(SHIPPED_RULES) and "PacelineLossSpike" in text
    for rule in SHIPPED_RULES:
        assert rule.signal.metric in text and rule.summary in text and rule.advice
    assert "quantile_over_time(0.5, paceline_loss[3000s])" in text and "for: 240s" in text
    assert '\\"free\\"} / ignoring(kind) paceline_host_folder_bytes{kind=\\"total\\"} < 0.03' in text
    assert {*METRICS_BY_NAME} >= {rule.signal.metric for rule in SHIPPED_RULES}
