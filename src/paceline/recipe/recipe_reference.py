"""The reference of all recipe keys: a commented TOML file, and a JSON schema for editors.

Invariant: both are read from the models. The TOML file is one that `load_recipe` reads back as an equal
recipe.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

from pydantic import BaseModel

from paceline.recipe.recipe import Recipe
from paceline.recipe.recipe_files import EXTENDS
from paceline.recipe.toml_text import toml_key, toml_value
from paceline.recipe.validation import expected, get_value, need_text

_WIDTH = 36


class RecipeKey(NamedTuple):
    """A key that a recipe can have.

    Args:
        table: "" for top-level keys.
        name: in its table.
        expects: a description of its values.
        default: as TOML; "" if there is none.
        meaning: its description.
        only: when it has an effect, in a few words; "": always.
    """

    table: str
    name: str
    expects: str
    default: str
    meaning: str
    only: str

    @property
    def explained(self) -> str:
        """Return its description, and when it has an effect."""
        return f"{self.meaning}; only {self.only}" if self.only else self.meaning


def recipe_keys() -> Iterator[RecipeKey]:
    """Yield every key of a recipe: top-level keys first, those of a table before the tables in it."""
    yield from _keys_of("", Recipe)


def _keys_of(table: str, model: Any) -> Iterator[RecipeKey]:
    for name, field in model.model_fields.items():
        if not _is_table(field.annotation):
            yield _key(table, name, field)
    for name, field in model.model_fields.items():
        if _is_table(field.annotation):
            yield from _keys_of(f"{table}.{name}" if table else name, field.annotation)


def table_description(table: str) -> str:
    """Return the description of a table, by its dotted name."""
    *outer, name = table.split(".")
    model: Any = Recipe
    for part in outer:
        model = model.model_fields[part].annotation
    return model.model_fields[name].description or ""


def describe_recipe(recipe: Recipe) -> str:
    """Return the recipe as TOML with the description of each key; keys that are not set are comments."""
    lines, table = [], ""
    for key in recipe_keys():
        if key.table != table:
            table = key.table
            lines += ["", f"[{table}]  # {table_description(table)}"]
        lines.append(_line(key, get_value(recipe, f"{table}.{key.name}" if table else key.name)))
    return "\n".join(_options_last(lines, recipe)) + "\n"


def _line(key: RecipeKey, value: Any) -> str:
    if value is None or value == {}:
        return f"{f'# {key.name} is not set':{_WIDTH}}  # {key.explained}"
    return f"{f'{toml_key(key.name)} = {toml_value(value)}':{_WIDTH}}  # {key.explained}"


def _options_last(lines: list[str], recipe: Recipe) -> list[str]:
    """Write `options` as a table of its own, after the top-level keys."""
    if not recipe.options:
        return lines
    others = [line for line in lines if not line.startswith("options = ")]
    meaning = Recipe.model_fields["options"].description
    pairs = [f"{toml_key(name)} = {toml_value(value)}" for name, value in recipe.options.items()]
    end = others.index("")
    return [*others[:end], "", f"[options]  # {meaning}", *pairs, *others[end:]]


def json_schema() -> dict[str, Any]:
    """Return a JSON schema (draft 2020-12) of recipes, for editors: taplo, VS Code's Even Better TOML."""
    schema = Recipe.model_json_schema()
    strategy = schema["properties"]["strategy"]
    outer = {name: strategy.pop(name) for name in ("description", "default") if name in strategy}
    as_text = {"type": "string", "description": 'a preset such as "ddp", or "replicas=2 pipeline=2"'}
    schema["properties"]["strategy"] = {**outer, "anyOf": [as_text, strategy]}
    about = "the recipe file that this one changes, relative to this file; tables are merged key by key"
    schema["properties"][EXTENDS] = {"type": "string", "description": about}
    return {"$schema": "https://json-schema.org/draft/2020-12/schema", **schema, "title": "Paceline recipe"}


def _key(table: str, name: str, field: Any) -> RecipeKey:
    default = field.get_default(call_default_factory=True)
    unset = field.is_required() or default is None or default == {}
    shown = "" if unset else toml_value(default)
    only = need_text(Recipe, f"{table}.{name}" if table else name)
    expects = expected(field.annotation, field.metadata)
    return RecipeKey(table, name, expects, shown, field.description or "", only)


def _is_table(annotation: Any) -> bool:
    return isinstance(annotation, type) and issubclass(annotation, BaseModel)
