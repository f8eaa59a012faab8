"""`paceline chaos`: one fault at a time, and a certificate of what a job has survived."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from paceline.cli.chaos import FAULTS, ROLES, ChaosCell, expected_outcome, has_hit, read_run_record
from paceline.lab import FaultPlan
from paceline.recipe.recipe_loading import load_recipe
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


@pytest.mark.capability("Z9")
@pytest.mark.parametrize(
    ("fault", "role", "settings", "processes", "hosts", "expected"),
    [
        ("kill", "worker", {}, 2, 1, "continued"),
        ("kill", "rank0", {}, 2, 1, "continued"),
        ("kill", "launcher", {}, 2, 1, "resumed"),
        ("kill", "stage", {"strategy": "pipeline=2"}, 2, 1, "restarted"),
        ("kill", "stage", {"strategy": "pipeline=2", "elastic.redundancy": "buddy"}, 2, 1, "continued"),
        ("kill", "server", {"strategy": "servers=1 sync=server"}, 2, 1, "restarted"),
        ("kill", "worker", {"strategy": "servers=1 sync=server"}, 3, 1, "continued"),
        ("kill", "worker", {"strategy": "servers=1 sync=server"}, 2, 1, "restarted"),
        ("kill", "worker", {"elastic.mode": "off"}, 2, 1, "resumed"),
        ("kill", "worker", {"elastic.min_processes": 2}, 2, 1, "restarted"),
        ("kill", "worker", {"elastic.min_processes": 2, "elastic.max_restarts": 0}, 2, 1, "resumed"),
        ("kill", "worker", {}, 2, 2, "continued"),
        ("kill", "rank0", {}, 2, 2, "continued"),  # its launcher ends, and with it the store
        ("kill", "launcher0", {}, 4, 2, "continued"),
        ("kill", "launcher0", {"strategy": "shard=all", "elastic.redundancy": "buddy"}, 4, 2, "resumed"),
        ("kill", "launcher0", {"strategy": "servers=1 sync=server"}, 3, 3, "resumed"),
        ("kill", "launcher0", {}, 2, 1, "resumed"),
        ("kill", "rank0", {}, 4, 2, "continued"),
        ("kill", "launcher", {}, 4, 2, "continued"),
        ("kill", "launcher", {"strategy": "shard=all", "elastic.redundancy": "buddy"}, 4, 2, "resumed"),
        ("kill", "stage", {"strategy": "pipeline=2"}, 2, 2, "resumed"),
        ("stop", "stage", {"strategy": "pipeline=2"}, 2, 2, "continued"),
        ("partition", "worker", {"elastic.mode": "off"}, 2, 2, "continued"),
        ("disk-full", "rank0", {}, 2, 1, "resumed"),
        ("disk-full", "rank0", {"checkpoint.full_disk_seconds": 60.0}, 2, 1, "continued"),
    ],
)
def test_the_expected_outcome_is_that_of_the_table(
    fault: str,
    role: str,
    settings: dict[str, object],
    processes: int,
    hosts: int,
    expected: str,
    tmp_path: Path,
) -> None:
    (tmp_path / "recipe.toml").write_text(RECIPE)
    recipe = load_recipe(tmp_path / "recipe.toml", [f"{key}={value}" for key, value in settings.items()])
    outcome = expected_outcome(recipe, fault, role, processes=processes, hosts=hosts, fault_seconds=4.0)
    assert outcome == expected


def test_a_worse_outcome_than_the_expected_one_is_not_survived() -> None:
    values = {"num_samples": 8, "expected_samples": 8, "sha256": "a", "expected_sha256": "a"}
    order = ("continued", "restarted", "resumed", "lost")
    for i, expected in enumerate(order[:3]):
        for j, outcome in enumerate(order):
            cell = ChaosCell("kill", "worker", expected=expected, outcome=outcome, **values)
            assert cell.is_survived(same_bits=True) == (j <= i), cell
    assert ChaosCell("clock-jump", "worker", refusal="one clock").is_survived(same_bits=True)


def test_a_fault_that_has_hit_nothing_is_known() -> None:
    assert not has_hit([])
    assert not has_hit([{"fault": "kill", "process": "rank1", "was_running": False}])
    assert has_hit([{"fault": "kill", "process": "rank1", "was_running": True}])
    assert has_hit([{"fault": "partition"}])


def test_another_hash_or_a_lost_sample_is_not_survived() -> None:
    values = {"expected": "resumed", "outcome": "resumed", "num_samples": 8, "expected_samples": 8}
    same = ChaosCell("kill", "worker", sha256="a", expected_sha256="a", **values)
    other = ChaosCell("kill", "worker", sha256="a", expected_sha256="b", **values)
    assert same.is_survived(same_bits=True) and other.is_survived(same_bits=False)
    assert not other.is_survived(same_bits=True)
    lost = ChaosCell("kill", "worker", expected="resumed", outcome="resumed", expected_samples=8)
    assert not lost.is_survived(same_bits=False)


def run_chaos(folder: Path, *words: str, seconds: float) -> dict[str, object]:
    command_jobs.prepare(folder, "")
    (folder / "recipe.toml").write_text(RECIPE)
    with command_jobs.start(folder, "chaos", "recipe.toml", "--steps", "24", *words) as command:
        output = "".join(text or "" for text in command.communicate(timeout=seconds))
    certificate = json.loads((folder / "chaos.json").read_text())
    assert command.returncode == 0, output
    return certificate


@pytest.mark.capability("Z9")
@pytest.mark.timeout(900)
def test_eleven_faults_on_one_host_end_as_expected(lab, tmp_path: Path) -> None:
    """The fixture skips the test where there are no labs."""
    words = ["--hosts", "1", "--faults", "kill,stop,disk-full,clock-jump", "--fault-seconds", "0.5"]
    certificate = run_chaos(tmp_path, *words, seconds=850.0)
    outcomes = {(cell["fault"], cell["role"]): cell["outcome"] for cell in certificate["cells"]}
    assert {role: outcomes["kill", role] for role in ROLES[:-1]} == {
        "worker": "continued",
        "rank0": "continued",
        "stage": "restarted",
        "server": "restarted",
        "launcher": "resumed",
    }
    assert {outcomes["stop", role] for role in ROLES[:-1]} == {"continued"}
    assert {outcomes["clock-jump", role] for role in ROLES} == {"not run"}
    assert outcomes["disk-full", "rank0"] == "resumed"
    assert certificate["run"] == certificate["survived"] == 11


@pytest.mark.capability("Z9", "O9", "N12")
def test_a_lost_host_and_a_partition_end_as_expected(lab, tmp_path: Path) -> None:
    """Also the host whose launcher serves the store of the job."""
    words = ["--faults", "kill,partition", "--roles", "worker,launcher0", "--fault-seconds", "0.5"]
    killed, first, parted, refused = run_chaos(tmp_path, *words, seconds=400.0)["cells"]
    for cell in (killed, first):
        assert (cell["outcome"], cell["num_samples"], cell["steps_lost"]) == ("continued", 1536, 0)
        assert cell["sha256"] == cell["expected_sha256"] == parted["sha256"] != ""
    assert (parted["expected"], parted["outcome"]) == ("continued", "continued")
    assert refused["outcome"] == "not run"


@pytest.mark.soak
@pytest.mark.capability("Z9")
@pytest.mark.timeout(3600)
def test_the_whole_matrix_is_survived(lab, tmp_path: Path) -> None:
    certificate = run_chaos(tmp_path, seconds=3300.0)
    assert len(certificate["cells"]) == len(FAULTS) * len(ROLES)
    assert certificate["run"] == certificate["survived"] >= 12


@pytest.mark.soak
@pytest.mark.capability("N5", clause="the rank that hangs, its operation, line and cause")
def test_a_blocked_link_is_named_and_the_job_continues_on_the_first_host(lab, tmp_path: Path) -> None:
    """Long before the deadline of the ranks."""
    made = lab(hosts=2)
    command_jobs.prepare(tmp_path, "")
    (tmp_path / "recipe.toml").write_text(RECIPE.replace("steps = 24", "steps = 100000"))
    words = ["--set", f"run_dir={tmp_path / 'run'}", "--set", "runtime.deadline_seconds=120"]
    plan = FaultPlan().partition(["h0"], ["h1"], step=30)
    command = ["paceline", "train", str(tmp_path / "recipe.toml"), "-n", "2", *words]
    found = made.run(command, faults=plan, settle_seconds=60.0)
    said = [line for line in found.output["h0"] if line.startswith("nothing has moved for ")]
    assert len(said) == 1 and "a blocked or lost link" in said[0], found.output
    assert "the ranks behind the link count as lost (1)" in "\n".join(found.output["h0"])
    assert found.exit_codes["h1"] not in (0, None) and found.exit_codes["h0"] in (143, -9), found.exit_codes
    records = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    (members,) = [record for record in records if record["event"] == "members"]
    steps = [record["step"] for record in records if record["event"] == "step"]
    assert members["lost"] == [1] and steps[-1] > members["step"] + 100 and steps == sorted(set(steps))
