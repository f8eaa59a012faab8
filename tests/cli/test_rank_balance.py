"""Two replicas of two stages are trained, of which one stage takes more memory: the report says which."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from paceline.report import read_run, render_page, summarize_run
from paceline.report.rank_balance import find_imbalances, rank_loads
from tests import command_jobs

TASK = """
import torch
from torch import nn
from paceline import Loss, Task

class Ballast(nn.Module):
    def forward(self, x):
        if self.training and len(x) > 2:  # two samples are tried before the start, on every rank
            torch.ones(100_000_000)
        return x

def build():
    model = nn.Sequential(nn.Linear(16, 64), nn.ReLU(), Ballast(), nn.Linear(64, 16))
    return Task(model, torch.rand(64, 16), lambda model, x: Loss((model(x) - x).square().sum(), len(x)))
"""
STRATEGY = "replicas=2 pipeline=2 stages=2,2"


@pytest.mark.capability("E5")
def test_a_stage_that_takes_more_memory_is_said_with_what_to_do(tmp_path: Path) -> None:
    """Memory and bytes only: how long ranks took depends on what else runs on the machine."""
    command_jobs.prepare(tmp_path, TASK)
    words = ("train", "recipe.toml", "-n", "4", "--strategy", STRATEGY, "--set", "batch.size=16")
    job = command_jobs.start(tmp_path, *words)
    try:
        out, err = job.communicate(timeout=120)
    except subprocess.TimeoutExpired:
        job.kill()
        raise
    assert job.returncode == 0, (out, err)
    run = read_run(tmp_path / "run")
    shares = rank_loads(run)
    assert [share.label for share in shares] == [
        f"rank {2 * replica + stage} (replica {replica}, stage {stage})"
        for replica in (0, 1)
        for stage in (0, 1)
    ]
    for share in shares:
        assert share.compute_seconds > 0 and share.communication_seconds >= 0 and share.idle_seconds >= 0
        assert share.sent_bytes > 0
        others = [
            one.peak_bytes for one in shares if one.coordinates["pipeline"] != share.coordinates["pipeline"]
        ]
        assert (share.peak_bytes > max(others) + 3e8) == (share.coordinates["pipeline"] == 1)
    assert all(share.label in render_page([run]) for share in shares)
    memory = next(one for one in find_imbalances(shares) if one.quantity == "memory")
    assert memory.axis == "pipeline" and memory.load.coordinates["pipeline"] == 1
    (said,) = (line for line in summarize_run(run) if line.startswith("Memory is uneven"))
    assert f"stage 1) has {memory.ratio:.2f} times the mean; " in said and "rechunk" in said
