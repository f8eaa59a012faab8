"""From the records of runs under several strategies to tables, nine rows and a page."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from paceline.errors import RecipeError
from paceline.report import ComparisonTable, RecordedRun, render_comparison_page
from paceline.report.sent_bytes import cumulative_sent_bytes
from paceline.studies import MetricTarget
from paceline.studies.comparison_trials import (
    ComparisonEntry,
    KillRecovery,
    TrialMeasurements,
    measure_trial,
    parse_comparison_entries,
    read_recovery,
)
from paceline.studies.strategy_comparison import (
    NOT_MEASURED,
    StrategyComparison,
    StrategyTrials,
    compare_strategies,
    property_rows,
    render_comparison,
    render_costs_table,
    render_properties_table,
    render_results_table,
)
from paceline.studies.sweep_summary import MeanAndDeviation
from tests.unit.report.runs import rank_record, start, stats, write

pytestmark = pytest.mark.capability("B7", "I12", "Z18")
BOOK = {"calls": 30, "payload_bytes": 8.0, "sent_bytes": 8.0, "hidden_fraction": 0.0}
TARGET = MetricTarget("loss", 0.5, upward=False)


def evaluation(step: int, loss: float) -> tuple[str, dict[str, object]]:
    counts = {"num_samples": 9, "num_items": 9.0}
    return "evaluation", {"step": step, "loss": loss, "metrics": {"accuracy": 1 - loss}, **counts}


def run_of(folder: Path, loss: float = 0.4, **metrics: float) -> RecordedRun:
    """Ten steps of 32 samples and half a second on two ranks; the second rank serves."""
    server = rank_record(1, phases=dict.fromkeys(rank_record(1)["phases"], 0.0), sent_bytes=640.0)
    told = [("ranks", rank_record(0, sent_bytes=2560.0)), ("ranks", server), evaluation(5, 0.8)]
    told += [evaluation(10, loss), ("communication", {"rows": {"sum, world": BOOK}})]
    taken = [stats(i, metrics={"accuracy": 0.5, **metrics}) for i in range(10)]
    return write(folder, ("run", start()), *taken, *told)


def tried(name: str, trials: list[TrialMeasurements], **changes: object) -> StrategyTrials:
    values = {"planned": 2, "recovery": (), "goes_with": ("lanes=2",), "tried": ("lanes=2", "tensor=2")}
    return StrategyTrials(
        **{"name": name, "strategy": name, "trials": trials, "failed": (), **values, **changes}
    )


def test_a_run_says_what_it_cost_and_when_it_was_where(tmp_path: Path) -> None:
    trial = measure_trial(run_of(tmp_path, staleness=1.5, staleness_max=4.0))
    found = trial.numbers
    assert found["samples/s"] == 64 and found["s a step"] == 0.5 and found["steps a round"] == 1
    assert found["bytes a sample"] == (2560 + 640) / 320 and found["calls a step"] == 3
    assert found["staleness"] == 1.5 and found["oldest"] == 4 and found["final accuracy"] == 0.6
    assert trial.roles == (1, 1)
    assert found["idle"] == pytest.approx(0.45)  # of 10 s 4 in communication, 0.5 in no phase: not the server
    assert trial.to_target(TARGET) == {"samples to target": 320, "s to target": 5, "bytes to target": 3200}
    assert trial.to_target(MetricTarget("loss", 0.8, upward=False))["bytes to target"] == 1600
    assert trial.to_target(MetricTarget("loss", 0.1, upward=False)) == {}


def test_bytes_lie_evenly_in_a_window(tmp_path: Path) -> None:
    sent = cumulative_sent_bytes(run_of(tmp_path))
    assert [sent(step) for step in (0, 5, 10, 99)] == [0, 1600, 3200, 3200]


def two(tmp_path: Path) -> StrategyComparison:
    runs = [measure_trial(run_of(tmp_path / f"{i}", loss)) for i, loss in enumerate((0.4, 0.2))]
    late = measure_trial(run_of(tmp_path / "late", 0.45, staleness=2.0, staleness_max=3.0))
    kill = KillRecovery("resumed", 7.5, 3)
    rows = [tried("exact", runs, recovery=(kill,)), tried("stale", [late], failed=("exit code 1",))]
    return compare_strategies([*rows, tried("never", [])])


def test_seeds_are_a_row_and_what_failed_is_said(tmp_path: Path) -> None:
    found = two(tmp_path)
    assert str(found.target) == "loss <= 0.45"  # the one that every run reached
    assert found.rows[0].numbers["final loss"].mean == pytest.approx(0.3)
    assert found.rows[0].numbers["final loss"].deviation > 0 == found.rows[1].numbers["final loss"].deviation
    text = render_comparison(found)
    assert "0.3 ±0.14" in text[1] and "failed: stale: exit code 1" in text
    assert render_results_table(found)[1][2][1:] == ["-"] * (len(render_results_table(found)[0]) - 1)
    costs = render_costs_table(found)[1]
    assert (costs[0][-1], costs[1][-1]) == ("resumed 7.5 s, 3 steps repeated", "-")


def test_no_cell_of_the_nine_rows_is_prose(tmp_path: Path) -> None:
    found = two(tmp_path)
    exact, stale, never = (property_rows(row, found.rows[0].numbers) for row in found.rows)
    assert len(exact) == 9 and render_properties_table(found)[0][1:] == [*exact]
    assert exact["fault tolerance"] == "resumed after 7.5 s, 3 steps repeated"
    assert exact["synchrony"] == "replicas agree every step"
    assert stale["synchrony"] == "2.00 updates old, the oldest 3"
    assert stale["scalability"] == "1.00 x the first" and stale["fault tolerance"] == NOT_MEASURED
    assert {never[name] for name in ("replication", "roles", "scalability", "synchrony")} == {NOT_MEASURED}
    assert never["status"] == "0 of 2 runs complete"
    threads = [
        {"samples/s": MeanAndDeviation(n, 0.0), "threads": MeanAndDeviation(n, 0.0)} for n in (1.0, 2.0)
    ]
    faster = property_rows(replace(found.rows[0], numbers=threads[1]), threads[0])
    assert faster["scalability"] == "2.00 x the first (2 threads a process, there 1)"
    assert json.loads(json.dumps(found.to_json()))["rows"][0]["nine_rows"] == exact


def test_the_page_has_every_run_in_the_colour_of_its_strategy(tmp_path: Path) -> None:
    runs = [run_of(tmp_path / str(i)) for i in range(3)]
    tables = [ComparisonTable("Costs", "what it cost", ["strategy", "a"], [["<one>", "1"], ["two", "2"]])]
    page = render_comparison_page("Compared", "digits", tables, {"<one>": runs[:2], "two": runs[2:]})
    assert "&lt;one&gt;" in page and "<one>" not in page and "http" not in page.replace("http://www.w3", "")
    assert page.count('"bytes":[') + page.count("&quot;bytes&quot;:[") == 3
    assert page.count("&quot;color&quot;:&quot;c1&quot;") == 2 * page.count(
        "&quot;color&quot;:&quot;c2&quot;"
    )


def test_a_kill_is_kept(tmp_path: Path) -> None:
    assert read_recovery(tmp_path) is None
    for found in (KillRecovery("goes on", 0.25, 0), KillRecovery("lost", None, 0)):
        found.save(tmp_path)
        assert read_recovery(tmp_path) == found


def test_strategies_are_read_in_their_order() -> None:
    text = 'a = "replicas=2"\nb = { strategy = "ddp", set = ["optimizer.lr=1"] }'
    assert parse_comparison_entries(text, "x") == [
        ComparisonEntry("a", "replicas=2"),
        ComparisonEntry("b", "ddp", ("optimizer.lr=1",)),
    ]


@pytest.mark.parametrize(
    ("text", "what"),
    [
        ("", "no strategy"),
        ("a = ", "cannot be read"),
        ("a = 1", "neither a string nor a table"),
        ('"../a" = "ddp"', "not usable as a folder name"),
        ("a = { set = [] }", "has no strategy"),
        ('a = { strategy = "ddp", set = "x" }', "not a list of strings"),
        ('a = { strategy = "ddp", lr = 1 }', "it has an unknown key"),
    ],
)
def test_a_file_that_is_wrong_is_refused(text: str, what: str) -> None:
    with pytest.raises(RecipeError, match=what):
        parse_comparison_entries(text, "x")
