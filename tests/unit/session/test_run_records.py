"""The records of ranks: none without a folder, one a window, and what lies between two rounds is in none."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from paceline.cli.train import record_failure
from paceline.job.cluster import Cluster
from paceline.launch import LaunchOutcome
from paceline.launch.outcome import WorkerFailure
from paceline.observe import StepStats
from paceline.recipe import Recipe
from paceline.report import read_run
from paceline.session import fit
from paceline.session.run_records import RankRecords
from paceline.session.session import Session
from paceline.session.sink_setup import build_sinks
from paceline.session.train_rank import write_report_page
from paceline.testing.parity import build_test_session


class Kept:
    """A sink that keeps what it is told."""

    def __init__(self) -> None:
        self.records: list[dict[str, Any]] = []

    def step(self, stats: StepStats) -> None:
        self.event("step", stats.record())

    def event(self, name: str, record: Mapping[str, Any]) -> None:
        self.records.append({**record, "event": name})

    def close(self) -> None:
        """Nothing is open."""

    def of(self, event: str) -> list[dict[str, Any]]:
        return [record for record in self.records if record["event"] == event]


def build(steps: int = 5) -> Session:
    options = {"model": "mlp", "hidden": [8]}
    batch = {"size": 8, "shards": 2}
    recipe = Recipe(task="digits", steps=steps, options=options, batch=batch)
    return build_test_session(Cluster.single(), recipe)


@pytest.mark.capability("P1")
def test_a_window_is_written_when_it_is_full_and_the_rest_at_the_end() -> None:
    session, kept = build(), Kept()
    ranks = RankRecords(session, [kept], written=True, window=2)
    for stats in session.rounds():
        ranks.step(stats)
        ranks.begin()
    ranks.flush()
    ranks.flush()  # there is nothing left
    assert [(record["step"], record["rounds"]) for record in kept.of("ranks")] == [(1, 2), (3, 2), (4, 1)]


def test_what_lies_between_two_rounds_belongs_to_none() -> None:
    """Processor time that an evaluation would take; in the twin it counts, because nobody says `begin`."""
    spent = []
    for says_begin in (True, False):
        session, kept = build(), Kept()
        ranks = RankRecords(session, [kept], written=True, window=10)
        for stats in session.rounds():
            ranks.step(stats)
            sum(range(2_000_000))
            if says_begin:
                ranks.begin()
        ranks.flush()
        spent.append(kept.of("ranks")[0]["cpu_seconds"])
    assert spent[0] < spent[1]


def test_without_a_folder_nothing_is_measured() -> None:
    kept = Kept()
    fit(build(), None, [kept])
    assert len(kept.of("step")) == 5 and kept.of("ranks") == [] and len(kept.of("end")) == 1


@pytest.mark.capability("P2")
def test_a_page_that_cannot_be_written_takes_nothing_from_the_run(tmp_path: Path) -> None:
    """A folder is in its place. The failure of a run whose folder is spoiled is told on the terminal only."""
    session = build()
    (tmp_path / "recipe.toml").write_text('task = "digits"\n')
    fit(session, tmp_path, build_sinks(session, tmp_path, None))
    (tmp_path / "report.html").mkdir()
    said: list[str] = []
    write_report_page(tmp_path, said.append)
    assert said and "report.html" in said[0] and f"paceline report {tmp_path}" in said[0]
    assert [path.name for path in tmp_path.glob(".report*")] == []
    assert read_run(tmp_path).status == "finished"


@pytest.mark.capability("P2")
def test_a_failure_is_written_where_there_is_a_run_and_nowhere_else(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    failure = WorkerFailure(1, "error", 0.0, "raised ValueError: x", 1)
    outcome = LaunchOutcome(1, (failure,), "rank 1 raised ValueError: x\n")
    record_failure(tmp_path / "none", outcome)
    assert not (tmp_path / "none").exists()
    (tmp_path / "recipe.toml").write_text('task = "digits"\n')
    record_failure(tmp_path, outcome)
    run = read_run(tmp_path)
    assert run.error is not None and (run.error["rank"], run.error["kind"]) == (1, "error")
    assert "ERROR   rank 1 raised ValueError: x" in (tmp_path / "log.txt").read_text()
    (tmp_path / "log.txt").unlink()
    (tmp_path / "log.txt").mkdir()
    record_failure(tmp_path, outcome)
    assert "cannot record the failure" in capsys.readouterr().out
