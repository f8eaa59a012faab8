"""`paceline verify RECIPE --loop file.py:function`: an own loop, right and with a planted mistake."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests import commands

TASK = """
import torch
from torch import nn
from torch.nn import functional as F
from paceline import Loss, Task

def other_loss(model, batch):  # not that of the loop
    return Loss(model(batch[0]).square().sum(), len(batch[0]))

def build():
    x = torch.randn(24, 4, generator=torch.Generator().manual_seed(0))
    return Task(nn.Linear(4, 2), list(zip(x, (x[:, 0] > 0).long())), other_loss)

def train_loop(loop):
    for x, y in loop.batches():
        loop.backward(Loss(F.cross_entropy(loop.model(x), y, reduction="sum"), len(y)))
        loop.step()
"""
RECIPE = (
    'task = "task.py:build"\nsteps = 3\n[batch]\nsize = 7\n'  # 4 and 3 samples: ranks count by their samples
)


@pytest.mark.capability("A2")
def test_a_loop_is_verified_by_command_and_a_planted_mistake_is_found(tmp_path: Path) -> None:
    (tmp_path / "task.py").write_text(TASK)
    (tmp_path / "recipe.toml").write_text(RECIPE)
    asked = ("verify", "recipe.toml", "-n", 2, "--steps", 3, "--json", "--loop")
    done = commands.run(tmp_path, *asked, "task.py:train_loop")
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert found["ok"] and found["steps"] == 3
    done = commands.run(tmp_path, *asked, "task.py:train_loop", "--plant", "bucket-not-reduced")
    assert done.returncode == 1, done.stderr
    assert not json.loads(done.stdout)["ok"]
    done = commands.run(tmp_path, *asked, "task.py:nothing")
    assert done.returncode == 2 and "nothing" in done.stderr
