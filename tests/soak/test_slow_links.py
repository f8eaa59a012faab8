"""A real job on four hosts of the lab: nobody is blamed for 200 steps, then one link is really slow."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from paceline.lab import FaultPlan, Lab, Links

CLEAN, STEPS, HOST = 200, 220, 2
TASK = """
import time
import torch
from torch import nn
from torch.utils.data import TensorDataset
from paceline import Loss, Task

class Model(nn.Module):
    def __init__(self, seconds):
        super().__init__()
        self.seconds = seconds
        self.layers = nn.Sequential(nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 1))

    def forward(self, x):
        time.sleep(self.seconds)
        return self.layers(x)

def build(seconds):
    torch.manual_seed(0)
    x = torch.randn(512, 64)

    def loss(model, batch):
        x, y = batch
        return Loss(((model(x) - y) ** 2).sum(), len(x))

    return Task(model=Model(seconds), data=TensorDataset(x, x.sum(1, keepdim=True)), loss=loss)
"""
RECIPE = f"""
task = "job.py:build"
steps = {STEPS}
[options]
seconds = 0.04
[batch]
size = 16
[health]
straggler_factor = 1.5
"""


@pytest.mark.soak
@pytest.mark.timeout(900)
@pytest.mark.capability("I8", clause="a real job: 200 clean steps, and a link that is slow")
def test_nobody_is_blamed_in_200_clean_steps_and_a_slow_link_is_named_within_ten(
    lab: Callable[..., Lab], tmp_path: Path
) -> None:
    """Run alone: another program that holds up one of the four ranks for two windows is a slow rank."""
    (tmp_path / "job.py").write_text(TASK)
    (tmp_path / "recipe.toml").write_text(RECIPE)
    made, run_dir = lab(hosts=4, links=Links(rate="100mbit")), tmp_path / "run"
    command = ["paceline", "train", str(tmp_path / "recipe.toml"), "-n", "4", "--strategy", "replicas=4"]
    faults = FaultPlan(seed=1).rate(f"h{HOST}", "1mbit", step=CLEAN)
    outcome = made.run(
        [*command, "--set", f"run_dir={run_dir}"], faults=faults, deadline_seconds=600, directory=tmp_path
    )
    assert outcome.exit_code == 0, outcome.output
    rows = [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]
    named = [(row["step"], row["rank"], row["cause"]) for row in rows if row["event"] == "straggler"]
    assert len(named) == 1, named
    ((step, rank, cause),) = named
    assert (rank, cause) == (HOST, "communication") and CLEAN < step <= CLEAN + 10, named
