"""A process of a job is lost: replicas continue without it and get another one, other layouts start again."""

from __future__ import annotations

import json
import time
from collections import Counter
from functools import cache
from pathlib import Path
from tempfile import mkdtemp
from typing import Any

import pytest

from paceline.observe.rank_activity import read_operations
from tests import command_jobs
from tests.marks import soak_param

STEPS = 60

# Rank DIES kills itself before step AT, once.
TASK = """
import os, signal, time
import torch
from pathlib import Path
from torch import nn
from paceline import Loss, Task

def build(seed=0):
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(8, 16), nn.Dropout(0.2), nn.ReLU(), nn.Linear(16, 3))
    rows = torch.randn(96, 8), torch.randint(0, 3, (96,))
    calls = []
    def loss(model, batch):
        inputs, targets = batch
        calls.append(model.training)
        died = Path("died")
        evaluates = os.environ.get("PYTEST_HOW") == "evaluates"
        dies = os.environ.get("RANK") == os.environ.get("PYTEST_DIES")
        if dies and sum(calls) == int(os.environ["PYTEST_AT"]):
            if model.training is not evaluates and not died.exists():
                died.touch()
                if os.environ.get("PYTEST_HOW") == "raises":
                    raise ValueError("a mistake in the loss")
                stops = os.environ.get("PYTEST_HOW") == "stops"
                os.kill(os.getpid(), signal.SIGSTOP if stops else signal.SIGKILL)
        time.sleep(float(os.environ.get("PYTEST_SLOW", 0)))
        return Loss(nn.functional.cross_entropy(model(inputs), targets, reduction="sum"), len(targets))
    return Task(model=model, data=torch.utils.data.TensorDataset(*rows), loss=loss,
                held_out=torch.utils.data.TensorDataset(*(x[:12] for x in rows)))
"""
RECIPE = f"""
task = "task.py:build"
steps = {STEPS}
run_dir = "run"
reproducible = true
[batch]
size = 12
shards = 6
[checkpoint]
every_steps = 20
[evaluate]
every_steps = 20
[optimizer]
name = "adamw"
lr = 0.01
[average]
decay = 0.9
[runtime]
deadline_seconds = 60.0
"""


def run(folder: Path, *words: str, **environ: str) -> tuple[int, str, list[dict[str, Any]]]:
    """The exit code, the output and the events of a job of three processes."""
    command_jobs.prepare(folder, TASK)
    (folder / "recipe.toml").write_text(RECIPE)
    with command_jobs.start(folder, "train", "recipe.toml", "-n", "3", *words, **environ) as command:
        output = "".join(text or "" for text in command.communicate(timeout=200))
    path = folder / "run" / "metrics.jsonl"
    events = [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []
    return command.returncode, output, events


def sha256_of(output: str) -> str:
    return output.rpartition("state sha256: ")[2].split()[0]


@cache
def undisturbed() -> str:
    """The hash of the run that loses nobody."""
    code, output, _ = run(Path(mkdtemp()))
    assert code == 0, output
    return sha256_of(output)


def steps_of(events: list[dict[str, Any]]) -> Counter[int]:
    return Counter(event["step"] for event in events if event["event"] == "step")


def require_loss_and_replacement(events: list[dict[str, Any]], lost: int) -> None:
    """Check that two ranks continue and process 3 joins them, at once if it was there that early."""
    changes = [event for event in events if event["event"] == "members"]
    found = [(change["lost"], change["joined"], change["ranks"]) for change in changes]
    assert found in ([([lost], [], 2), ([], [3], 3)], [([lost], [3], 3)])


@pytest.mark.capability("N8")
@pytest.mark.parametrize(("dies", "at"), [("0", 31), soak_param("2", 41), soak_param("1", 2)])
def test_replicas_continue_and_end_with_the_same_bits(dies: str, at: int, tmp_path: Path) -> None:
    """Also without rank 0, right after the first step, and in the step after a checkpoint."""
    code, output, events = run(
        tmp_path, PYTEST_DIES=dies, PYTEST_AT=str(at * 2)
    )  # two shards a step and rank
    assert code == 0, output
    assert "was killed by SIGKILL" in output and "the other ranks continue without it" in output
    (change, *_) = [event for event in events if event["event"] == "members" and event["lost"]]
    assert change["lost"] == [int(dies)] and change["ranks"] == 2
    assert steps_of(events) == dict.fromkeys(range(STEPS), 1), "each step is recorded once"
    assert sha256_of(output) == undisturbed()


@pytest.mark.soak
@pytest.mark.capability("N8", clause="under local SGD and DiLoCo the peer leaves the round")
def test_a_round_of_diloco_ends_without_the_lost_replica_and_another_one_joins(tmp_path: Path) -> None:
    """The one that dies is in its second round of ten steps; its samples of this round are missing."""
    words = ("--strategy", "sync=diloco:10", "--set", "reproducible=false")
    code, output, events = run(tmp_path, *words, PYTEST_DIES="1", PYTEST_AT="24", PYTEST_SLOW="0.2")
    assert code == 0, output
    changes = [event for event in events if event["event"] == "members"]
    assert next((one["step"], one["lost"], one["ranks"]) for one in changes) == (10, [1], 2)
    (joined,) = [one for one in changes if one["joined"]]
    assert (joined["joined"], joined["ranks"], joined["step"] % 10) == ([3], 3, 0)
    rounds = {event["step"]: event["num_items"] for event in events if event["event"] == "step"}
    assert rounds == {9: 120, 19: 80, 29: 120, 39: 120, 49: 120, 59: 120}


@pytest.mark.soak
@pytest.mark.capability("N8", clause="a rank that is stopped")
def test_a_stopped_rank_counts_as_lost_and_the_others_continue(tmp_path: Path) -> None:
    """It is named at once, and killed after 10 s."""
    code, output, events = run(tmp_path, PYTEST_DIES="1", PYTEST_AT="41", PYTEST_HOW="stops")
    assert code == 0, output
    assert "rank 1 is stopped by a signal (SIGSTOP?)" in output and "must continue within 10 s" in output
    assert "for more than 10 s" in output and "the other ranks continue without it" in output
    (change, *_) = [event for event in events if event["event"] == "members" and event["lost"]]
    assert change["lost"] == [1] and set(steps_of(events)) == set(range(STEPS))
    assert sha256_of(output) == undisturbed()


def test_what_was_due_when_a_process_was_lost_is_done_again(tmp_path: Path) -> None:
    """Rank 2 dies in the evaluation after step 20, after which the state is saved."""
    code, output, events = run(tmp_path, PYTEST_DIES="2", PYTEST_AT="40", PYTEST_HOW="evaluates")
    assert code == 0, output
    (change,) = [event for event in events if event["event"] == "members" and event["lost"]]
    assert change["step"] == 20
    for kind in ("evaluation", "checkpoint"):
        assert {event["step"] for event in events if event["event"] == kind} == {20, 40, 60}
    assert sha256_of(output) == undisturbed()


@pytest.mark.soak  # a replacement joins the next one as well
@pytest.mark.capability("N6", clause="a worker joins and leaves while the job runs")
def test_a_replacement_joins_and_ends_with_the_same_bits(tmp_path: Path) -> None:
    """Steps last long enough for a new process to start, which ends no save that has begun."""
    words = ("--set", "checkpoint.every_steps=1")
    code, output, events = run(tmp_path, *words, PYTEST_DIES="1", PYTEST_AT="10", PYTEST_SLOW="0.25")
    assert code == 0, output
    require_loss_and_replacement(events, lost=1)
    saved = {event["step"] for event in events if event["event"] == "checkpoint"}
    # The save of the lost rank may be incomplete.
    assert saved >= {event["step"] for event in events if event["event"] == "members" and not event["lost"]}
    assert set(steps_of(events)) == set(range(STEPS))
    assert sha256_of(output) == undisturbed()


def test_ranks_leave_on_request_down_to_the_least_number(tmp_path: Path) -> None:
    """First rank 0, which writes the files; of the two that are left none may leave."""
    command_jobs.prepare(tmp_path, TASK)
    (tmp_path / "recipe.toml").write_text(RECIPE)
    with command_jobs.start(tmp_path, "train", "recipe.toml", "-n", "2:3", PYTEST_SLOW="0.1") as job:
        while not (ranks := read_operations(tmp_path / "run")) or min(one.step for one in ranks) < 3:
            assert job.poll() is None
            time.sleep(0.1)
        answers = []
        for _ in range(2):
            with command_jobs.start(tmp_path, "leave", "run", "--rank", "0") as asked:
                answers.append("".join(text or "" for text in asked.communicate(timeout=100)))
        output = "".join(text or "" for text in job.communicate(timeout=200))
    assert "left: rank 0; 2 ranks continue" in answers[0]
    assert "1 rank would be left, at least 2 are needed" in answers[1]
    assert job.returncode == 0, output
    events = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    changes = [event for event in events if event["event"] == "members"]
    assert [(change["lost"], change["joined"], change["ranks"]) for change in changes] == [([0], [], 2)]
    assert set(steps_of(events)) == set(range(STEPS)) and sha256_of(output) == undisturbed()


def test_a_job_with_too_few_processes_left_ends_and_starts_again(tmp_path: Path) -> None:
    code, output, _ = run(tmp_path, "--set", "elastic.min_processes=3", PYTEST_DIES="1", PYTEST_AT="90")
    assert code == 0, output
    assert "2 processes of 3 are left, fewer than 3" in output
    assert "restart 1 of 3 from step-00000040" in output and sha256_of(output) == undisturbed()


@pytest.mark.capability("N8", clause="from the newest checkpoint")
def test_a_sharded_model_starts_again_from_its_newest_checkpoint(tmp_path: Path) -> None:
    code, output, events = run(
        tmp_path, "--strategy", "replicas=1 shard=3 zero=1", PYTEST_DIES="1", PYTEST_AT="90"
    )
    assert code == 0, output
    assert "restart 1 of 3 from step-00000040" in output
    assert [event["step"] for event in events if event["event"] == "resume"] == [40]
    assert sha256_of(output) == undisturbed()


@pytest.mark.capability("N8", clause="parts of the state from copies in memory")
@pytest.mark.capability("N6", clause="a worker joins and leaves while the job runs")
def test_a_sharded_model_continues_from_copies_in_memory_and_gets_a_new_process(tmp_path: Path) -> None:
    """Rank 0 is lost, which writes the files; nothing is read from the disk."""
    words = ("--strategy", "shard=all zero=3", "--set", "elastic.redundancy=buddy")
    code, output, events = run(tmp_path, *words, PYTEST_DIES="0", PYTEST_AT="14", PYTEST_SLOW="0.25")
    assert code == 0, output
    require_loss_and_replacement(events, lost=0)
    assert not [event for event in events if event["event"] == "resume"] and "restart 1" not in output
    assert set(steps_of(events)) == set(range(STEPS))
    assert sha256_of(output) == undisturbed()


def test_a_job_that_has_saved_nothing_new_is_not_started_again(tmp_path: Path) -> None:
    code, output, _ = run(
        tmp_path, "--strategy", "replicas=1 shard=3 zero=1", PYTEST_DIES="1", PYTEST_AT="20"
    )
    assert code == 137 and "restart" not in output.replace("restarts", "")


def test_an_error_ends_the_job(tmp_path: Path) -> None:
    """Another rank would raise it as well."""
    code, output, events = run(tmp_path, PYTEST_DIES="1", PYTEST_AT="20", PYTEST_HOW="raises")
    assert code == 1 and "a mistake in the loss" in output
    assert not [event for event in events if event["event"] == "members"]


def test_without_elastic_the_job_ends(tmp_path: Path) -> None:
    code, output, _ = run(tmp_path, "--set", "elastic.mode=off", PYTEST_DIES="1", PYTEST_AT="90")
    assert code == 137 and "continue without it" not in output
