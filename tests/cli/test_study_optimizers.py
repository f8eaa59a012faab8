"""`paceline study optimizers` with real jobs: parts, files, and continued."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from paceline.studies.optimizer_study import (
    QUICK,
    StudySize,
    batch_cells,
    choose_rates,
    rate_cells,
    repeat_base_rows,
    schedule_cells,
)
from paceline.studies.sweep_summary import (
    EvaluationPoint,
    MeanAndDeviation,
    RunMeasurements,
    SweepRow,
    SweepSummary,
    recommend,
)
from tests.commands import run


def measured(loss: float) -> RunMeasurements:
    return RunMeasurements(10, 100, 1.0, 1.0, (EvaluationPoint(10, 100, {"loss": loss}),))


@pytest.mark.capability("J21", "A14")
def test_each_optimizer_has_the_best_of_equally_many_rates_and_batches_see_equal_samples() -> None:
    size = StudySize()
    cells = rate_cells(size)
    assert len(cells) == len(size.optimizers) * len(size.rate_factors)
    assert all("seed=0" in cell.overrides and "evaluate.validation=0.2" in cell.overrides for cell in cells)
    losses = [1.0, 0.5, float("nan"), 2.0, *[4.0, 3.0, 2.0, 1.0] * 4]
    rates = choose_rates(size, [(cell, measured(loss)) for cell, loss in zip(cells, losses, strict=True)])
    assert rates["sgd"].lr == 0.025 and not rates["sgd"].is_edge
    assert rates["adam"].is_edge and rates["adam"].lr == pytest.approx(8 * 4e-3)
    compared = schedule_cells(size, rates)
    assert len(compared) == 5 * 3 * 3 and not any("validation" in o for c in compared for o in c.overrides)
    batches = batch_cells(size, rates, 32, 240)
    settings = [dict(o.split("=", 1) for o in cell.overrides) for cell in batches]
    assert {int(s["batch.size"]) * int(s["steps"]) for s in settings} == {32 * 240}
    assert size.num_runs == len(cells) + len(compared) + len(batches) + 3 * 3
    shown = [cell.values for cell, _ in repeat_base_rows([(cell, measured(1.0)) for cell in batches])]
    for rule in ("linear", "sqrt"):
        assert [v["batch"] for v in shown if v["rule"] == rule and v["seed"] == "1"] == [
            "32",
            "128",
            "256",
        ] * 3


@pytest.mark.capability("J21")
def test_a_row_of_failed_runs_is_left_out_of_a_recommendation_by_name() -> None:
    def row(word: str, loss: float, batch: str, runs: int = 3) -> SweepRow:
        numbers = {"final loss": MeanAndDeviation(loss, 0.01), "seconds": MeanAndDeviation(1.0, 0.0)}
        return SweepRow({"optimizer": word, "batch": batch}, runs, numbers)

    rows = [row("sgd", 0.1, "32"), row("sgd", 0.5, "64"), row("adam", 0.2, "64"), row("lars", 0.0, "64", 1)]
    failed = {"optimizer=lars batch=64 seed=2": "NumericError"}
    assert recommend(SweepSummary(None, rows, [], failed), {"batch": "64"}) == [
        "row 4 (optimizer=lars batch=64) is left out: only 1 of its runs did not fail",
        "the lowest final loss is that of row 3 (optimizer=adam batch=64): 0.2 ±0.01",
        "row 2 (optimizer=sgd batch=64) is next: 0.5 ±0.01",
        "recommended: row 3, which no other row equals within its deviation",
    ]


@pytest.mark.soak
@pytest.mark.capability("J21", "A14", "K7")
def test_the_quick_study_has_all_parts_and_continues(tmp_path: Path) -> None:
    pytest.importorskip("sklearn")
    words = ("study", "optimizers", "--quick", "--json", "--out", "out")
    done = run(tmp_path, *words)
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert [*found["parts"]] == ["rates", "schedules", "formats", "batches"]
    assert [*found["rates"]] == [*QUICK.optimizers]
    rows = {name: part["rows"] for name, part in found["parts"].items()}
    assert [len(rows[name]) for name in rows] == [4, 4, 3, 8]
    for row in rows["formats"]:
        numbers = {name: number["mean"] for name, number in row["numbers"].items()}
        assert {"final loss", "final accuracy", "seconds", "peak MiB", "planned MiB"} <= numbers.keys()
    planned = [row["numbers"]["planned MiB"]["mean"] for row in rows["formats"]]
    assert planned[1] < planned[0] and planned[2] < planned[0]
    folder = tmp_path / "out"
    assert (folder / "table.txt").read_text() in done.stderr
    assert "&quot;name&quot;:&quot;lamb&quot;" in (folder / "study.html").read_text()
    assert all("<svg" in (folder / f"{name}.svg").read_text() for name in rows)
    logs = {path: path.read_bytes() for path in folder.glob("*/*/metrics.jsonl")}
    again = run(tmp_path, *words)
    assert again.stderr.count("already complete") == len(logs) == QUICK.num_runs
    assert json.loads(again.stdout) == found
