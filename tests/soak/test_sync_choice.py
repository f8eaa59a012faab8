"""Two hosts on links of several rates and latencies: `sync=auto` chooses what running every rule shows."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from statistics import median

import pytest

from paceline.lab import Lab, Links
from paceline.sync.sync_choice import MIN_SPEEDUP

RATES = (12, 16, 20, 29, 38, 55)  # Mbit/s, around where a link carries as much as backward takes, and a tenth
LATENCIES = (0.7, 1.4, 3, 6, 20, 30)  # ms, to one side
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
    def __init__(self, seconds, forward_seconds, width):
        super().__init__()
        self.seconds, self.forward_seconds = seconds, forward_seconds
        self.scale = nn.Parameter(torch.ones(1))
        wide = nn.Linear(64, width), nn.ReLU(), nn.Linear(width, width), nn.ReLU()
        self.layers = nn.Sequential(*wide, nn.Linear(width, 1))

    def forward(self, x):
        time.sleep(self.forward_seconds)
        return self.layers(Long.apply(x * self.scale, self.seconds))

def build(seconds, forward_seconds, width):
    torch.manual_seed(0)
    x = torch.randn(512, 64)

    def loss(model, batch):
        x, y = batch
        return Loss(((model(x) - y) ** 2).sum(), len(x))

    model = Model(seconds, forward_seconds, width)
    return Task(model=model, data=TensorDataset(x, x.sum(1, keepdim=True)), loss=loss)
"""


@dataclass(frozen=True)
class Job:
    """What is run.

    Args:
        steps: of a run; those before `first` are not timed.
        seconds: of backward, in which sums can go on.
        forward_seconds: in which none can.
        width: of the model.
        rules: allowed, every-step first.
    """

    steps: int
    first: int
    seconds: float
    forward_seconds: float
    width: int
    rules: tuple[str, ...]

    def write(self, folder: Path) -> None:
        folder.mkdir()
        (folder / "job.py").write_text(TASK)
        options = {name: getattr(self, name) for name in ("seconds", "forward_seconds", "width")}
        lines = [f'task = "job.py:build"\nsteps = {self.steps}', "[options]"]
        lines += [f"{name} = {value}" for name, value in options.items()]
        lines += ["[batch]\nsize = 16", "[runtime]\nbucket_bytes = 65536"]
        (folder / "recipe.toml").write_text("\n".join(lines))

    def run(self, lab: Lab, folder: Path, sync: str) -> tuple[float, str]:
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
            (row["seconds"], end - begin)
            for row, (begin, end) in zip(steps, pairwise(ends), strict=True)
            if begin >= self.first
        ]
        alike = median(seconds / num_steps for seconds, num_steps in times)
        return alike, next((row["sync"] for row in rows if row["event"] == "sync"), sync)

    def find(self, lab: Lab, folder: Path) -> tuple[dict[str, float], str]:
        """Seconds of a step under each rule, and which one was chosen."""
        self.write(folder)
        times = {rule: self.run(lab, folder, rule)[0] for rule in self.rules}
        _, chosen = self.run(lab, folder, f"auto:{','.join(self.rules)}")
        return times, chosen


def crossover(ratios: Mapping[float, float]) -> float:
    """Where a rule is `MIN_SPEEDUP` times as fast as another, by what was measured on both sides of it.

    Args:
        ratios: of their times, which falls from above 1 to below it, or rises.
    """
    points = sorted(ratios.items())
    (low, first), (high, second) = next(
        (a, b) for a, b in pairwise(points) if (a[1] - MIN_SPEEDUP) * (b[1] - MIN_SPEEDUP) <= 0
    )
    share = math.log(first / MIN_SPEEDUP) / math.log(first / second)
    return low * (high / low) ** share


@pytest.mark.soak
@pytest.mark.timeout(3000)
@pytest.mark.capability("I11", clause="the crossover is within 15 % of the exhaustive one")
def test_the_crossover_in_the_lab_is_within_15_percent(lab: Callable[..., Lab], tmp_path: Path) -> None:
    rule = "diloco:8"
    job = Job(24, 7, 0.3, 0.0, 512, ("every-step", rule))
    found = {}
    for rate in RATES:
        made = lab(hosts=2, links=Links(rate=f"{rate}mbit"))
        found[rate] = job.find(made, tmp_path / str(rate))
        (tmp_path / "found.json").write_text(json.dumps(found, indent=1))
    at = crossover({rate: times["every-step"] / times[rule] for rate, (times, _) in found.items()})
    for rate, (_, chosen) in found.items():
        if rate < at / 1.15:
            assert chosen == rule, (at, found)
        if rate > at * 1.15:
            assert chosen == "every-step", (at, found)


@pytest.mark.soak
@pytest.mark.timeout(3000)
@pytest.mark.capability("I11", clause="every-step, local, asynchronous as latency grows")
def test_in_the_lab_it_is_every_step_then_local_then_gossip_as_latency_grows(
    lab: Callable[..., Lab], tmp_path: Path
) -> None:
    every, local, gossip = rules = ("every-step", "local:4", "gossip:8")
    job = Job(400, 40, 0.0, 0.06, 32, rules)
    found = {}
    for latency in LATENCIES:
        made = lab(hosts=2, links=Links(latency=f"{latency}ms"))
        found[latency] = job.find(made, tmp_path / str(latency))
        (tmp_path / "found.json").write_text(json.dumps(found, indent=1))
    first = crossover({at: times[every] / times[local] for at, (times, _) in found.items()})
    second = crossover({at: times[local] / times[gossip] for at, (times, _) in found.items()})
    assert first * 1.15 < second / 1.15, found
    for latency, (_, chosen) in found.items():
        near = [at for at in (first, second) if at / 1.15 <= latency <= at * 1.15]
        right = every if latency < first else local if latency < second else gossip
        assert near or chosen == right, (first, second, found)
