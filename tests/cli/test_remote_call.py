"""`processes=N`: a script and a notebook start the ranks of a call, and get what they made."""

from __future__ import annotations

import io
import runpy
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from rich.console import Console
from torch import nn

import paceline
from paceline.api.calls import ProgressLines
from paceline.errors import RecipeError, WorkerError
from paceline.observe import StepStats
from paceline.task import Loss, Task
from tests.cli.test_run_files import small
from tests.marks import soak_param

RECIPE = paceline.Recipe(steps=4, batch={"size": 4, "shards": 2}, runtime={"threads": 1})

SCRIPT = """
import torch, paceline
from paceline import Callback, Loss, Recipe, Task

class Count(Callback):
    steps = 0
    def on_step(self, session, stats):
        self.steps += 1
    def state_dict(self):
        return {"steps": self.steps}
    def load_state_dict(self, state):
        self.steps = state["steps"]

def build():
    def loss(model, batch):
        return Loss(model(batch).square().sum(), len(batch))
    return Task(torch.nn.Linear(3, 1), torch.randn(16, 3), loss)

recipe = Recipe(steps=3, batch={"size": 4, "shards": 2}, runtime={"threads": 1})
count = Count()
for shard in ("replicas=2", "replicas=1 shard=2 zero=3"):
    result = paceline.train(recipe.replace(strategy=shard), build, processes=2, callbacks=[count])
    print("model", [tuple(p.shape) for p in result.model.parameters()], result.checkpoint, count.steps)
print("verified", paceline.verify(recipe, build, processes=2, steps=2).ok)
"""


def said_by_script(folder: Path) -> str:
    command = [sys.executable, "script.py"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=400, cwd=folder, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.capability("B1")
@pytest.mark.parametrize("apart", [False, soak_param(True)], ids=["in this process", "in one of its own"])
def test_a_script_starts_the_ranks_of_each_call(
    apart: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "script.py").write_text(SCRIPT)
    if not apart:
        monkeypatch.chdir(tmp_path)
        runpy.run_path("script.py", run_name="__main__")
    lines = (said_by_script(tmp_path) if apart else capsys.readouterr().out).splitlines()
    models = [line for line in lines if line.startswith("model")]
    assert len(models) == 2
    for line, steps in zip(
        models, (3, 6), strict=True
    ):  # the caller's callback goes on where the ranks' ended
        assert line.startswith("model [(1, 3), (1,)] runs/")
        assert line.endswith(f"/checkpoints/step-00000003 {steps}")
    assert lines[-1] == "verified True"
    assert sum("step 3/3" in line for line in lines) == 2, "the progress of rank 0 is shown"
    assert len([*(tmp_path / "runs").iterdir()]) == 2


def test_what_a_rank_says_is_shown_and_a_failure_is_an_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)

    def build() -> Task:
        rank = paceline.Cluster.from_env().global_rank
        sys.stdout.write(f"rank {rank} builds\n")
        if rank == 1:
            raise ValueError("not on this rank")
        return Task(nn.Linear(3, 1), torch.randn(8, 3), lambda model, x: Loss(model(x).sum(), len(x)))

    out = io.StringIO()
    with pytest.raises(WorkerError, match="rank 1 raised ValueError: not on this rank"):
        paceline.train(RECIPE, build, processes=2, console=Console(file=out, width=200))
    said = out.getvalue().splitlines()
    assert "rank 0 builds" in said and "[rank 1] rank 1 builds" in said
    with pytest.raises(RecipeError, match="the recipe names no task"):
        paceline.train(RECIPE, processes=2)


def test_a_model_that_is_given_has_the_weights_of_the_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    task = small()
    before = [p.detach().clone() for p in task.model.parameters()]
    result = paceline.train(RECIPE, task, processes=1, console=Console(quiet=True))
    assert result.model is task.model
    assert not any(torch.equal(a, b) for a, b in zip(before, task.model.parameters(), strict=True))


def test_a_rank_does_not_start_others(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in {"RANK": "0", "WORLD_SIZE": "1"}.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(RecipeError, match="processes=2, but this script already runs on 1 process"):
        paceline.train(RECIPE, small, processes=2)


def test_a_call_that_fails_leaves_its_folder_to_the_next_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As in a notebook, where the process goes on."""
    monkeypatch.chdir(tmp_path)

    class Fails(paceline.Callback):
        def on_step(self, session: paceline.Session, stats: StepStats) -> None:
            raise KeyError("mine")

    with pytest.raises(KeyError):
        paceline.train(RECIPE, small, callbacks=[Fails()])
    (run,) = (tmp_path / "runs").iterdir()
    result = paceline.train(RECIPE, small, resume=run)
    assert result.run_dir == run and result.steps == 4


def test_progress_stays_in_its_place_in_a_notebook() -> None:
    def shown(in_place: bool) -> str:
        written: list[str] = []
        lines = ProgressLines(written.append, in_place=in_place)
        for text in ("hello\n", "step 1/9  long\n", "step 2/9\n", "checkpoint\n", "step 9/9\n"):
            lines.show(text)
        lines.close()
        return "".join(written)

    assert shown(in_place=False).count("\n") == 5
    assert shown(in_place=True) == "hello\nstep 1/9  long\rstep 2/9      \ncheckpoint\nstep 9/9\n"
