"""A worker is killed half-way, and what that took is measured, of jobs that only write what a job writes."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Sequence
from pathlib import Path

import pytest

from paceline.cli import kill_trial
from paceline.cli.kill_trial import kill_and_recover
from paceline.cli.study_runs import StudyRun
from paceline.recipe import load_recipe
from paceline.studies import SweepCell
from paceline.studies.comparison_trials import KillRecovery, read_recovery

pytestmark = [pytest.mark.capability("B7", "I12", "Z18"), pytest.mark.timeout(240)]
ROOT = Path(__file__).parents[3]
STEPS, SAVED = 20, 7
JOB = """
import json, signal, subprocess, sys, time
from pathlib import Path

steps, saved, way, out = int(sys.argv[1]), int(sys.argv[2]), sys.argv[3], Path(sys.argv[4])
first = saved if "--resume" in sys.argv else 0
wait = [sys.executable, "-S", "-c", "import time; time.sleep(200)", sys.argv[5]]
ranks = [subprocess.Popen(wait, env={"RANK": str(rank)}) for rank in range(2)]
out.mkdir(parents=True, exist_ok=True)

def tell(event, step):
    with (out / "metrics.jsonl").open("a") as file:
        file.write(json.dumps({"event": event, "step": step, "time": time.time()}) + "\\n")

def end(code):
    for rank in ranks:
        rank.kill()
        rank.wait()
    sys.exit(code)

signal.signal(signal.SIGTERM, lambda *given: end(143))
tell("run", first)
for step in range(first, steps):
    if step == steps // 2 + 3 and not first:  # here it waits for the kill
        ends = time.monotonic() + 100
        while all(rank.poll() is None for rank in ranks) and time.monotonic() < ends:
            time.sleep(0.005)
        if ranks[1].poll() is None:
            end(3)  # not the last rank
        tell("gone", step)
        if way == "ends":
            tell("step", step)  # it was under way
            end(1)
    tell("step", step)
end(0)
"""


def trial(
    folder: Path, patch: pytest.MonkeyPatch, way: str, steps: int = STEPS
) -> tuple[KillRecovery | None, list[dict[str, float]]]:
    """What is found of a job of two ranks that ends at a kill or goes on, and what it wrote."""
    recipe = load_recipe(ROOT / "recipes" / "digits.toml", [], strategy="replicas=2")
    run = StudyRun(SweepCell({"seed": "1"}), folder / "whole", recipe)
    (folder / "job.py").write_text(JOB)
    made, asked = folder / "killed" / "run", folder / "killed" / "asked.toml"

    def command(of: StudyRun, words: Sequence[str]) -> list[str]:
        given = [*map(str, (STEPS, SAVED)), way, str(made), str(asked)]
        return [sys.executable, "-S", str(folder / "job.py"), *given, *words]

    patch.setattr(kill_trial, "run_command", command)
    found = kill_and_recover(run, steps, folder / "killed")
    lines = (made / "metrics.jsonl").read_text().splitlines()
    return found, [json.loads(line) for line in lines]


def when(records: list[dict[str, float]], event: str, step: int) -> list[float]:
    return [record["time"] for record in records if (record["event"], record["step"]) == (event, step)]


def test_a_job_that_ends_is_resumed_and_its_last_step_does_not_count_as_going_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    found, records = trial(tmp_path, monkeypatch, "ends")
    last = STEPS // 2 + 3
    assert found is not None and (found.how, found.steps_again) == ("resumed", last + 1 - SAVED)
    (gone,), (beyond,) = when(records, "gone", last), when(records, "step", last + 1)
    asked = when(records, "step", STEPS // 2)[0]  # it was killed after this and before it was seen to be gone
    assert found.seconds is not None and beyond - gone <= found.seconds <= beyond - asked
    assert read_recovery(tmp_path / "killed") == found


def test_a_job_that_takes_no_notice_goes_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    found, records = trial(tmp_path, monkeypatch, "goes on")
    assert found is not None and (found.how, found.steps_again) == ("goes on", 0)
    last = STEPS // 2 + 3
    (gone,), (beyond,) = when(records, "gone", last), when(records, "step", last)
    asked = when(records, "step", STEPS // 2)[0]
    assert found.seconds is not None and beyond - gone <= found.seconds <= beyond - asked


def test_without_a_kill_nothing_is_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The twin: a kill that meets nobody is no recovery, and the job is ended."""
    monkeypatch.setattr(kill_trial, "_kill", lambda rank, mark: None)
    began = time.time()
    found, records = trial(tmp_path, monkeypatch, "goes on")
    assert found is None and not when(records, "gone", STEPS // 2 + 3) and records[0]["time"] >= began
    assert read_recovery(tmp_path / "killed") is None
