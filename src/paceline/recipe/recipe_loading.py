"""Loading of a recipe: a TOML file and what it extends, a strategy in place of theirs, and `KEY=VALUE`
overrides.

The value of an override is TOML; a bare word that is not TOML is a string. A text that looks like another
kind of value and is not (`True`, `.5`, an open bracket) is an error, never silently a string.

Invariant: what is wrong is a RecipeError that names the key, its place (file and line, or the override), what
was expected and what was found; everything that can be found at once is in one message.
"""

from __future__ import annotations

import tomllib
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from copy import deepcopy
from os import PathLike
from pathlib import Path
from typing import Any

from pydantic import ValidationError
from pydantic_core import PydanticCustomError

from paceline.errors import RecipeError, StrategyError
from paceline.recipe.recipe import Recipe
from paceline.recipe.recipe_files import EXCLUSIVE_KEYS, read_recipe_files
from paceline.recipe.strategy import Strategy
from paceline.recipe.toml_text import (
    KeyPath,
    closest_word,
    dotted_key,
    parse_toml,
    shown_value,
    toml_value,
)
from paceline.recipe.validation import (
    KeyLocator,
    RecipeProblem,
    known_keys,
    read_problems,
    recipe_error,
    value_error,
)

_HOW_TO_UNSET = "nothing after the equals sign, for the default"
_TOML_SPELLINGS = {"True": "true", "False": "false", "None": _HOW_TO_UNSET, "null": _HOW_TO_UNSET}


def apply_override(values: dict[str, Any], text: str) -> tuple[KeyPath, RecipeProblem | None]:
    """Apply one override; change `values` in place.

    Args:
        values: plain values of a recipe, by key.
        text: `optimizer.lr=3e-4`, `task=digits`, `options.files=["a.txt"]`; `KEY=` removes the key.
    Returns:
        The key, and the problem of the override itself, if it has one. Whether the value is valid for the key
        is checked later, with all other values.
    """
    plain = text.encode(errors="backslashreplace").decode()  # a command line can hold bytes that are no text
    key, equals, value = plain.partition("=")
    path = _parse_key(key)
    try:
        if plain != text:
            raise value_error(f"expected text in UTF-8, found {toml_value(plain)}")
        if not equals:
            raise value_error(f"expected KEY=VALUE, found {toml_value(text)}")
        _set_value(values, path, _read_value(value.strip()))
    except PydanticCustomError as refusal:
        return path, RecipeProblem((path,), refusal.message())
    return path, None


def _parse_key(key: str) -> tuple[str, ...]:
    """Split a dotted key; text that is no TOML key is returned whole, and is then reported as unknown."""
    try:
        table: Any = parse_toml(f"{key} = 0")
    except tomllib.TOMLDecodeError:
        return (key,)
    path: list[str] = []
    while isinstance(table, dict) and table:
        name, table = next(iter(table.items()))
        path.append(name)
    return tuple(path) or (key,)


def _read_value(value: str) -> tuple[Any, ...]:
    """Return the value as a tuple of one, or an empty tuple if there is none."""
    if not value:
        return ()
    try:
        table = parse_toml(f"value = {value}")
    except tomllib.TOMLDecodeError:
        if value in _TOML_SPELLINGS:
            raise value_error(
                f"expected a TOML value, found {value}; write {_TOML_SPELLINGS[value]}"
            ) from None
        if value[0] in "\"'[{" or _is_number(value):
            raise value_error(f"expected a TOML value, found {value}") from None
        return (value,)
    return (table["value"],) if len(table) == 1 else (value,)


def _is_number(value: str) -> bool:
    try:
        float(value)
    except ValueError:
        return False
    return True


def _set_value(values: dict[str, Any], path: tuple[str, ...], value: tuple[Any, ...]) -> None:
    if not value:
        _check_known(values, path)
    table: Any = values
    for depth, name in enumerate(path[:-1], 1):
        table = table.setdefault(name, {})
        if not isinstance(table, dict):
            raise value_error(
                f"expected {dotted_key(path[:depth])} to be a table, found {shown_value(table)}"
            )
    if value:
        table[path[-1]] = value[0]
    else:
        table.pop(path[-1], None)


def _check_known(values: Any, path: KeyPath) -> None:
    """Refuse to remove a key that no recipe can have; a key that the file only lacks can be removed."""
    known, key = tuple(known_keys(Recipe)), dotted_key(path)
    for name in path:
        values = values.get(name) if isinstance(values, dict) else None
    if values is None and key not in known and path[0] != "options":
        near = closest_word(key, known)
        raise value_error("unknown key" + (f"; did you mean {near}?" if near else ""))


def load_recipe(
    path: str | PathLike[str], overrides: Sequence[str] = (), strategy: str | None = None
) -> Recipe:
    """Read a recipe.

    Args:
        path: a TOML file, which can extend another one.
        overrides: `KEY=VALUE` texts, applied in order; `KEY=` goes back to the default.
        strategy: replaces the strategy of the files; applied before the overrides.
    Raises:
        RecipeError: the file cannot be read, or the recipe has errors; names each with its place.
    """
    return RecipeFile(path).load(overrides, strategy)


class RecipeFile:
    """A recipe file that is read once, and loaded with other overrides each time.

    Args:
        path: a TOML file, which can extend another one.
    Raises:
        RecipeError: the file cannot be read.
    """

    def __init__(self, path: str | PathLike[str]) -> None:
        self._name = str(path)
        _refuse_python(Path(path))
        self._files = read_recipe_files(Path(path))

    def load(self, overrides: Sequence[str] = (), strategy: str | None = None) -> Recipe:
        """Return the recipe of the file with these overrides; `load_recipe` describes the arguments.

        Raises:
            RecipeError: the recipe has errors; names each with its place.
        """
        values, files = deepcopy(self._files.values), self._files
        changed: dict[KeyPath, str] = {}
        if strategy is not None:
            values["strategy"] = strategy
            changed[("strategy",)] = f'--strategy "{strategy}"'
        problems = _apply_overrides(values, overrides, changed)
        recipe, invalid = _validate(values, files.levels | dict.fromkeys(changed, files.num_files))
        if "task" not in values:  # a recipe in Python may get its task later; a file has to name it
            missing = "expected a string that is not empty, but it is missing"
            problems.append(RecipeProblem((("task",),), missing))
        problems += invalid
        if problems or recipe is None:
            raise recipe_error(problems, _locator(self._name, files.places, changed), RecipeError)
        return recipe


def _refuse_python(path: Path) -> None:
    """Raise a RecipeError for a script in place of a recipe."""
    if path.suffix == ".py":
        raise RecipeError(
            f"'{path}' is Python, but a recipe is a TOML file",
            where=str(path),
            next_step=f"run a script that calls paceline.train with `paceline run -n 2 {path}`; or write a"
            f' recipe that names its build function: task = "{path.name}:build"',
        )


def _validate(
    values: dict[str, Any], levels: Mapping[KeyPath, int]
) -> tuple[Recipe | None, list[RecipeProblem]]:
    """Return the recipe, or its problems.

    A key of a file that has no effect any more because of an override or of an extending file is left out, as
    if the file did not have it: otherwise `--strategy` would fail on every file that sets a key for another
    strategy.

    Args:
        values: of the recipe; keys that are left out are removed.
        levels: number of the file or override that set a key, higher for what comes later; 0 if left out.
    """
    first: list[RecipeProblem] = []
    levels = dict(levels)
    while True:
        try:
            return Recipe.model_validate(values), []
        except ValidationError as error:
            problems = list(read_problems(error, Recipe))
        first = first or problems
        without_effect = dict(item for problem in problems for item in _keys_without_effect(problem, levels))
        dropped = {path: level for path, level in without_effect.items() if _remove_key(values, path)}
        if not dropped:
            return None, first
        levels |= dropped


def _keys_without_effect(
    problem: RecipeProblem, levels: Mapping[KeyPath, int]
) -> Iterator[tuple[KeyPath, int]]:
    """Yield the key that lost its effect by one that was set later and decides about it, and the latter's
    level.
    """
    path, *deciding = problem.paths
    deciding_level = max((_level(other, levels) for other in deciding), default=0)
    if problem.can_drop and _level(path, levels) < deciding_level:
        yield path, deciding_level


def _level(path: KeyPath, levels: Mapping[KeyPath, int]) -> int:
    """Return the level of a key: its own, or that of a table around it."""
    return max(levels.get(path[:depth], 0) for depth in range(1, len(path) + 1))


def _remove_key(values: Any, path: KeyPath) -> bool:
    """Remove a key; return whether it was there."""
    for name in path[:-1]:
        values = values.get(name) if isinstance(values, dict) else None
    return isinstance(values, dict) and values.pop(path[-1], None) is not None


def _apply_overrides(
    values: dict[str, Any], overrides: Sequence[str], changed: dict[KeyPath, str]
) -> list[RecipeProblem]:
    """Apply the overrides; record in `changed` which key came from which."""
    if isinstance(values.get("strategy"), str) and overrides:
        with suppress(StrategyError):  # validation reports it, with its place
            values["strategy"] = dict(Strategy.parse(values["strategy"]))
    problems = []
    for text in overrides:
        path, problem = apply_override(values, text)
        rival = EXCLUSIVE_KEYS.get(path)
        if rival is not None and values.get(str(path[0])) is not None:
            values.pop(rival, None)
        changed[path] = f"--set {text}"
        if problem:
            problems.append(problem)
    return problems


def _locator(name: str, lines: Mapping[KeyPath, str], changed: Mapping[KeyPath, str]) -> KeyLocator:
    """Return a locator: the override that set a key, else its line, else the line of its table."""
    inside = {path[:depth]: source for path, source in changed.items() for depth in range(1, len(path))}

    def locate(paths: Sequence[KeyPath]) -> str:
        overrides = [source for path in paths for source in _enclosing_places(path, changed)]
        exact = [lines[path] for path in paths if path in lines]
        tables = [source for path in paths for source in _enclosing_places(path, {**inside, **lines})]
        return next(iter((*overrides, *exact, *tables)), name)

    return locate


def _enclosing_places(path: KeyPath, places: Mapping[KeyPath, str]) -> Iterator[str]:
    """Yield the places of a key and of the tables around it, from the inside out."""
    for depth in range(len(path), 0, -1):
        if path[:depth] in places:
            yield places[path[:depth]]
