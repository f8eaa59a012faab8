"""`KEY=VALUE` overrides of a recipe, as `--set` takes them.

Invariant: the value is TOML; a bare word that is not TOML is a string; what looks like another kind of value
and is not (`True`, `.5`, an open bracket) is an error, never quietly a string.
"""

from __future__ import annotations

import tomllib
from typing import Any

from pydantic_core import PydanticCustomError

from paceline.recipe.expect import known_keys
from paceline.recipe.model import Recipe
from paceline.recipe.problems import Problem, refused
from paceline.recipe.spell import KeyPath, nearest, spell, spell_found, spell_path
from paceline.recipe.toml_text import parse_toml

_DEFAULT = "nothing after the equals sign, for the default"
_MEANT = {"True": "true", "False": "false", "None": _DEFAULT, "null": _DEFAULT}


def apply_override(values: dict[str, Any], text: str) -> tuple[KeyPath, Problem | None]:
    """Change `values` in place.

    Args:
        values: plain values of a recipe, by key.
        text: `optimizer.lr=3e-4`, `task=digits`, `options.files=["a.txt"]`; `KEY=` removes the key.
    Returns:
        The key, and what is wrong with the override itself; whether the value suits the key is not
        decided here.
    """
    plain = text.encode(errors="backslashreplace").decode()  # bytes of a command line may be no text
    key, equals, value = plain.partition("=")
    path = _path(key)
    try:
        if plain != text:
            raise refused(f"expected text in UTF-8, found {spell(plain)}")
        if not equals:
            raise refused(f"expected KEY=VALUE, found {spell(text)}")
        _set(values, path, _read(value.strip()))
    except PydanticCustomError as refusal:
        return path, Problem((path,), refusal.message())
    return path, None


def _path(key: str) -> tuple[str, ...]:
    """The parts of a key; text that is no key is one part, which no table knows."""
    try:
        table: Any = parse_toml(f"{key} = 0")
    except tomllib.TOMLDecodeError:
        return (key,)
    path: list[str] = []
    while isinstance(table, dict) and table:
        part, table = next(iter(table.items()))
        path.append(part)
    return tuple(path) or (key,)


def _read(value: str) -> tuple[Any, ...]:
    """The value, or nothing where there is none."""
    if not value:
        return ()
    try:
        table = parse_toml(f"value = {value}")
    except tomllib.TOMLDecodeError:
        if value in _MEANT:
            raise refused(f"expected a TOML value, found {value}; write {_MEANT[value]}") from None
        if value[0] in "\"'[{" or _is_number(value):
            raise refused(f"expected a TOML value, found {value}") from None
        return (value,)
    return (table["value"],) if len(table) == 1 else (value,)


def _is_number(value: str) -> bool:
    try:
        float(value)
    except ValueError:
        return False
    return True


def _set(values: dict[str, Any], path: tuple[str, ...], found: tuple[Any, ...]) -> None:
    if not found:
        _check_known(values, path)
    table: Any = values
    for depth, part in enumerate(path[:-1], 1):
        table = table.setdefault(part, {})
        if not isinstance(table, dict):
            raise refused(f"expected {spell_path(path[:depth])} to be a table, found {spell_found(table)}")
    if found:
        table[path[-1]] = found[0]
    else:
        table.pop(path[-1], None)


def _check_known(values: Any, path: KeyPath) -> None:
    """Removing what the file lacks is right, unless no recipe could have it: then it is a wrong spelling."""
    known, key = tuple(known_keys(Recipe)), spell_path(path)
    for part in path:
        values = values.get(part) if isinstance(values, dict) else None
    if values is None and key not in known and path[0] != "options":
        near = nearest(key, known)
        raise refused("unknown key" + (f"; did you mean {near}?" if near else ""))
