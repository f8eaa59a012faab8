"""Overrides of a recipe: TOML or bare words, and what is wrong is named with the override."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from paceline.errors import RecipeError
from paceline.recipe import Strategy, load_recipe

Write = Callable[[str], Path]
GOOD = """task = "digits"
steps = 20
strategy = "ddp"

[batch]
size = 16

[optimizer]
lr = 0.1
"""


@pytest.fixture
def write(tmp_path: Path) -> Write:
    def write_recipe(text: str) -> Path:
        path = tmp_path / "digits.toml"
        path.write_text(text, encoding="utf-8")
        return path

    return write_recipe


def refuse(path: Path, *overrides: str, strategy: str | None = None) -> RecipeError:
    with pytest.raises(RecipeError) as caught:
        load_recipe(path, overrides, strategy)
    return caught.value


@pytest.mark.parametrize(
    ("override", "path", "value"),
    [
        ("optimizer.lr=3e-4", ("optimizer", "lr"), 3e-4),
        ("optimizer.lr = 1", ("optimizer", "lr"), 1.0),
        ("optimizer.betas=[0.5, 0.6]", ("optimizer", "betas"), (0.5, 0.6)),
        ("optimizer.clip_norm=1.0", ("optimizer", "clip_norm"), 1.0),
        ("batch.shuffle=false", ("batch", "shuffle"), False),
        ("batch={size=9}", ("batch", "size"), 9),
        ("task=my_file.py:build", ("task",), "my_file.py:build"),
        ('task="sum"', ("task",), "sum"),
        ("run_dir=runs/a=b", ("run_dir",), "runs/a=b"),
        ("strategy=replicas=2 codec=bf16", ("strategy",), Strategy(replicas=2, codec="bf16")),
        ("strategy.replicas=2", ("strategy", "replicas"), 2),
        ("steps=", ("steps",), None),
        ("batch.size=", ("batch", "size"), 32),
        ("options.files=a/*.txt", ("options",), {"files": "a/*.txt"}),
        ("options.deep.x=[1, 2]", ("options",), {"deep": {"x": [1, 2]}}),
        ('options."a b"=1', ("options",), {"a b": 1}),
        ('options.word="True"', ("options",), {"word": "True"}),
        ("options.version=1.2.3", ("options",), {"version": "1.2.3"}),
        ("options.gone=", ("options",), {}),
    ],
)
def test_an_override_is_toml_or_a_bare_word(
    write: Write, override: str, path: tuple[str, ...], value: Any
) -> None:
    overrides = [override, "epochs=1"] if override == "steps=" else [override]
    found: Any = load_recipe(write(GOOD), overrides)
    for part in path:
        found = getattr(found, part)
    assert found == value
    assert type(found) is type(value)


def test_a_later_override_wins_and_the_rest_stays(write: Write) -> None:
    recipe = load_recipe(write(GOOD), ["optimizer.lr=1.0", "optimizer.lr=2.0", "optimizer.eps=1e-6"])
    assert (recipe.optimizer.lr, recipe.optimizer.eps, recipe.batch.size) == (2.0, 1e-6, 16)


def test_the_strategy_argument_replaces_the_strategy_of_the_file(write: Write) -> None:
    path = write('task = "x"\nsteps = 1\n[strategy]\nzero = 1\n')
    assert load_recipe(path, strategy="replicas=2").strategy == Strategy(replicas=2)
    assert load_recipe(path, ["strategy.replicas=3"], "fsdp").strategy == Strategy(
        replicas=3, shard=2, zero=3
    )


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("optimizer.lr=fast", 'optimizer.lr: expected a finite number >= 0, found "fast"'),
        ("optimizer.lrr=1", "optimizer.lrr: unknown key, found 1; did you mean optimizer.lr?"),
        ("optimizr.lr=1", "optimizr: unknown key, found a table; did you mean optimizer?"),
        ("optimizer.lrr=", "optimizer.lrr: unknown key; did you mean optimizer.lr?"),
        ("optimizer.lr.x=1", "optimizer.lr.x: expected optimizer.lr to be a table, found 0.1"),
        ("batch.shards=64", "batch.shards: expected at most batch.size = 16, found 64"),
        ("batch.shuffle=False", "batch.shuffle: expected a TOML value, found False; write false"),
        (
            "optimizer.clip_norm=None",
            "optimizer.clip_norm: expected a TOML value, found None; "
            "write nothing after the equals sign, for the default",
        ),
        ("options.x=.5", "options.x: expected a TOML value, found .5"),
        ("options.x=[1", "options.x: expected a TOML value, found [1"),
        ("steps", 'steps: expected KEY=VALUE, found "steps"'),
        ("steps 2=3", '"steps 2": unknown key, found 3; did you mean steps?'),
        ("strategy=dpp", 'strategy: unknown preset "dpp"; did you mean "ddp"?'),
        ("strategy.shard=0", "strategy.shard: expected an integer >= 1, found 0"),
    ],
)
def test_a_wrong_override_is_named_instead_of_a_line(write: Write, override: str, message: str) -> None:
    assert str(refuse(write(GOOD), override)) == f"{message}\n  where: --set {override}"


def test_a_wrong_strategy_argument_is_named(write: Write) -> None:
    error = refuse(write(GOOD), strategy="replicas=2 shrad=2")
    assert error.what == "strategy.shrad: unknown key, found 2; did you mean strategy.shard?"
    assert error.where == '--strategy "replicas=2 shrad=2"'


def test_an_override_cannot_carry_a_second_statement(write: Write) -> None:
    assert load_recipe(write(GOOD), ["run_dir=1\nseed=7"]).seed == 1


def test_an_override_can_remove_a_wrong_key_of_the_file(write: Write) -> None:
    assert load_recipe(write("stepz = 1\n" + GOOD), ["stepz="]).steps == 20
