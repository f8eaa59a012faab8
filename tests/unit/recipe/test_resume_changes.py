"""A changed recipe: what may change when a run goes on, and what may not."""

import pytest

from paceline.errors import RecipeError
from paceline.recipe import Recipe, Strategy
from paceline.recipe.resume_changes import compare_recipes, refuse_changes

pytestmark = pytest.mark.capability("N2")
BEFORE = Recipe(task="digits", steps=10, options={"model": "mlp", "hidden": [8]}, run_dir="runs/a")


def changed(**changes: object) -> Recipe:
    return BEFORE.replace(**changes)


@pytest.mark.parametrize(
    ("changes", "line"),
    [
        ({"seed": 2}, "seed: 1 -> 2 (every random number is keyed by it)"),
        ({"task": "sum"}, 'task: "digits" -> "sum"'),
        ({"options": {"model": "mlp", "hidden": [9]}}, "options.hidden: [8] -> [9]"),
        ({"options": {"model": "mlp"}}, "options.hidden: [8] -> left out"),
        ({"batch": {"size": 64}}, "batch.size: 32 -> 64 (a step would mean other samples)"),
        ({"batch": {"shards": 4}}, "batch.shards: left out -> 4"),
        ({"batch": {"shuffle": False}}, "batch.shuffle: true -> false"),
        ({"batch": {"drop_last": True}}, "batch.drop_last: false -> true"),
        ({"optimizer": {"name": "sgd"}}, 'optimizer.name: "adamw" -> "sgd"'),
        ({"checkpoint": {"folder": "s3://b/c"}}, 'checkpoint.folder: left out -> "s3://b/c"'),
        ({"init_from": "w.safetensors"}, 'init_from: left out -> "w.safetensors" (the weights are those'),
        ({"run_dir": "runs/b"}, 'run_dir: "runs/a" -> "runs/b" (a run goes on in its folder)'),
    ],
)
def test_what_must_stay_is_refused_with_the_difference(changes: dict[str, object], line: str) -> None:
    with pytest.raises(RecipeError) as caught:
        refuse_changes(BEFORE, changed(**changes), "runs/a")
    assert line in caught.value.what and caught.value.where == "runs/a"
    assert "may change" in caught.value.next_step


def test_all_that_is_wrong_is_named_at_once_and_nothing_else() -> None:
    after = changed(seed=3, steps=20, batch={"size": 16})
    with pytest.raises(RecipeError) as caught:
        refuse_changes(BEFORE, after, "runs/a")
    assert "seed: 1 -> 3" in caught.value.what and "batch.size: 32 -> 16" in caught.value.what
    assert "steps" not in caught.value.what


def test_what_matters_from_here_on_is_told_and_the_rest_is_free() -> None:
    after = changed(
        steps=20,
        optimizer={"lr": 0.5},
        strategy=Strategy.parse("replicas=1 shard=2 zero=1"),
        run_dir=None,
        evaluate={"every_steps": 3},
        checkpoint={"keep": 7},
        loader={"workers": 4},
        runtime={"threads": 1},
    )
    told = refuse_changes(BEFORE, after, "runs/a")
    assert told[:2] == ["from here on steps: 10 -> 20", "from here on optimizer.lr: 0.001 -> 0.5"]
    assert {line.split()[3] for line in told[2:]} == {
        "strategy.replicas:",
        "strategy.shard:",
        "strategy.zero:",
    }
    assert refuse_changes(BEFORE, BEFORE, "runs/a") == []


@pytest.mark.parametrize("asked", ["runs/a", "runs/a/", "runs/../runs/a"])
def test_the_folder_of_the_run_may_be_named_again(asked: str) -> None:
    assert refuse_changes(BEFORE, changed(run_dir=asked), "runs/a/checkpoints/step-5") == []


def test_every_part_of_a_recipe_has_an_answer() -> None:
    """A new field is refused or told unless it was thought about."""
    after = Recipe(task="sum", epochs=2.0, seed=4)
    found = {change.key: change for change in compare_recipes(BEFORE, after)}
    assert found["task"].refusal and found["seed"].refusal and found["epochs"].matters
    assert not found["run_dir"].matters
