"""Which run `--resume` means."""

import os
from pathlib import Path

import pytest

from paceline.cli import common_options, relaunch, train
from paceline.cli.common_options import fill_resume_value
from paceline.cli.resume import find_recipe, find_run, recipe_changes
from paceline.errors import RecipeError
from paceline.launch import LaunchOutcome
from paceline.recipe import Recipe, to_toml

pytestmark = pytest.mark.capability("N2")


def make_run(folder: Path, seconds: int) -> Path:
    folder.mkdir(parents=True)
    (folder / "recipe.toml").write_text(to_toml(Recipe(task="digits", steps=5)))
    os.utime(folder / "recipe.toml", (seconds, seconds))
    return folder


@pytest.mark.parametrize(
    ("words", "found"),
    [
        (["train", "--resume"], ["train", "--resume", "newest"]),
        (["train", "--resume", "-n", "2"], ["train", "--resume", "newest", "-n", "2"]),
        (["train", "--resume", "runs/a"], ["train", "--resume", "runs/a"]),
        (
            ["train", "r.toml", "--resume", "--resume", "runs/a"],
            ["train", "r.toml", "--resume", "newest", "--resume", "runs/a"],
        ),
    ],
)
def test_without_a_value_it_is_the_newest(words: list[str], found: list[str]) -> None:
    assert fill_resume_value(words) == found


def test_the_newest_is_the_one_last_begun(tmp_path: Path) -> None:
    make_run(tmp_path / "b", 100)
    newest = make_run(tmp_path / "a", 200)
    assert find_run("newest", tmp_path) == newest
    (tmp_path / "z-no-run").mkdir()
    assert find_run("newest", tmp_path) == newest
    with pytest.raises(RecipeError, match="no run in"):
        find_run("newest", tmp_path / "nowhere")


def test_a_run_or_a_checkpoint_in_it_has_a_recipe(tmp_path: Path) -> None:
    run = make_run(tmp_path / "a", 100)
    inside = run / "checkpoints" / "step-00000005"
    inside.mkdir(parents=True)
    assert find_recipe(run) == find_recipe(inside) == run / "recipe.toml"
    assert find_run(str(inside)) == inside
    with pytest.raises(RecipeError, match="is not a run folder"):
        find_run(str(tmp_path))


def test_changes_are_those_to_the_runs_own_recipe(tmp_path: Path) -> None:
    run = make_run(tmp_path / "a", 100)
    assert recipe_changes(run, Recipe(task="digits", steps=9)) == ["from here on steps: 5 -> 9"]
    with pytest.raises(RecipeError, match="seed: 1 -> 2"):
        recipe_changes(run, Recipe(task="digits", steps=5, seed=2))


@pytest.mark.capability("N7")
def test_the_grace_time_of_the_recipe_reaches_the_launcher(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    jobs = []
    monkeypatch.setattr(relaunch, "launch", lambda job: jobs.append(job) or LaunchOutcome(0, (), ""))
    recipe = Recipe(task="digits", steps=1, checkpoint={"grace_seconds": 77.0})
    train._launch(common_options.JobPlacement(2, 1, 0, None, ""), recipe, None, "a")
    assert [(job.num_processes, job.timeouts.grace_seconds) for job in jobs] == [(2, 77.0)]
