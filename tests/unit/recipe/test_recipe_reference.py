"""A recipe says everything: each key with its meaning, for people and editors; pages follow from the code."""

from __future__ import annotations

import json
import tomllib
from pathlib import Path

import pytest

from paceline.recipe import Recipe, load_recipe
from paceline.recipe.recipe_reference import describe_recipe, json_schema, recipe_keys
from tools import reference_pages

ROOT = Path(__file__).parents[3]
RECIPES = [*sorted((ROOT / "recipes").glob("*.toml")), ROOT / "examples" / "own_model.toml"]


@pytest.mark.parametrize("path", RECIPES, ids=lambda path: path.stem)
def test_what_is_shown_is_read_back_as_the_same_recipe(path: Path, tmp_path: Path) -> None:
    recipe = load_recipe(path, ["optimizer.clip_norm=0.5"])
    (tmp_path / "shown.toml").write_text(describe_recipe(recipe))
    assert load_recipe(tmp_path / "shown.toml") == recipe


def test_every_key_is_shown_set_or_not_with_what_it_means() -> None:
    text = describe_recipe(Recipe(task="digits", steps=3))
    for key in recipe_keys():
        assert key.meaning and any(
            line.startswith((f"{key.name} = ", f"# {key.name} is not set")) and line.endswith(key.explained)
            for line in text.splitlines()
        ), key
    assert "# epochs is not set" in text and "# clip_norm is not set" in text


def test_the_schema_takes_the_recipes_and_refuses_wrong_ones() -> None:
    jsonschema = pytest.importorskip("jsonschema")
    schema = json_schema()
    jsonschema.Draft202012Validator.check_schema(schema)
    validator = jsonschema.Draft202012Validator(schema)
    for path in RECIPES:
        values = tomllib.loads(path.read_text())
        assert validator.is_valid(values) and validator.is_valid(values | {"strategy": "ddp"}), path
        for wrong in (
            {"epochz": 3},
            {"seed": "one"},
            {"batch": {"size": 0}},
            {"optimizer": {"name": "adamm"}},
        ):
            assert not validator.is_valid(values | wrong), (path, wrong)


@pytest.mark.parametrize("name", ["recipe.md", "recipe.schema.json", "api.md"])
def test_the_pages_are_what_the_code_says(name: str) -> None:
    page = (ROOT / "docs" / "reference" / name).read_text(encoding="utf-8")
    assert page == reference_pages.pages()[name], "run `make docs`"


def test_the_pages_name_everything() -> None:
    import paceline

    api, recipe = reference_pages.api_page(), reference_pages.recipe_page()
    assert all(f"## `{name}`" in api for name in paceline.__all__ if name != "__version__")
    assert all(f"| `{key.name}` |" in recipe for key in recipe_keys()) and " at 0x" not in api
    assert json.dumps(json_schema()).count("description") > 80
