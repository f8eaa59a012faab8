"""Recipes as Python objects: complete, frozen, strict, and wrong values are RecipeErrors."""

from __future__ import annotations

import enum
import pickle
import subprocess
import sys
from typing import Any

import pytest

from paceline.errors import RecipeError
from paceline.recipe import BatchRecipe, Recipe, Strategy
from paceline.recipe.registry.optimizer_specs import OPTIMIZER_SPECS

OPTIMIZERS = ", ".join(f'"{spec.word}"' for spec in OPTIMIZER_SPECS)


def refuse(**values: Any) -> RecipeError:
    with pytest.raises(RecipeError) as caught:
        Recipe(**{"task": "digits", "steps": 10, **values})
    assert type(caught.value) is RecipeError
    return caught.value


def test_a_small_recipe_has_every_default() -> None:
    recipe = Recipe(task="digits", steps=10)
    assert (recipe.seed, recipe.epochs, recipe.run_dir, recipe.options) == (1, None, None, {})
    assert (recipe.batch.size, recipe.batch.shards) == (32, None)
    assert (recipe.optimizer.name, recipe.optimizer.betas) == ("adamw", (0.9, 0.999))
    assert recipe.strategy == Strategy()


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"steps": "10"}, 'steps: expected an integer >= 1, found "10"'),
        ({"steps": True}, "steps: expected an integer >= 1, found true"),
        ({"steps": 1e3}, "steps: expected an integer >= 1, found 1000.0; write 1000"),
        ({"steps": 1.5}, "steps: expected an integer >= 1, found 1.5"),
        ({"steps": 0}, "steps: expected an integer >= 1, found 0"),
        ({"seed": -1}, "seed: expected an integer >= 0 and <= 9223372036854775807, found -1"),
        ({"task": ""}, 'task: expected a string that is not empty, found ""'),
        ({"task": None}, "task: expected a string that is not empty, found None"),
        ({"batch": 3}, "batch: expected a table, found 3"),
        ({"batch": {"size": 0}}, "batch.size: expected an integer >= 1, found 0"),
        ({"batch": {"shuffle": 1}}, "batch.shuffle: expected true or false, found 1"),
        ({"optimizer": {"lr": float("inf")}}, "optimizer.lr: expected a finite number >= 0, found inf"),
        ({"optimizer": {"lr": -0.1}}, "optimizer.lr: expected a finite number >= 0, found -0.1"),
        ({"optimizer": {"lr": float("nan")}}, "optimizer.lr: expected a finite number >= 0, found nan"),
        (
            {"optimizer": {"name": "adamm"}},
            f'optimizer.name: expected one of {OPTIMIZERS}, found "adamm"; did you mean "adam"?',
        ),
        (
            {"optimizer": {"betas": [0.9, 1.5]}},
            "optimizer.betas[1]: expected a finite number >= 0 and < 1, found 1.5",
        ),
        (
            {"optimizer": {"betas": 0.9}},
            "optimizer.betas: expected a list of 2, each a finite number >= 0 and < 1, found 0.9",
        ),
        (
            {"optimizer": {"betas": [0.9]}},
            "optimizer.betas[1]: expected a finite number >= 0 and < 1, but it is missing",
        ),
        ({"serve": {"slots": 0}}, "serve.slots: expected an integer >= 1 and <= 4096, found 0"),
        ({"serve": {"slots": 4097}}, "serve.slots: expected an integer >= 1 and <= 4096, found 4097"),
        ({"serve": {"chunk": 0}}, "serve.chunk: expected an integer >= 1, found 0"),
        ({"serve": {"context": 1}}, "serve.context: expected an integer >= 2, found 1"),
        (
            {"serve": {"attention": "paged"}},
            'serve.attention: expected one of "by_slot", "masked", found "paged"',
        ),
        ({"stepz": 1}, "stepz: unknown key, found 1; did you mean steps?"),
        ({"lr": 0.1}, "lr: unknown key, found 0.1; did you mean optimizer.lr?"),
        ({"memory": {"zzz": 1}}, "memory.zzz: unknown key, found 1; expected one of recompute, budget"),
        ({"options": {"a": {1: 2}}}, "options: expected strings as keys, found 1 in options.a"),
        ({"options": 3}, "options: expected a table, found 3"),
        ({"strategy": 3}, 'strategy: expected a table, or text such as "replicas=2" or "ddp", found 3'),
        ({"strategy": "dpp"}, 'strategy: unknown preset "dpp"; did you mean "ddp"?'),
    ],
)
def test_a_wrong_value_says_what_was_expected_and_found(values: dict[str, Any], message: str) -> None:
    assert refuse(**values).what == message


def test_a_python_error_says_which_call_it_was() -> None:
    assert refuse(seed="x").where == "Recipe(...)"
    with pytest.raises(RecipeError) as caught:
        BatchRecipe(size=4, shards=8)
    assert caught.value.what == "shards: expected at most batch.size = 4, found 8"
    assert caught.value.where == "BatchRecipe(...)"


@pytest.mark.parametrize(
    "values, next_step",
    [
        ({"steps": None}, "set the length of the run: steps = 1000 for updates, or epochs = 10"),
        ({"epochs": 2}, "remove one of them"),
        ({"stepz": 3}, "write steps instead of stepz"),
        ({"batch": {"sizes": 3}}, "write batch.size instead of batch.sizes"),
        ({"seed": "x"}, "set seed to an integer >= 0 and <= 9223372036854775807, or leave it out"),
        (
            {"optimizer": {"name": "adam", "weight_decay": 1e-4}},
            'set optimizer.l2 = 0.0001, which is what PyTorch calls weight_decay of "adam", and'
            ' optimizer.decay_on = "all"',
        ),
        ({"optimizer": {"name": "rprop", "weight_decay": 1e-4}}, "rprop has no weight decay"),
        ({"optimizer": {"name": "sgd", "weight_decay": 1e-4, "l2": 1e-4}}, "change optimizer.l2, or change"),
        ({"optimizer": {"clip_norm": 1.0, "clip_value": 1.0}}, "change optimizer.clip_value, or change"),
        ({"optimizer": {"name": "rprop"}, "schedule": {"decay": "linear"}}, "change optimizer.name"),
        ({"schedule": {"decay": "plateau"}}, "set evaluate.every_steps to the number of updates"),
        ({"optimizer": {"nesterov": True}}, "remove optimizer.nesterov, or change optimizer.name"),
        ({"batch": {"size": 4, "shards": 8}}, "change batch.shards, or change batch.size"),
    ],
)
def test_every_error_has_a_next_step(values: dict[str, Any], next_step: str) -> None:
    assert next_step in refuse(**values).next_step


def test_exactly_one_of_steps_and_epochs() -> None:
    assert Recipe(task="digits", epochs=2).epochs == 2.0
    assert refuse(steps=None).what == "epochs: expected steps or epochs, found neither"
    assert refuse(epochs=0.5).what == "epochs: expected steps or epochs, found both: steps = 10, epochs = 0.5"
    assert "epochs" not in refuse(steps="x").what


def test_replace_is_validated_and_leaves_the_original() -> None:
    recipe = Recipe(task="digits", steps=10)
    changed = recipe.replace(steps=None, epochs=2.0, optimizer=recipe.optimizer.replace(lr=0.5))
    assert (changed.epochs, changed.optimizer.lr) == (2.0, 0.5)
    assert (recipe.epochs, recipe.optimizer.lr) == (None, 1e-3)
    with pytest.raises(RecipeError, match="found both"):
        recipe.replace(epochs=1.0)


def test_a_recipe_is_frozen_equal_by_value_and_picklable() -> None:
    recipe = Recipe(task="digits", steps=10, strategy=Strategy(replicas=2))
    with pytest.raises(ValueError, match="frozen"):
        recipe.steps = 5
    assert recipe == Recipe(
        task="digits", steps=10, batch=BatchRecipe(), strategy=Strategy.parse("replicas=2")
    )
    assert recipe != Recipe(task="digits", steps=11)
    assert pickle.loads(pickle.dumps(recipe)) == recipe


def test_options_are_a_plain_copy() -> None:
    class Colour(str, enum.Enum):  # noqa: UP042
        RED = "red"

    given: dict[str, Any] = {"layers": (1, 2), "colour": Colour.RED, "deep": {"on": True}}
    options = Recipe(task="digits", steps=1, options=given).options
    assert options == {"layers": [1, 2], "colour": "red", "deep": {"on": True}}
    assert type(options["colour"]) is str and options["deep"]["on"] is True
    given["deep"]["on"] = False
    assert options["deep"]["on"] is True


def test_an_option_that_toml_cannot_hold_is_named() -> None:
    error = refuse(options={"a": [1, {"b c": {1, 2}}]})
    assert error.what == 'options: expected values that TOML can hold, found set at options.a[1]."b c"'
    assert "NoneType at options.a" in refuse(options={"a": None}).what


def test_every_field_is_described() -> None:
    models: list[Any] = [Recipe]
    for model in models:  # grows by the tables in each table
        inner = (field.annotation for field in model.model_fields.values())
        models += [table for table in inner if hasattr(table, "model_fields")]
    assert len(models) == 25
    for model in models:
        for name, field in model.model_fields.items():
            assert field.description, f"{model.__name__}.{name}"


def test_the_room_imports_neither_torch_nor_numpy() -> None:
    code = (
        "import sys, paceline.recipe; sys.exit(bool({'torch', 'numpy', 'typer', 'rich'} & set(sys.modules)))"
    )
    assert subprocess.run([sys.executable, "-c", code], timeout=240, check=False).returncode == 0
