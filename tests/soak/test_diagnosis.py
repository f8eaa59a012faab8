"""Real runs of four ranks: the slow rank and its cause are named, and nobody is blamed in balanced runs.

Delays are injected into one phase of one rank; half of them use the CPU and half do not. Balanced runs share
the machine with a busy process for each core.
"""

from __future__ import annotations

import os
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim.optimizer import register_optimizer_step_pre_hook

from paceline import Loss, Task
from paceline.job.cluster import Cluster
from paceline.observe.step_stats import PHASES
from paceline.recipe import Recipe
from paceline.report import read_run
from paceline.session import fit
from paceline.session.sink_setup import build_sinks
from paceline.testing import run_ranks
from paceline.testing.parity import build_test_session
from paceline.watch.bottlenecks import Finding, diagnose
from tests.soak.test_under_load import busy

RANKS, STEPS, SAMPLES = 4, 121, 8
DELAY, USUAL = 0.03, 0.005  # seconds of a step
Delays = dict[str, float]


def spend(seconds: float, on_cpu: bool) -> None:
    if not on_cpu:
        time.sleep(seconds)
        return
    used = time.thread_time() + seconds
    while time.thread_time() < used:
        pass


class SlowBackward(torch.autograd.Function):
    """The identity; its gradient takes some time."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, seconds: float, on_cpu: bool) -> torch.Tensor:
        ctx.wait = seconds, on_cpu
        return x.clone()

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor, None, None]:
        spend(*ctx.wait)
        return grads[0], None, None


class Samples(torch.utils.data.Dataset[torch.Tensor]):
    def __init__(self, seconds: float, on_cpu: bool) -> None:
        self.wait = seconds, on_cpu

    def __len__(self) -> int:
        return 4096

    def __getitem__(self, index: int) -> torch.Tensor:
        spend(*self.wait)
        return torch.full((16,), float(index % 7))


class Model(nn.Module):
    def __init__(self, delays: Delays, on_cpu: bool) -> None:
        super().__init__()
        self.layers, self.delays, self.on_cpu = nn.Linear(16, 4), delays, on_cpu

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        spend(self.delays["forward"], self.on_cpu)
        out: torch.Tensor = SlowBackward.apply(self.layers(x), self.delays["backward"], self.on_cpu)
        return out


def train(cluster: Cluster, folder: str, slow: Sequence[tuple[int, str]], on_cpu: bool) -> None:
    """Train once on this rank; each pair of a rank and a phase in `slow` has a delay."""
    torch.set_num_threads(1)
    delays = dict.fromkeys(PHASES, 0.0) | {"forward": USUAL, "backward": USUAL}
    for rank, phase in slow:
        delays[phase] += DELAY if rank == cluster.global_rank else 0.0
    per_sample = delays["data"] * RANKS / SAMPLES
    task = Task(
        Model(delays, on_cpu),
        Samples(per_sample, on_cpu) if per_sample else list(torch.rand(4096, 16)),
        lambda model, x: Loss(model(x).square().sum(), len(x)),
    )
    recipe = Recipe(task="given", steps=STEPS, batch={"size": SAMPLES}, strategy="replicas=4")
    session = build_test_session(cluster, recipe, lambda: task)
    reduction: Any = session.rule.reduction
    close = reduction.close

    def slow_close() -> None:
        spend(delays["communication"], on_cpu)
        close()

    reduction.close = slow_close
    hook = register_optimizer_step_pre_hook(lambda *_: spend(delays["optimizer"], on_cpu))
    try:
        fit(session, Path(folder), build_sinks(session, Path(folder), None))
    finally:
        hook.remove()
        session.close()


def findings(folder: Path, slow: Sequence[tuple[int, str]], on_cpu: bool) -> list[Finding]:
    folder.mkdir()
    (folder / "recipe.toml").write_text("")
    run_ranks(train, RANKS, str(folder), slow, on_cpu)
    return diagnose(read_run(folder).last_training_records)


def causes(found: list[Finding]) -> list[tuple[int, str, str]]:
    return [(one.rank, one.phase, one.bottleneck) for one in found if one.rank is not None]


@pytest.mark.soak
@pytest.mark.timeout(3600)
@pytest.mark.capability("P11", clause="real runs: five phases x four ranks of injected delay")
def test_the_slow_rank_is_named_in_all_of_twenty_cells_and_its_cause_in_eighteen(tmp_path: Path) -> None:
    ranks, wrong = 0, {}
    for phase in PHASES:
        for rank in range(RANKS):
            on_cpu = bool(rank % 2)
            found = causes(findings(tmp_path / f"{phase}-{rank}", [(rank, phase)], on_cpu))
            kind = "straggler" if on_cpu else "slow disk" if phase == "data" else "lock"
            wanted = (rank, "encoding" if phase == "communication" else phase, kind)
            ranks += [blamed for blamed, _, _ in found] == [rank]
            if found != [wanted]:
                wrong[rank, phase] = found
    assert ranks == 20 and len(wrong) <= 2, wrong


@pytest.mark.soak
@pytest.mark.timeout(3600)
@pytest.mark.capability("P11", clause="real runs: nobody is blamed in 20 balanced ones on a busy machine")
def test_nobody_is_blamed_in_twenty_balanced_runs_on_a_busy_machine(tmp_path: Path) -> None:
    blamed = {}
    with busy(os.cpu_count() or 1):
        for number in range(20):
            found = causes(findings(tmp_path / f"run-{number}", [], False))
            if found:
                blamed[number] = found
    assert blamed == {}
