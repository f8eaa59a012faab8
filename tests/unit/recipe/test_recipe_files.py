"""Recipes that extend others: merged key by key, and what is wrong is named with its own file and line."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from paceline.errors import RecipeError
from paceline.recipe import Recipe, Strategy, load_recipe
from paceline.recipe.recipe import to_toml

Write = Callable[[str, str], Path]


@pytest.fixture
def write(tmp_path: Path) -> Write:
    def write_recipe(name: str, text: str) -> Path:
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")
        return path

    return write_recipe


def refuse(path: Path, *overrides: str) -> RecipeError:
    with pytest.raises(RecipeError) as caught:
        load_recipe(path, overrides)
    return caught.value


def test_a_chain_is_merged_key_by_key_and_what_runs_is_the_resolved_recipe(write: Write) -> None:
    write(
        "shared/base.toml",
        'task = "model.py:build"\nepochs = 3\nstrategy = "replicas=2 codec=bf16"\n'
        "options = {hidden = [8, 8], kind = {a = 1, b = 2}}\n[optimizer]\nlr = 0.1\neps = 1e-6\n",
    )
    write("shared/middle.toml", 'extends = "base.toml"\n[optimizer]\nlr = 0.2\nbetas = [0.5, 0.6]\n')
    path = write(
        "mine/run.toml",
        'extends = "../shared/middle.toml"\nsteps = 7\n[options]\nhidden = [4]\nkind.b = 3\n'
        '[strategy]\ncodec = "int8"\n[optimizer]\neps = 1e-5\n',
    )
    expected = Recipe(
        task="../shared/model.py:build",  # the file of the base, seen from the folder of the recipe
        steps=7,
        options={"hidden": [4], "kind": {"a": 1, "b": 3}},
        strategy=Strategy(replicas=2, codec="int8"),
        optimizer={"lr": 0.2, "betas": (0.5, 0.6), "eps": 1e-5},
    )
    assert load_recipe(path) == expected
    assert load_recipe(path, ["optimizer.eps=1e-4"]).optimizer.eps == 1e-4
    resolved = write("mine/resolved.toml", to_toml(expected))
    assert "extends" not in resolved.read_text() and load_recipe(resolved) == expected


def test_a_key_of_a_base_that_an_extending_file_makes_useless_is_left_out(write: Write) -> None:
    """As for an override; a key of the extending file itself is never left out."""
    base = 'task = "sum"\nsteps = 5\n[schedule]\ndecay = "cosine"\nfinal = 0.1\ncycle_steps = 2\n'
    write("base.toml", f"{base}cycle_factor = 3\n")
    middle = 'extends = "base.toml"\nschedule = {decay = "linear", final = 0.2}\n'
    assert load_recipe(write("middle.toml", middle)) == Recipe(
        task="sum", steps=5, schedule={"decay": "linear", "final": 0.2}
    )
    last = write("last.toml", 'extends = "middle.toml"\n[schedule]\ndecay = "constant"\n')
    assert load_recipe(last) == Recipe(task="sum", steps=5)
    wrong = write("wrong.toml", 'extends = "base.toml"\n\n[schedule]\nrate = 0.5\n')
    assert refuse(wrong).where == f"{wrong}, line 4"


def test_an_error_names_the_file_and_line_that_decided_the_key(write: Write) -> None:
    base = write("base.toml", 'task = "sum"\nsteps = 5\n[optimizer]\nlr = "fast"\nbetas = [0.1, 2]\n')
    child = write("child.toml", 'extends = "base.toml"\n\n[optimizer]\neps = -1\n')
    found = str(refuse(child))
    assert f"{base}, line 4: optimizer.lr: expected" in found
    assert f"{base}, line 5: optimizer.betas[1]: expected" in found
    assert f"{child}, line 4: optimizer.eps: expected" in found
    write("child.toml", 'extends = "base.toml"\n[optimizer]\nlr = 1\nbetas = [0.1, 3.0]\n')
    assert refuse(child).where == f"{child}, line 4"
    write("child.toml", 'extends = "base.toml"\noptimizer.lr = 1\n[optimizer.betas]\nx = 1\n')
    assert refuse(child).where.startswith(f"{child}, line ")


@pytest.mark.parametrize(
    ("base", "extends", "place", "what"),
    [
        ("steps = = 1", '"base.toml"', "base.toml, line 1", "not TOML"),
        ("steps = 1", '"bse.toml"', "child.toml, line 2", "cannot read the recipe that it extends"),
        ("steps = 1", '"."', "child.toml, line 2", "not a regular file"),
        ("steps = 1", '"a\\u0000b"', "child.toml, line 2", "extends: expected the path of a recipe"),
        ("steps = 1", '"loop.toml"', "child.toml, line 2", "cannot read the recipe that it extends"),
        ("steps = 1", "3", "child.toml, line 2", "extends: expected the path of a recipe, found 3"),
        ("steps = 1", '["base.toml"]', "child.toml, line 2", "extends: expected the path of a recipe"),
        ("steps = 1", '"child.toml"', "child.toml, line 2", "extends itself: child.toml -> child.toml"),
        (
            'extends = "./child.toml"',
            '"base.toml"',
            "base.toml, line 1",
            "extends itself: child.toml -> base.toml -> child.toml",
        ),
    ],
)
def test_a_base_that_cannot_be_used_is_refused(
    write: Write, base: str, extends: str, place: str, what: str
) -> None:
    loop = write("base.toml", base).with_name("loop.toml")
    loop.symlink_to(loop)
    child = write("child.toml", f'task = "sum"\nextends = {extends}\n')
    error = refuse(child)
    assert error.where == str(child.parent / place) and what in error.what and error.next_step
    if "bse" in extends:
        assert error.next_step == f"did you mean {child.parent / 'base.toml'}?"


def test_a_linked_recipe_extends_a_file_next_to_the_one_it_links_to(write: Write, tmp_path: Path) -> None:
    write("real/base.toml", 'task = "model.py:build"\nsteps = 5\n')
    real = write("real/child.toml", 'extends = "base.toml"\nseed = 3\n')
    (tmp_path / "link.toml").symlink_to(real)
    assert load_recipe(tmp_path / "link.toml") == Recipe(task="model.py:build", steps=5, seed=3)
