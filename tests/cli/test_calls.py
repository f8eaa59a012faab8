"""Several calls in one script, and everything that a caller may give."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import nn

import paceline
from paceline.checkpoint.pretrained import load_weights
from paceline.errors import DataError, RecipeError, TaskError
from paceline.task import Loss, Task
from tests.cli.test_run_files import SUM, small
from tests.commands import run
from tests.marks import soak_param

SCRIPT = """
import torch, paceline
from paceline import Loss, Task

def build():
    def loss(model, batch):
        return Loss(model(batch).square().sum(), len(batch))
    return Task(torch.nn.Linear(3, 1), torch.randn(16, 3), loss)

recipe = paceline.Recipe(steps=3, batch={"size": 6, "shards": 6})

def refused():
    raise paceline.errors.TaskError("there is no data", next_step="get some")

for _ in range(2):  # caught on all ranks, which then train
    try:
        paceline.train(recipe, refused)
    except paceline.errors.TaskError:
        pass
results = [paceline.train(recipe.replace(optimizer={"lr": lr}), build) for lr in (0.1, 0.2)]
found = paceline.verify(recipe, build, steps=2)
with paceline.join(recipe, build) as session:
    steps = [stats.step for stats in session.rounds()]
first = paceline.Cluster.from_env().global_rank == 0
if first:
    print("folders", len({result.run_dir for result in results}), "verified", found.ok, "steps", steps)
"""
RECIPE = paceline.Recipe(steps=3, batch={"size": 4, "shards": 2})


@pytest.mark.capability("B1")
@pytest.mark.parametrize("processes", [soak_param(1), 3])
def test_a_loop_over_rates_then_verify_then_an_own_loop_in_one_script(tmp_path: Path, processes: int) -> None:
    (tmp_path / "script.py").write_text(SCRIPT)
    done = run(tmp_path, "run", "-n", processes, "script.py")
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines()[-1] == "folders 2 verified True steps [0, 1, 2]"
    assert {folder.name.split("-", 2)[2] for folder in (tmp_path / "runs").iterdir()} >= {"script"}
    assert len([*(tmp_path / "runs").iterdir()]) == 2


def test_the_result_has_the_model_the_folder_and_the_checkpoint(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    result = paceline.train(RECIPE, small)
    assert result.run_dir is not None and result.model is not None
    assert result.checkpoint == str(result.run_dir / "checkpoints" / "step-00000003")
    other = nn.Linear(3, 1)
    exported = run(tmp_path, "export", result.run_dir, "--to", "m.safetensors")
    assert exported.returncode == 0, exported.stderr
    load_weights(other, "m.safetensors")
    assert all(torch.equal(a, b) for a, b in zip(other.parameters(), result.model.parameters(), strict=True))


def test_a_path_a_tuple_the_newest_run_and_a_recipe_of_another_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    (elsewhere / "task.py").write_text(SCRIPT.partition("recipe =")[0])
    (elsewhere / "own.toml").write_text('task = "task.py:build"\nsteps = 2\n[batch]\nsize = 8\n')
    monkeypatch.chdir(tmp_path)
    assert paceline.train(elsewhere / "own.toml").steps == 2
    assert paceline.verify(str(elsewhere / "own.toml"), steps=1).ok
    parts = (nn.Linear(3, 1), torch.randn(8, 3), lambda model, x: Loss(model(x).square().sum(), len(x)))
    assert paceline.train(RECIPE, parts).steps == 3
    longer = paceline.train(RECIPE.replace(steps=5, task="given"), parts, resume="runs")
    assert longer.steps == 5 and longer.run_dir is not None and longer.run_dir.name.endswith("-given")


def test_what_cannot_be_says_what_to_give(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(RecipeError, match="the recipe names no task"):
        paceline.train(RECIPE)
    with pytest.raises(TaskError, match="expected a task, found str"):
        paceline.train(RECIPE, "digits")  # a name belongs into the recipe
    (tmp_path / "runs").mkdir()
    with pytest.raises(DataError, match="there is no run in"):
        paceline.train(RECIPE, small, resume="runs")
    assert run(tmp_path, "train", SUM, "--set", "task=").returncode == 2
    assert isinstance(small(), Task)
