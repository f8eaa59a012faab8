"""`KEY=VALUE` overrides of a recipe, as `--set` takes them.

Invariant: the value is TOML; a bare word that is not TOML is a string; what looks like another kind of value
and is not (`True`, `.5`, an open bracket) is an error, never quietly a string.

From a TOML file and overrides to a Recipe.

Invariant: what is wrong is a RecipeError that names key, place (file and line, or the override), what was
expected and what was found; all that can be found at once is in one message.
"""

from __future__ import annotations

import errno
import re
import tomllib
from collections.abc import Iterator, Mapping, Sequence, Set
from contextlib import suppress
from os import PathLike
from pathlib import Path
from typing import Any

from pydantic import ValidationError
from pydantic_core import PydanticCustomError

from paceline.errors import RecipeError, StrategyError
from paceline.recipe.recipe import Recipe
from paceline.recipe.strategy import Strategy
from paceline.recipe.toml_text import (
    KeyPath,
    closest_word,
    dotted_key,
    locate_keys,
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


def _read_value(value: str) -> tuple[Any, ...]:
    """The value, or nothing where there is none."""
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


def _set_value(values: dict[str, Any], path: tuple[str, ...], found: tuple[Any, ...]) -> None:
    if not found:
        _check_known(values, path)
    table: Any = values
    for depth, part in enumerate(path[:-1], 1):
        table = table.setdefault(part, {})
        if not isinstance(table, dict):
            raise value_error(
                f"expected {dotted_key(path[:depth])} to be a table, found {shown_value(table)}"
            )
    if found:
        table[path[-1]] = found[0]
    else:
        table.pop(path[-1], None)


def _check_known(values: Any, path: KeyPath) -> None:
    """Removing what the file lacks is right, unless no recipe could have it: then it is a wrong spelling."""
    known, key = tuple(known_keys(Recipe)), dotted_key(path)
    for part in path:
        values = values.get(part) if isinstance(values, dict) else None
    if values is None and key not in known and path[0] != "options":
        near = closest_word(key, known)
        raise value_error("unknown key" + (f"; did you mean {near}?" if near else ""))


_MAX_RECIPE_BYTES = 2**22

_EXCLUSIVE_KEYS: Mapping[KeyPath, str] = {("steps",): "epochs", ("epochs",): "steps"}
"""Of these a recipe has one: the one that was typed last."""


def load_recipe(
    path: str | PathLike[str], overrides: Sequence[str] = (), strategy: str | None = None
) -> Recipe:
    """Read a recipe.

    Args:
        path: a TOML file.
        overrides: `KEY=VALUE` texts, applied in order; `KEY=` goes back to the default.
        strategy: takes the place of the file's strategy; applied before the overrides.
    Raises:
        RecipeError: the file cannot be read, or the recipe has errors; names each with its place.
    """
    name = str(path)
    text = _read_text(Path(path))
    values = _parse(text, name)
    changed: dict[KeyPath, str] = {}
    if strategy is not None:
        values["strategy"] = strategy
        changed[("strategy",)] = f'--strategy "{strategy}"'
    problems = _apply_overrides(values, overrides, changed)
    recipe, wrong = _validate(values, set(changed))
    problems += [*_no_task(values), *wrong]
    if problems or recipe is None:
        raise recipe_error(problems, _locator(name, text, changed), RecipeError)
    return recipe


def _no_task(values: Mapping[str, Any]) -> list[RecipeProblem]:
    """A recipe in Python may be given its task apart; a file has to name it."""
    if "task" in values:
        return []
    return [RecipeProblem((("task",),), "expected a string that is not empty, but it is missing")]


def _validate(values: dict[str, Any], changed: Set[KeyPath]) -> tuple[Recipe | None, list[RecipeProblem]]:
    """The recipe, or what is wrong with it.

    What was typed replaces what the file says and can no longer act: a key of the file that is idle because
    of one that was changed is left out, as if the file did not have it.
    """
    first: list[RecipeProblem] = []
    while True:
        try:
            return Recipe.model_validate(values), []
        except ValidationError as error:
            problems = list(read_problems(error, Recipe))
        first = first or problems
        found = [path for problem in problems for path in _overridden_keys(problem, changed)]
        dropped = {path for path in found if _remove_key(values, path)}
        if not dropped:
            return None, first
        changed |= dropped


def _overridden_keys(problem: RecipeProblem, changed: Set[KeyPath]) -> list[KeyPath]:
    """The key that is idle, if it was not changed and one that decides was."""
    idle, *deciding = problem.paths
    leaves = problem.idle and not _is_changed(idle, changed)
    return [idle] if leaves and any(_is_changed(path, changed) for path in deciding) else []


def _is_changed(path: KeyPath, changed: Set[KeyPath]) -> bool:
    """Whether this key was changed, or a table that it is in."""
    return any(path[:depth] in changed for depth in range(1, len(path) + 1))


def _remove_key(values: Any, path: KeyPath) -> bool:
    """Remove a key; false if it is not there."""
    for part in path[:-1]:
        values = values.get(part) if isinstance(values, dict) else None
    return isinstance(values, dict) and values.pop(path[-1], None) is not None


def _apply_overrides(
    values: dict[str, Any], overrides: Sequence[str], changed: dict[KeyPath, str]
) -> list[RecipeProblem]:
    """Apply the overrides; `changed` learns which key came from which."""
    if isinstance(values.get("strategy"), str) and overrides:
        with suppress(StrategyError):  # validation reports it, with its place
            values["strategy"] = dict(Strategy.parse(values["strategy"]))
    problems = []
    for text in overrides:
        path, problem = apply_override(values, text)
        rival = _EXCLUSIVE_KEYS.get(path)
        if rival is not None and values.get(str(path[0])) is not None:
            values.pop(rival, None)
        changed[path] = f"--set {text}"
        if problem:
            problems.append(problem)
    return problems


def _read_text(path: Path) -> str:
    try:
        if path.exists() and not path.is_file():  # a pipe or a device may have no end
            raise OSError(errno.EINVAL, "it is no file")
        if path.stat().st_size > _MAX_RECIPE_BYTES:
            raise OSError(errno.EFBIG, f"it has more than {_MAX_RECIPE_BYTES} bytes")
        return path.read_text(encoding="utf-8-sig")
    except UnicodeDecodeError as error:
        raise RecipeError("the recipe is not UTF-8 text", where=f"{path}, byte {error.start}") from None
    except OSError as error:
        near = closest_word(path.name, (other.name for other in path.parent.glob("*.toml")))
        advice = f"did you mean {path.parent / near}?" if near else "give the path of a TOML file"
        raise RecipeError(
            f"cannot read the recipe: {error.strerror}", where=str(path), next_step=advice
        ) from None


def _parse(text: str, name: str) -> dict[str, Any]:
    try:
        return parse_toml(text)
    except tomllib.TOMLDecodeError as error:
        raise _syntax_error(str(error), text, name) from None


def _syntax_error(message: str, text: str, name: str) -> RecipeError:
    """The error of tomllib, with the line that it means and what is most often wrong there."""
    lines = text.splitlines()
    found = re.search(r"at line (\d+), column (\d+)", message)
    line = int(found[1]) if found else len(lines)
    what = re.sub(r" \(at .*\)$", "", message)
    shown = lines[line - 1].strip() if 0 < line <= len(lines) else ""
    return RecipeError(
        f"not TOML: {what}" + (f", in: {shown}" if shown else ""),
        where=f"{name}, line {line}",
        next_step='text is quoted (task = "digits"), true and false are lower case, a key stands once',
    )


def _locator(name: str, text: str, changed: Mapping[KeyPath, str]) -> KeyLocator:
    """Say where a key was written: the override that set it, else its line, else the line of its table."""
    lines = {path: f"{name}, line {line}" for path, line in locate_keys(text).items()}
    inside = {path[:depth]: place for path, place in changed.items() for depth in range(1, len(path))}

    def locate(paths: Sequence[KeyPath]) -> str:
        own = [place for path in paths for place in _enclosing_places(path, changed)]
        exact = [lines[path] for path in paths if path in lines]
        above = [place for path in paths for place in _enclosing_places(path, {**inside, **lines})]
        return next(iter((*own, *exact, *above)), name)

    return locate


def _enclosing_places(path: KeyPath, places: Mapping[KeyPath, str]) -> Iterator[str]:
    """The places of a key and of the tables around it, from the inside out."""
    for depth in range(len(path), 0, -1):
        if path[:depth] in places:
            yield places[path[:depth]]
