"""A recipe in words: every key, set or not, with what it means; and the same for editors, as a JSON schema.

Invariant: read off the models. What is printed is TOML that `load_recipe` reads back as an equal recipe.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

from pydantic import BaseModel

from paceline.recipe.recipe import Recipe
from paceline.recipe.toml_text import toml_key, toml_value
from paceline.recipe.validation import expected, need_text

_WIDTH = 36


class RecipeKey(NamedTuple):
    """One key that a recipe may have.

    Args:
        table: "" for the keys that stand in none.
        default: as TOML; "" if it is left out, or has to be given.
        acts: when it acts, in a few words; "": always.
    """

    table: str
    name: str
    expects: str
    default: str
    meaning: str
    acts: str

    @property
    def explained(self) -> str:
        """What it means, and when it acts."""
        return f"{self.meaning}; only {self.acts}" if self.acts else self.meaning


def recipe_keys() -> Iterator[RecipeKey]:
    """Every key of a recipe, those of no table first."""
    for name, field in Recipe.model_fields.items():
        if not _is_table(field.annotation):
            yield _key("", name, field)
    for table, field in Recipe.model_fields.items():
        if _is_table(field.annotation):
            inside: Any = field.annotation
            for name, inner in inside.model_fields.items():
                yield _key(table, name, inner)


def describe_recipe(recipe: Recipe) -> str:
    """The recipe as TOML, each key with its meaning; a key that is not set stands there as a comment."""
    lines, table = [], ""
    for key in recipe_keys():
        if key.table != table:
            table = key.table
            lines += ["", f"[{table}]  # {Recipe.model_fields[table].description}"]
        holder = getattr(recipe, table) if table else recipe
        lines.append(_line(key, getattr(holder, key.name)))
    return "\n".join(_options_last(lines, recipe)) + "\n"


def _line(key: RecipeKey, value: Any) -> str:
    if value is None or value == {}:
        return f"{f'# {key.name} is not set':{_WIDTH}}  # {key.explained}"
    return f"{f'{toml_key(key.name)} = {toml_value(value)}':{_WIDTH}}  # {key.explained}"


def _options_last(lines: list[str], recipe: Recipe) -> list[str]:
    """A table of its own, behind the keys that stand in none."""
    if not recipe.options:
        return lines
    kept = [line for line in lines if not line.startswith("options = ")]
    meaning = Recipe.model_fields["options"].description
    pairs = [f"{toml_key(name)} = {toml_value(value)}" for name, value in recipe.options.items()]
    end = kept.index("")
    return [*kept[:end], "", f"[options]  # {meaning}", *pairs, *kept[end:]]


def json_schema() -> dict[str, Any]:
    """A JSON schema (draft 2020-12) of recipes, for editors: taplo, VS Code's Even Better TOML."""
    schema = Recipe.model_json_schema()
    strategy = schema["properties"]["strategy"]
    about = {name: strategy.pop(name) for name in ("description", "default") if name in strategy}
    named = {"type": "string", "description": 'a preset such as "ddp", or "replicas=2 pipeline=2"'}
    schema["properties"]["strategy"] = {**about, "anyOf": [named, strategy]}
    return {"$schema": "https://json-schema.org/draft/2020-12/schema", **schema, "title": "Paceline recipe"}


def _key(table: str, name: str, field: Any) -> RecipeKey:
    default = field.get_default(call_default_factory=True)
    unset = field.is_required() or default is None or default == {}
    shown = "" if unset else toml_value(default)
    says, acts = field.description or "", need_text(Recipe, f"{table}.{name}" if table else name)
    return RecipeKey(table, name, expected(field.annotation, field.metadata), shown, says, acts)


def _is_table(annotation: Any) -> bool:
    return isinstance(annotation, type) and issubclass(annotation, BaseModel)
