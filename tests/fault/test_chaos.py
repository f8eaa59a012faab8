"""`paceline chaos`: one fault at a time, and a certificate of what a job has survived."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from paceline.cli.chaos import FAULTS, ROLES, ChaosCell, read_run_record
from paceline.lab import FaultPlan
from tests import command_jobs

RECIPE = """
task = "sum"
steps = 24
reproducible = true
[batch]
size = 64
shards = 8
"""


def steps(*numbers: int) -> list[dict[str, object]]:
    return [{"event": "step", "step": n, "time": float(i), "num_samples": 8} for i, n in enumerate(numbers)]


def test_each_step_counts_once_and_one_that_only_a_checkpoint_has_counts_as_well() -> None:
    undisturbed = read_run_record(steps(0, 1, 2, 3), 4)
    broken = [*steps(0, 1), {"event": "resume", "step": 1}, *steps(1, 3)]
    record = read_run_record([*broken, {"event": "hash", "step": 3, "sha256": "ab"}], 4)
    assert (record.num_repeated, record.sha256) == (1, "ab")
    assert record.count_samples(undisturbed) == 24, "step 2 was lost"
    later = read_run_record([*steps(0, 1, 3), {"event": "resume", "step": 3}], 4)
    assert later.count_samples(undisturbed) == 32


def test_another_hash_or_a_lost_sample_is_not_survived() -> None:
    values = {"outcome": "resumed", "num_samples": 8, "expected_samples": 8}
    same = ChaosCell("kill", "worker", sha256="a", expected_sha256="a", **values)
    other = ChaosCell("kill", "worker", sha256="a", expected_sha256="b", **values)
    assert same.is_survived(same_bits=True) and other.is_survived(same_bits=False)
    assert not other.is_survived(same_bits=True)
    assert not ChaosCell("kill", "worker", outcome="resumed", expected_samples=8).is_survived(same_bits=False)


def run_chaos(folder: Path, *words: str, seconds: float) -> dict[str, object]:
    command_jobs.prepare(folder, "")
    (folder / "recipe.toml").write_text(RECIPE)
    with command_jobs.start(folder, "chaos", "recipe.toml", "--steps", "24", *words) as command:
        output = "".join(text or "" for text in command.communicate(timeout=seconds))
    certificate = json.loads((folder / "chaos.json").read_text())
    assert command.returncode == 0, output
    return certificate


@pytest.mark.capability("Z9")
def test_a_killed_and_a_stopped_worker_are_survived_and_certified(lab, tmp_path: Path) -> None:
    """The fixture skips the test where there are no labs."""
    certificate = run_chaos(tmp_path, "--faults", "kill,clock-jump", "--roles", "worker", seconds=240.0)
    killed, jumped = certificate["cells"]
    assert (killed["outcome"], killed["num_samples"], killed["steps_lost"]) == ("continued", 1536, 0)
    assert killed["sha256"] == killed["expected_sha256"] != ""
    assert "share the clock" in jumped["refusal"] and certificate["run"] == 1


@pytest.mark.soak
@pytest.mark.capability("Z9")
@pytest.mark.timeout(3600)
def test_the_whole_matrix_is_survived(lab, tmp_path: Path) -> None:
    certificate = run_chaos(tmp_path, seconds=3300.0)
    assert len(certificate["cells"]) == len(FAULTS) * len(ROLES)
    assert certificate["run"] == certificate["survived"] >= 12


@pytest.mark.soak
@pytest.mark.capability("N5", clause="the rank that hangs, its operation, line and cause")
def test_a_blocked_link_is_named(lab, tmp_path: Path) -> None:
    made = lab(hosts=2)
    command_jobs.prepare(tmp_path, "")
    (tmp_path / "recipe.toml").write_text(RECIPE.replace("steps = 24", "steps = 100000"))
    words = ["--set", f"run_dir={tmp_path / 'run'}", "--set", "runtime.deadline_seconds=20"]
    plan = FaultPlan().partition(["h0"], ["h1"], step=30)
    command = ["paceline", "train", str(tmp_path / "recipe.toml"), "-n", "2", *words]
    found = made.run(command, faults=plan, settle_seconds=60.0)
    said = [line for line in found.output["h0"] if line.startswith("nothing has moved for ")]
    assert len(said) == 1 and "a blocked or lost link" in said[0], found.output
    assert found.exit_code != 0
