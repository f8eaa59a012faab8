"""Jobs that hang, and one that is slow: the launcher says which rank the others wait for, where and why."""

from __future__ import annotations

import json
import os
import signal
import time
from pathlib import Path

import pytest

from paceline.observe.rank_activity import read_operations
from tests import command_jobs

# Rank 1 does HOW at its call AT, once.
TASK = """
import os, time
import torch
from torch import nn
from paceline import Callback, Loss, Task

HOW, RANK = os.environ.get("PYTEST_HOW"), os.environ.get("RANK")

class Rows(torch.utils.data.Dataset):
    seen = 0
    def __len__(self):
        return 64
    def __getitem__(self, i):
        Rows.seen += 1
        if HOW == "loader" and RANK == "1" and Rows.seen == 200:
            time.sleep(600)
        return torch.ones(4) * i, i % 3

class Extra(Callback):
    def on_step(self, session, stats):
        if HOW == "shapes" and stats.step == 30:
            value = torch.ones(2 if RANK == "1" else 3)
            session.net.all_reduce(value, session.mesh.world).wait()
        if HOW == "missing" and stats.step == 30 and RANK == "1":
            time.sleep(600)
        if HOW == "slow" and stats.step == 30 and RANK == "1":
            end = time.monotonic() + 9
            while time.monotonic() < end:
                pass
        time.sleep(0.02)

def build(seed=0):
    def loss(model, batch):
        inputs, targets = batch
        return Loss(nn.functional.cross_entropy(model(inputs), targets, reduction="sum"), len(targets))
    return Task(model=nn.Linear(4, 3), data=Rows(), loss=loss, callbacks=[Extra()])
"""
OWN_LOOP = """
import os
from paceline import own_loop, Loss
from torch import nn
import task
import time

with own_loop("recipe.toml", task.build) as loop:
    for batch in loop.batches():
        inputs, targets = batch
        values = loop.model(inputs)
        loop.backward(Loss(nn.functional.cross_entropy(values, targets, reduction="sum"), len(targets)))
        loop.step()
        if os.environ["RANK"] == "1" and loop.step_number == 30:
            break
    print("left", flush=True)
    if os.environ["RANK"] == "1":
        time.sleep(600)
"""
OPTIONS = ("--set", "steps=3000", "--set", "elastic.mode=off", "--set", "runtime.deadline_seconds=25")


def run(folder: Path, how: str, *words: str) -> tuple[int, str, float]:
    """The exit code, the output and the seconds of a job of two ranks that hangs."""
    command_jobs.prepare(folder, TASK)
    words = words or ("train", "recipe.toml", "-n", "2", *OPTIONS)
    began = time.monotonic()
    with command_jobs.start(folder, *words, PYTEST_HOW=how) as command:
        output = "".join(text or "" for text in command.communicate(timeout=100))
    return command.returncode, output, time.monotonic() - began


def explanations(output: str) -> list[str]:
    return [line for line in output.splitlines() if line.startswith("nothing has moved for ")]


@pytest.mark.soak
@pytest.mark.capability("N5", clause="the rank that hangs, its operation, line and cause")
def test_ranks_that_pass_different_sizes_are_named_and_ended(tmp_path: Path) -> None:
    code, output, _ = run(tmp_path, "shapes")
    assert code != 0, output
    assert explanations(output), output


@pytest.mark.capability("N5", clause="the rank that hangs, its operation, line and cause")
def test_a_rank_that_is_missing_is_named_with_its_line_also_on_request(tmp_path: Path) -> None:
    command_jobs.prepare(tmp_path, TASK)
    with command_jobs.start(
        tmp_path, "train", "recipe.toml", "-n", "2", *OPTIONS, PYTEST_HOW="missing"
    ) as job:
        run_dir, expires = tmp_path / "run", time.monotonic() + 60
        while not any(one.step >= 30 and time.time() - one.since > 1 for one in read_operations(run_dir)):
            assert time.monotonic() < expires and job.poll() is None
            time.sleep(0.1)
        with command_jobs.start(tmp_path, "explain", "run", "--json") as asked:
            text, errors = asked.communicate(timeout=100)
        assert asked.returncode == 0, errors
        found = json.loads(text)
        assert (found["explanation"]["kind"], found["explanation"]["ranks"]) == ("missing", [1])
        output = "".join(text or "" for text in job.communicate(timeout=100))
    (line,) = explanations(output)
    assert "rank 1 is missing from" in line and "on_step (task.py:25)" in line, output
    assert job.returncode == 4, output


@pytest.mark.soak
def test_a_loader_that_is_stuck_is_named_with_its_line(tmp_path: Path) -> None:
    code, output, _ = run(tmp_path, "loader")
    (line,) = explanations(output)
    assert "rank 1" in line and "in data of step" in line and "__getitem__ (task.py:17)" in line, output
    assert code == 4


@pytest.mark.soak
def test_a_rank_whose_loop_ends_early_is_named_and_the_job_is_ended(tmp_path: Path) -> None:
    command_jobs.prepare(tmp_path, TASK)
    (tmp_path / "loop.py").write_text(OWN_LOOP)
    recipe = (tmp_path / "recipe.toml").read_text()
    (tmp_path / "recipe.toml").write_text(recipe.replace("steps = 6", "steps = 3000"))
    with command_jobs.start(tmp_path, "run", "-n", "2", "loop.py", PYTEST_HOW="uneven") as command:
        output = "".join(text or "" for text in command.communicate(timeout=100))
    (line,) = explanations(output)
    assert "rank 1 is missing from" in line and "been after its loop" in line and "loop.py:18" in line, output
    assert command.returncode != 0 and "hung: rank 1" in output, output


@pytest.mark.soak
def test_a_stopped_rank_is_named_and_the_job_continues_with_it(tmp_path: Path) -> None:
    command_jobs.prepare(tmp_path, TASK)
    words = ("train", "recipe.toml", "-n", "2", *OPTIONS, "--set", "steps=600")
    with command_jobs.start(tmp_path, *words) as job:
        run_dir, expires = tmp_path / "run", time.monotonic() + 60
        while not (ranks := [one for one in read_operations(run_dir) if one.step >= 30]):
            assert time.monotonic() < expires and job.poll() is None
            time.sleep(0.1)
        (victim,) = [one.pid for one in read_operations(run_dir) if one.rank == 1]
        assert ranks
        os.kill(victim, signal.SIGSTOP)
        time.sleep(8)
        os.kill(victim, signal.SIGCONT)
        output = "".join(text or "" for text in job.communicate(timeout=100))
    (line,) = explanations(output)
    assert "its process is stopped" in line and "SIGCONT" in line, output
    assert job.returncode == 0 and "the job continues after" in output, output


@pytest.mark.soak  # test_hang_explainer.py has the decision
def test_a_step_that_is_slow_is_not_called_a_hang(tmp_path: Path) -> None:
    """One step of 9 s among steps of 20 ms: the rank computes."""
    code, output, _ = run(tmp_path, "slow", "train", "recipe.toml", "-n", "2", "--set", "steps=60")
    assert code == 0 and explanations(output) == [], output
