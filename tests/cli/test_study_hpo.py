"""`paceline study hpo`: searches compared on real tasks, and continued."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from paceline.search import open_study
from tests.commands import run

pytestmark = pytest.mark.timeout(400)


@pytest.mark.soak
@pytest.mark.capability("X5")
def test_searches_are_compared_from_their_logs_and_continued(tmp_path: Path) -> None:
    pytest.importorskip("optuna")
    pytest.importorskip("sklearn")
    words = ["study", "hpo", "--seeds", "1", "--trials", "3", "--task", "digits", "--out", "out"]
    done = run(tmp_path, *words)
    assert done.returncode == 0, done.stderr
    folder = tmp_path / "out"
    found = json.loads((folder / "results.json").read_text())
    assert set(found["searches"]) == {"digits grid", "digits random", "digits tpe"} and found["machine"]
    for name, numbers in found["searches"].items():
        study = open_study(folder / f"{name.replace(' ', '-')}-seed-1")
        assert study.best is not None and numbers["best"] == [study.best.value]
        assert study.tested is not None and numbers["test"] == [study.tested["scores"]]
        assert len(numbers["paths"][0]["distances"]) == 2
        assert f"{study.best.value:.4g}" in (folder / "table.txt").read_text()
    assert "<svg" in (folder / "study.html").read_text() and "trial" in (folder / "plot.svg").read_text()
    # the report follows from the logs: the same command trains nothing and writes the same
    logs = {path: path.read_bytes() for path in folder.glob("*/*.jsonl")}
    table = (folder / "table.txt").read_bytes()
    again = run(tmp_path, *words)
    assert again.returncode == 0 and (folder / "table.txt").read_bytes() == table
    assert {path: path.read_bytes() for path in folder.glob("*/*.jsonl")} == logs
    refused = run(tmp_path, "study", "hpo", "--task", "digit")
    assert refused.returncode == 2 and "unknown task 'digit'" in refused.stderr
