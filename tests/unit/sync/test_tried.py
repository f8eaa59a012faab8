"""A trial of a rank that serves says how long a micro-batch takes, and leaves no trace."""

from __future__ import annotations

from typing import cast

import pytest
import torch
from torch import nn

from paceline.job.cluster import Cluster
from paceline.recipe import Recipe
from paceline.sync import EveryStep
from paceline.sync.straggler_recovery import MAX_TRIAL_MICRO_BATCHES, run_trial
from paceline.testing.parity import build_test_session
from tests.parity.virtual_clock import Clock


@pytest.mark.capability("I9", clause="the way back from a slow server")
def test_a_trial_measures_a_micro_batch_and_changes_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    clock, batch = Clock(real=0.0), {"size": 24, "shards": 6}
    monkeypatch.setattr("paceline.observe.step_stats.time", clock)
    options = {"model": "convnet", "channels": 4, "dropout": 0.1}
    recipe = Recipe(task="digits", options=options, steps=4, batch=batch)
    runs = [build_test_session(Cluster.single(), recipe) for _ in range(2)]
    forwards = [0]

    def compute(module: nn.Module, inputs: object) -> None:
        forwards[0] += 1
        clock.spend(2.5)

    for number, session in enumerate(runs):
        for _ in session.rounds():
            if number:
                before = session.snapshot().copied()
                hook = session.runner.sharded_model.model.register_forward_pre_hook(compute)
                phases = cast("EveryStep", session.rule).phases
                assert run_trial(session.feed, session.runner, session.state, phases) == 2.5
                hook.remove()
                after = session.snapshot()
                assert after.numbers == before.numbers
                assert all(torch.equal(value, after.whole[name]) for name, value in before.whole.items())
    assert forwards[0] == 4 * MAX_TRIAL_MICRO_BATCHES
    first, second = (session.snapshot().tensors() for session in runs)
    assert all(torch.equal(value, second[name]) for name, value in first.items())
