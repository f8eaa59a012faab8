"""Two hosts on links of several rates: `sync=auto` chooses what running every rule shows to be the best."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from statistics import median

import pytest

from paceline.lab import Lab, Links
from paceline.sync.step_seconds import GAIN

RULE, STEPS, FIRST = "diloco:8", 24, 8
RATES = (12, 16, 20, 29, 38, 55)  # Mbit/s, around where a link carries as much as backward takes, and a tenth
TASK = """
import time
import torch
from torch import nn
from torch.utils.data import TensorDataset
from paceline import Loss, Task

class Long(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, seconds):
        ctx.seconds = seconds
        return x.clone()

    @staticmethod
    def backward(ctx, grad):
        time.sleep(ctx.seconds)
        return grad, None

class Model(nn.Module):
    # backward begins with the layers, whose gradients leave, and goes on for long
    def __init__(self, seconds):
        super().__init__()
        self.seconds, self.scale = seconds, nn.Parameter(torch.ones(1))
        wide = nn.Linear(64, 512), nn.ReLU(), nn.Linear(512, 512), nn.ReLU()
        self.layers = nn.Sequential(*wide, nn.Linear(512, 1))

    def forward(self, x):
        return self.layers(Long.apply(x * self.scale, self.seconds))

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
seconds = 0.3
[batch]
size = 16
[runtime]
bucket_bytes = 65536
"""


def run(lab: Lab, folder: Path, sync: str) -> tuple[float, str]:
    """Seconds of a step from the first ones on, and the rule at the end."""
    run_dir = folder / sync.replace(":", "-").replace(",", "-")
    command = ["paceline", "train", str(folder / "recipe.toml"), "-n", "2"]
    command += ["--strategy", f"replicas=2 sync={sync}", "--set", f"run_dir={run_dir}"]
    outcome = lab.run(command, deadline_seconds=300)
    assert outcome.exit_code == 0, outcome.output
    rows = [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]
    steps = [row for row in rows if row["event"] == "step"]
    ends = [-1, *(row["step"] for row in steps)]
    times = [
        row["seconds"] / (end - begin)
        for row, (begin, end) in zip(steps, pairwise(ends), strict=True)
        if end >= FIRST
    ]
    return median(times), next((row["sync"] for row in rows if row["event"] == "sync"), sync)


@pytest.mark.soak
@pytest.mark.timeout(3000)
@pytest.mark.capability("I11", clause="the crossover is within 15 % of the exhaustive one")
def test_the_crossover_in_the_lab_is_within_15_percent(lab: Callable[..., Lab], tmp_path: Path) -> None:
    ratios, chosen, found = {}, {}, {}
    for rate in RATES:
        folder = tmp_path / str(rate)
        folder.mkdir()
        (folder / "job.py").write_text(TASK)
        (folder / "recipe.toml").write_text(RECIPE)
        made = lab(hosts=2, links=Links(rate=f"{rate}mbit"))
        every, _ = run(made, folder, "every-step")
        alone, _ = run(made, folder, RULE)
        ratios[rate] = every / alone / GAIN
        _, chosen[rate] = run(made, folder, f"auto:every-step,{RULE}")
        found[rate] = {"every-step": every, RULE: alone, "chosen": chosen[rate]}
        (tmp_path / "found.json").write_text(json.dumps(found, indent=1))
    below = max(rate for rate in RATES if ratios[rate] > 1)
    above = min(rate for rate in RATES if rate > below)
    share = math.log(ratios[below]) / math.log(ratios[below] / ratios[above])
    crossover = below * (above / below) ** share
    for rate, rule in chosen.items():
        if rate < crossover / 1.15:
            assert rule == RULE, (crossover, found)
        if rate > crossover * 1.15:
            assert rule == "every-step", (crossover, found)
