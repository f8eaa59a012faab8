"""`paceline trace` and `paceline top` on a job that runs, that hangs, and that has ended."""

from __future__ import annotations

import json
import signal
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest

from paceline.observe.rank_activity import RankOperation, read_operations
from tests import command_jobs

TASK = """
import os
import time
import torch
from torch import nn
from paceline import Loss, Task

RANK = int(os.environ.get("RANK", "0"))

def loss(model, x):
    time.sleep(0.02)
    while RANK == 1 and os.path.exists("hang"):
        time.sleep(0.01)
    return Loss((model(x) - x).square().sum(), len(x))

def build():
    return Task(nn.Linear(16, 16), torch.rand(64, 16), loss)
"""
DEADLINE = 60.0


def wait_for(folder: Path, holds: Callable[[Sequence[RankOperation]], bool]) -> list[RankOperation]:
    """Return the operations of two ranks for which something holds; nothing else is waited for."""
    end = time.monotonic() + DEADLINE
    while time.monotonic() < end:
        operations = read_operations(folder)
        if len(operations) == 2 and holds(operations):
            return operations
        time.sleep(0.05)
    pytest.fail(f"the job does not come there: {read_operations(folder)}")


def call(folder: Path, *words: str) -> tuple[int | None, str]:
    with command_jobs.start(folder, *words) as command:
        out, err = command.communicate(DEADLINE)
        return command.returncode, out + err


@pytest.mark.capability("P9", "P17")
def test_a_running_job_is_traced_and_a_hanging_one_names_what_each_rank_does(tmp_path: Path) -> None:
    command_jobs.prepare(tmp_path, TASK)
    words = ("train", "recipe.toml", "-n", "2", "--set", "steps=100000", "--set", "checkpoint.every_steps=0")
    run = tmp_path / "run"
    with command_jobs.start(tmp_path, *words) as job:
        wait_for(run, lambda ranks: min(one.step for one in ranks) > 3)
        code, said = call(tmp_path, "trace", "run", "--steps", "0:2")
        assert code != 0 and "the run is at step" in said
        code, said = call(tmp_path, "trace", "run", "--steps", "100000:100003")
        assert code != 0 and "the run has 100000 steps, the last is 99999" in said
        first = max(one.step for one in read_operations(run)) + 300  # six seconds from there
        code, said = call(tmp_path, "trace", "run", "--steps", f"{first}:{first + 3}")
        assert code == 0, said
        assert f"of 2 ranks, steps {first} to {first + 2}" in said and "clock of one host" in said
        assert (run / "trace" / f"steps-{first}-{first + 3}.json.gz").stat().st_size > 500
        assert not (run / "trace" / "request.json").exists()
        (tmp_path / "hang").touch()
        wait_for(
            run,
            lambda ranks: (
                ranks[0].operation.startswith("all_reduce")
                and ranks[1].operation == "forward"
                and all(time.time() - one.since > 1.0 for one in ranks)
            ),
        )
        code, said = call(tmp_path, "top", "run", "--json")
        waits, sleeps = json.loads(said)[0]["operations"]
        assert "bucket 0" in waits["text"] and sleeps["text"] == f"forward of step {waits['step']}"
        (tmp_path / "hang").unlink()
        job.send_signal(signal.SIGTERM)
    assert read_operations(run) == []
    code, said = call(tmp_path, "trace", "run", "--output", "again.json.gz", "--json")
    merged = json.loads(said)
    assert code == 0 and merged["steps"] == [first, first + 3] and merged["ranks"] == [0, 1]
    assert merged["clock_uncertainty_seconds"] == [0.0, 0.0] and merged["dropped"] == 0
    code, said = call(tmp_path, "trace", "run", "--steps", "7:9")
    assert code != 0 and f"spans of steps {first}:{first + 3}" in said and "--set log.trace=7:9" in said
