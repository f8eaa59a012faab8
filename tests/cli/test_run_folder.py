"""What a run of two processes leaves in its folder; what `paceline runs` and `paceline report` make of it."""

import copy
import json
import re
import shutil
import subprocess
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from paceline.observe import PHASES
from paceline.observe.metrics_schema import find_schema_errors
from paceline.report import RecordedRun, read_run, render_page, summarize_run
from paceline.report.rank_balance import rank_times
from paceline.report.sent_bytes import compare_sent_bytes
from tests.commands import run
from tests.conftest import EVERY, STEPS, Train, Trained

PARAMETERS = 2 * 64 + 64 + 64 * 2 + 2
TALLY = 8 * (4 + 1 + 4)  # loss, count, micro-batches, stops; one metric; four tensors; no buffers


def paceline(*arguments: object, cwd: Path) -> subprocess.CompletedProcess[str]:
    return run(cwd, *arguments)


@pytest.mark.capability("P2")
def test_the_folder_has_everything_and_every_record_fits_the_schema(trained: Trained) -> None:
    names = {path.name for path in trained.folder.iterdir()}
    assert names == {"recipe.toml", "metrics.jsonl", "log.txt", "checkpoints", "report.html"}
    assert trained.folder.parent.name == "runs"
    assert [text for record in trained.records for text in find_schema_errors(record)] == []
    order = list(dict.fromkeys(record["event"] for record in trained.records))
    assert order[0] == "run" and order[-1] == "end"
    assert {"step", "ranks", "evaluation", "checkpoint", "communication"} <= set(order)
    for name in ("metrics.jsonl", "report.html"):
        assert str(Path("runs", trained.folder.name, name)) in trained.printed


@pytest.mark.capability("P2")
def test_the_level_of_the_recipe_decides_what_is_written(trained: Trained, trained_alone: Trained) -> None:
    assert (len(trained.of("cache")), len(trained_alone.of("cache"))) == (0, 1)
    lines = [(run.folder / "log.txt").read_text().splitlines() for run in (trained, trained_alone)]
    assert len([line for line in lines[1] if re.search(r" step \d+: ", line)]) == STEPS > len(lines[0])
    stamp = re.compile(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\.\d{3}Z (INFO|WARNING|ERROR) +\S")
    assert all(stamp.match(line) for line in [*lines[0], *lines[1]])
    assert "evaluation: step 20" in "".join(lines[0]) and "end: step 50" in lines[0][-1]


@pytest.mark.capability("P1")
def test_every_step_has_loss_rate_norm_and_throughput_and_held_out_accuracy_is_measured(
    trained: Trained,
) -> None:
    steps = trained.of("step")
    assert [step["step"] for step in steps] == list(range(STEPS))
    for step in steps:
        assert step["samples_per_second"] == pytest.approx(step["num_samples"] / step["seconds"])
        assert step["num_samples"] == 32 and step["grad_norm"] > 0 and 0 <= step["metrics"]["accuracy"] <= 1
    assert sum(step["loss"] for step in steps[-5:]) < sum(step["loss"] for step in steps[:5])
    assert [e["step"] for e in trained.of("evaluation")] == [EVERY, 2 * EVERY, STEPS]
    assert trained.of("evaluation")[-1]["metrics"]["accuracy"] > 0.7


@pytest.mark.capability("P1")
def test_the_numbers_of_every_rank_are_there_and_cost_no_collective_in_a_step(trained: Trained) -> None:
    """Three gathers in fifty steps; all else that was sent belongs to training, evaluating and saving."""
    ranks = trained.of("ranks")
    assert [(r["rank"], r["rounds"], r["step"]) for r in ranks] == [
        (rank, rounds, step) for rounds, step in ((20, 19), (20, 39), (10, 49)) for rank in (0, 1)
    ]
    assert all(r["cpu_seconds"] > 0 and r["peak_bytes"] > 2**20 and r["seconds"] > 0 for r in ranks)
    (books,) = trained.of("communication")
    assert books["rows"]["gather world"]["calls"] == 3
    calls = {name: row["calls"] for name, row in books["rows"].items() if row["calls"] >= STEPS}
    assert calls == {
        "all_reduce replica": STEPS,
        "all_reduce world": STEPS + 2,
    }  # gradients; tally, evaluation


@pytest.mark.capability("P10")
def test_the_parts_of_a_step_add_up_and_the_slow_rank_is_the_one_that_is_waited_for(trained: Trained) -> None:
    assert unaccounted(trained.records) <= 0.03 and covered(trained.records) >= 0.97
    first, slow = rank_times(read_run(trained.folder))
    assert sum(first.parts.values()) == pytest.approx(first.seconds, rel=0.03)
    assert first.share("waiting") > 0.3 > 0.1 > slow.share("waiting")
    assert max(slow.parts, key=slow.share) == "forward" and slow.share("forward") > 2 * first.share("forward")
    assert first.hidden_fraction < 0.3  # while it waits for rank 1 it does nothing else


@pytest.mark.capability("P10")
def test_a_phase_that_is_counted_twice_breaks_the_sum(trained: Trained) -> None:
    """The twin of the test above."""
    records = copy.deepcopy(trained.records)
    for record in records:
        if record["event"] == "ranks":
            record["phases"]["forward"] += record["phases"]["communication"]
    assert unaccounted(records) > 0.03


@pytest.mark.capability("P10")
def test_a_phase_that_is_not_counted_leaves_a_gap(trained: Trained) -> None:
    """The other twin: on the slow rank forward is most of the time."""
    records = copy.deepcopy(trained.records)
    for record in records:
        if record["event"] == "ranks":
            record["phases"]["forward"] = 0.0
    assert covered(records) < 0.97


def covered(records: Sequence[dict[str, Any]]) -> float:
    """The least share of a rank's time that its phases tell of."""
    found = [record for record in records if record["event"] == "ranks"]
    return min(sum(record["phases"].values()) / record["seconds"] for record in found)


def unaccounted(records: Sequence[dict[str, Any]]) -> float:
    """By how much the phases exceed the time that they are parts of, on any rank, as a share of it."""
    found = [record for record in records if record["event"] == "ranks"]
    assert found and all(record["phases"].keys() == set(PHASES) for record in found)
    return max(sum(record["phases"].values()) / record["seconds"] - 1 for record in found)


@pytest.mark.capability("P1", "G14")
def test_every_rank_sends_what_the_closed_form_says(trained: Trained) -> None:
    """By hand: 2 (P - 1) / P = 1 times the gradient and the tally, in each of the steps, on both ranks."""
    (begun,) = trained.of("run")
    assert (begun["gradient_bytes"], begun["tally_bytes"]) == (4 * PARAMETERS, TALLY)
    for rank in (0, 1):
        counted = sum(r["sent_bytes"] for r in trained.of("ranks") if r["rank"] == rank)
        assert counted == STEPS * (4 * PARAMETERS + TALLY)
    run = read_run(trained.folder)
    assert [(one.rank, one.rounds, one.agrees) for one in compare_sent_bytes(run)] == [
        (0, STEPS, True),
        (1, STEPS, True),
    ]
    assert "per step, exactly as predicted." in " ".join(summarize_run(run))


@pytest.mark.capability("P1", "G14")
def test_replicas_that_train_alone_send_once_a_round(train: Train) -> None:
    run = read_run(train("--strategy", "sync=local:5", "--set", "options.rest_seconds=0.0").folder)
    assert [(one.rounds, one.steps, one.agrees) for one in compare_sent_bytes(run)] == [
        (STEPS // 5, STEPS, True)
    ] * 2
    said = " ".join(summarize_run(run))
    assert "per round of 5 steps, exactly as predicted, 4.94 times less than plain data parallelism." in said


@pytest.mark.capability("P1", "G14")
@pytest.mark.parametrize(
    "event, field, change", [("ranks", "sent_bytes", 4.0), ("run", "gradient_bytes", -4)]
)
def test_one_number_too_many_is_seen_and_said(trained: Trained, event: str, field: str, change: Any) -> None:
    """The twin of the test above: a rank that sends four bytes more, a gradient that should be smaller."""
    run = read_run(trained.folder)
    records = copy.deepcopy(run.records)
    first = next(record for record in records if record["event"] == event)
    first[field] += change
    wrong = replace(run, records=records)
    assert compare_sent_bytes(wrong)[0].agrees is False
    assert ", but the prediction is" in " ".join(summarize_run(wrong)) and ">differs<" in render_page([wrong])


@pytest.mark.capability("P2")
def test_runs_are_listed_for_people_and_for_programs(trained: Trained, trained_alone: Trained) -> None:
    place = trained.folder.parents[1]
    head, row = paceline("runs", cwd=place).stdout.splitlines()
    assert head.split()[:4] == ["run", "status", "started", "ranks"]
    assert row.split()[:2] == [f"runs/{trained.folder.name}", "finished"] and f"{STEPS}/{STEPS}" in row
    found = json.loads(paceline("runs", trained.folder, trained_alone.folder, "--json", cwd=place).stdout)
    assert [(run["status"], run["ranks"], run["steps"]) for run in found] == [
        ("finished", 2, STEPS),
        ("finished", 1, STEPS),
    ]
    assert found[0]["held_out"] == trained.of("evaluation")[-1]["loss"]
    nothing = paceline("runs", cwd=trained.folder)
    assert nothing.returncode == 0 and "no runs in runs" in nothing.stdout


@pytest.mark.capability("P1")
def test_a_report_of_one_run_and_one_that_compares_two(
    trained: Trained, trained_alone: Trained, tmp_path: Path
) -> None:
    before = (trained.folder / "report.html").read_text()
    one = paceline("report", trained.folder, cwd=tmp_path)
    assert one.stdout.splitlines()[:-1] == summarize_run(read_run(trained.folder))
    assert (trained.folder / "report.html").read_text() == before.replace(
        f"<footer>runs/{trained.folder.name}", f"<footer>{trained.folder}"
    )
    both = paceline("report", trained.folder, trained_alone.folder, "--json", cwd=tmp_path)
    found = json.loads(both.stdout)
    assert found["page"] == "report.html" and [run["ranks"] for run in found["runs"]] == [2, 1]
    page = (tmp_path / "report.html").read_text()
    assert "2 runs compared" in page and "optimizer.lr" in page and "<td>0.001</td>" in page
    wrong = paceline("report", tmp_path, cwd=tmp_path)
    assert wrong.returncode == 2 and "is not a run folder" in wrong.stderr


@pytest.mark.capability("Z2")
def test_verifying_a_run_puts_the_certificate_into_its_folder(trained_alone: Trained) -> None:
    """A planted fault, or another strategy than the run's, is not what the run was."""
    folder = trained_alone.folder
    other = paceline("verify", folder, "--steps", 1, "--set", "batch.size=16", cwd=folder)
    assert other.returncode == 0 and not (folder / "certificate.json").exists()
    (saved,) = (folder / "checkpoints").glob("step-*")
    early = paceline("verify", saved, cwd=folder)
    assert early.returncode == 1 and "not verified" in early.stdout and "all are those" in early.stdout
    done = paceline("verify", folder, "--steps", 2, cwd=folder)
    assert done.returncode == 0, done.stderr
    certificate = json.loads((folder / "certificate.json").read_text())
    assert certificate["ok"] and (certificate["steps"], certificate["processes"]) == (2, 1)
    assert "verified: 2 steps" in (folder / "report.html").read_text()
    assert summarize_run(read_run(folder))[-1].startswith("Certificate: verified: 2 steps")
    assert certificate["checkpoints"] == [saved.name] and f"certificates of: {saved.name}" in done.stdout


@pytest.mark.capability("Z2")
def test_a_checkpoint_that_is_copied_alone_has_its_certificate(
    trained_alone: Trained, tmp_path: Path
) -> None:
    (saved,) = (trained_alone.folder / "checkpoints").glob("step-*")
    if not (trained_alone.folder / "certificate.json").exists():
        paceline("verify", trained_alone.folder, "--steps", 2, cwd=tmp_path)
    copied = Path(shutil.copytree(saved, tmp_path / saved.name))
    shown = paceline("verify", copied, cwd=tmp_path)
    assert shown.returncode == 0, shown.stdout + shown.stderr
    for text in (f"step {STEPS} of run", "recipe sha256", "verified: 2 steps", "all are those"):
        assert text in shown.stdout
    (file,) = copied.glob("*.safetensors")
    data = bytearray(file.read_bytes())
    data[-1] ^= 1
    file.write_bytes(data)
    changed = paceline("verify", copied, "--json", cwd=tmp_path)
    found = json.loads(changed.stdout)
    assert changed.returncode == 1 and not found["ok"] and found["verification"]["ok"]
    assert re.fullmatch(r"'.+' in rank-00000.safetensors has changed", *found["mismatches"])
    other = paceline("verify", copied, "--strategy", "replicas=2", cwd=tmp_path)
    assert other.returncode == 2 and "is a checkpoint" in other.stderr


def test_a_run_reads_the_same_after_it_was_moved(trained: Trained, tmp_path: Path) -> None:
    moved = tmp_path / "elsewhere"
    moved.mkdir()
    for name in ("recipe.toml", "metrics.jsonl"):
        (moved / name).write_bytes((trained.folder / name).read_bytes())
    here: RecordedRun = read_run(moved)
    assert (here.name, summarize_run(here)) == ("elsewhere", summarize_run(read_run(trained.folder)))
