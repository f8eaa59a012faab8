"""Reading a run folder in every state in which a run can leave it."""

from pathlib import Path

import pytest

from paceline.errors import DataError
from paceline.report import find_runs, read_run, resolve_run_folder
from tests.unit.report.runs import evaluation, start, stats, steps, write


@pytest.mark.capability("P2")
@pytest.mark.parametrize(
    ("after", "status"),
    [
        ([("end", {"step": 3, "stopped": False})], "finished"),
        ([("end", {"step": 3, "stopped": True})], "stopped"),
        ([("error", {"text": "rank 1 raised", "kind": "error", "exit_code": 1})], "failed"),
        ([], "running"),
    ],
)
def test_the_status_is_what_the_last_start_says(tmp_path: Path, after: list, status: str) -> None:
    assert write(tmp_path / "run", ("run", start()), *steps(0, 3), *after).status == status


@pytest.mark.parametrize(
    ("changes", "status"),
    [({"process_start": 1}, "lost"), ({"pid": 2**22 + 1}, "lost"), ({"host": "another"}, "running")],
)
def test_a_run_whose_process_is_gone_is_lost_and_one_elsewhere_may_run(
    tmp_path: Path, changes: dict, status: str
) -> None:
    assert write(tmp_path / "run", ("run", start(**changes)), *steps(0, 2)).status == status


def test_a_resumed_run_is_no_longer_failed_and_counts_steps_as_they_were_done_last(tmp_path: Path) -> None:
    run = write(
        tmp_path / "run",
        ("run", start()),
        *steps(0, 7, loss=1.0),
        evaluation(4, 1.0),
        evaluation(6, 9.0),
        ("error", {"text": "x", "kind": "error", "exit_code": 1}),
        ("run", start(step=4)),
        *steps(4, 10, loss=2.0),
        evaluation(10, 0.5),
        ("end", {"step": 10, "stopped": False}),
    )
    assert [s["step"] for s in run.steps] == list(range(10))
    assert [s["loss"] for s in run.steps] == [1.0] * 4 + [2.0] * 6
    assert [(e["step"], e["loss"]) for e in run.evaluations] == [(4, 1.0), (10, 0.5)]
    assert (run.status, run.done, len(run.starts)) == ("finished", 10, 2)


def test_a_run_that_rolled_back_within_itself_counts_a_step_once(tmp_path: Path) -> None:
    run = write(tmp_path / "run", ("run", start()), *steps(0, 5), *steps(2, 4, loss=3.0))
    assert [(s["step"], s["loss"]) for s in run.steps] == [(0, 1.0), (1, 1.0), (2, 3.0), (3, 3.0)]


def test_what_a_crash_cut_short_is_counted_and_spoils_nothing(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    write(folder, ("run", start()), *steps(0, 2))
    with (folder / "metrics.jsonl").open("a") as file:
        file.write('{"event": "step", "lo')
    run = write(folder, ("run", start(step=2)), stats(2))
    assert [s["step"] for s in run.steps] == [0, 1, 2] and run.unreadable == 1


def test_a_folder_without_metrics_recipe_or_certificate_can_be_read(tmp_path: Path) -> None:
    (tmp_path / "recipe.toml").write_text("not = = toml")
    (tmp_path / "certificate.json").write_text("[")
    run = read_run(tmp_path)
    assert (run.status, run.steps, run.recipe, run.certificate, run.done) == ("new", [], {}, None, 0)


def test_full_files_are_read_before_the_present_one(tmp_path: Path) -> None:
    write(tmp_path, ("run", start()), *steps(0, 3))
    (tmp_path / "metrics.jsonl").rename(tmp_path / "metrics.0001.jsonl")
    assert [s["step"] for s in write(tmp_path, *steps(3, 5)).steps] == [0, 1, 2, 3, 4]


def test_runs_are_found_and_others_are_named_with_the_next_step(tmp_path: Path) -> None:
    first = write(tmp_path / "runs" / "one").folder
    assert find_runs([tmp_path / "runs"]) == [first] == find_runs([first])
    assert resolve_run_folder(first / "checkpoints" / "step-00000001") == first
    with pytest.raises(DataError, match=r"did you mean .*one"):
        resolve_run_folder(tmp_path / "runs")
    with pytest.raises(DataError, match="does not exist"):
        find_runs([tmp_path / "nothing"])
