"""A run never writes over another one: folders are claimed, names follow recipe or function."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

import paceline
from paceline.errors import RecipeError, RunFolderError
from paceline.report.run_files import claim_run_dir, run_name_of_task
from paceline.task import Loss, Task
from tests.commands import run

pytestmark = pytest.mark.capability("N1")
SUM = str(Path(__file__).parents[2] / "recipes" / "sum.toml")
SHORT = ["--set", "steps=2", "--set", "runtime.threads=1"]


def small(width: int = 3) -> Task:
    import torch

    def loss(model: torch.nn.Module, batch: torch.Tensor) -> Loss:
        return Loss(model(batch).square().sum(), len(batch))

    return Task(torch.nn.Linear(width, 1), torch.randn(16, width), loss)


def test_four_runs_of_one_second_have_four_folders(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    recipe = paceline.Recipe(task="x", steps=2, batch={"size": 4, "shards": 2})
    results = [paceline.train(recipe, small) for _ in range(4)]
    folders = sorted(path.name for path in (tmp_path / "runs").iterdir())
    assert len(folders) == 4 and all("-small" in name for name in folders)
    assert len({result.checkpoint for result in results}) == 4


def test_processes_that_claim_at_once_get_folders_of_their_own(tmp_path: Path) -> None:
    with ThreadPoolExecutor(8) as pool:
        claimed = list(pool.map(lambda _: claim_run_dir("a", tmp_path / "runs"), range(32)))
    assert len(set(claimed)) == 32


@pytest.mark.parametrize(
    "task, name",
    [("byte-gpt", "byte-gpt"), ("a/my.py:build", "build"), ("package:make_it", "make_it"), ("..", "run")],
)
def test_a_run_is_called_after_its_function(task: str, name: str) -> None:
    assert run_name_of_task(task) == name


def test_a_taken_folder_is_refused_and_left_as_it_was(tmp_path: Path) -> None:
    mine = ["--set", "run_dir=mine"]
    first = run(tmp_path, "train", SUM, "-n", 1, *SHORT, *mine)
    assert first.returncode == 0, first.stderr
    before = {path: path.read_bytes() for path in (tmp_path / "mine").rglob("*") if path.is_file()}
    again = run(tmp_path, "train", SUM, "-n", 1, *SHORT, *mine, "--set", "seed=2")
    assert again.returncode == 2, again.stderr
    assert "already holds a run" in again.stderr and "--resume mine" in again.stderr
    assert {path: path.read_bytes() for path in (tmp_path / "mine").rglob("*") if path.is_file()} == before
    (tmp_path / "dead").mkdir()
    (tmp_path / "dead" / "recipe.toml").write_text((tmp_path / "mine" / "recipe.toml").read_text())
    dead = run(tmp_path, "train", SUM, "-n", 1, *SHORT, "--set", "run_dir=dead")
    assert dead.returncode == 2 and "remove it: it has no checkpoint" in dead.stderr
    longer = run(tmp_path, "train", "--resume", "mine", "-n", 1, "--set", "steps=3")
    assert longer.returncode == 0, longer.stderr


def test_the_folder_has_the_name_of_the_recipe_or_the_one_that_was_asked_for(tmp_path: Path) -> None:
    for more in ([], ["--name", "first.try"]):
        assert run(tmp_path, "train", SUM, "-n", 1, *SHORT, *more).returncode == 0
    names = sorted(path.name.split("-", 2)[2] for path in (tmp_path / "runs").iterdir())
    assert names == ["first.try", "sum"]
    for more, why in (
        (["--name", "a/b"], "is not a valid folder name"),
        (["--name", "a", "--set", "run_dir=x"], "--name a and run_dir = x both set the run folder"),
    ):
        wrong = run(tmp_path, "train", SUM, "-n", 1, *SHORT, *more)
        assert wrong.returncode == 2 and why in wrong.stderr


def test_a_run_that_never_began_leaves_no_folder(tmp_path: Path) -> None:
    done = run(tmp_path, "train", SUM, "-n", 1, *SHORT, "--set", "options.hidden=[0.5]")
    assert done.returncode != 0 and not any((tmp_path / "runs").iterdir())


def test_checkpoints_of_another_run_are_not_touched(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    recipe = paceline.Recipe(
        task="x", steps=2, batch={"size": 4, "shards": 2}, checkpoint={"folder": str(tmp_path / "shelf")}
    )
    paceline.train(recipe.replace(run_dir="a"), small)
    for other in (recipe.replace(run_dir="b"), recipe):
        with pytest.raises(RecipeError, match="checkpoints of another run"):
            paceline.train(other, small)


def test_a_folder_that_cannot_be_made_says_why(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "runs").write_text("a file")
    recipe = paceline.Recipe(task="x", steps=2, batch={"size": 4, "shards": 2})
    with pytest.raises(RunFolderError, match="cannot write the files of the run"):
        paceline.train(recipe, small)


def test_nodes_without_a_place_to_meet_are_refused_and_leave_nothing(tmp_path: Path) -> None:
    done = run(tmp_path, "train", SUM, "--nodes", 2, "-n", 1, "--insecure", *SHORT)
    assert done.returncode == 2 and "--rendezvous HOST:PORT" in done.stderr
    assert not any((tmp_path / "runs").iterdir())
    none = run(tmp_path, "train", SUM, "-n", 0)
    assert none.returncode == 2 and "a number of at least 1" in none.stderr
