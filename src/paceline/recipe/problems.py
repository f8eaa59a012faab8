"""From what validation found to one error that a user can act on.

Invariant: every problem names its key, what was expected and what was found; all problems of a recipe
come in one message. Where a key stands (file and line, override, Python call) is the caller's answer.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

from pydantic import BaseModel, ValidationError
from pydantic_core import ErrorDetails, PydanticCustomError

from paceline.errors import RecipeError
from paceline.recipe.expect import choices_at, expected_at, keys_at, known_keys
from paceline.recipe.spell import KeyPath, nearest, spell_found, spell_path


class Problem(NamedTuple):
    """One thing that is wrong.

    Args:
        paths: the keys that are involved, the one to change first.
        message: what was expected and what was found.
        idle: the first key is right, but cannot act.
    """

    paths: tuple[KeyPath, ...]
    message: str
    idle: bool = False


class Conflict(NamedTuple):
    """Keys, dotted from one table on, that are right alone and wrong together; the one to change first.

    Args:
        idle: nothing is wrong but that the first cannot act.
    """

    fields: tuple[str, ...]
    message: str
    idle: bool = False


Locate = Callable[[Sequence[KeyPath]], str]  # keys -> where the first of them was written


def refused(message: str) -> PydanticCustomError:
    """The error that a validator raises to be shown word for word."""
    return PydanticCustomError("refused", "{message}", {"message": message})


def in_conflict(conflicts: Sequence[Conflict]) -> PydanticCustomError:
    """The error that a table raises for its conflicts."""
    return PydanticCustomError("conflicts", "fields do not agree", {"conflicts": tuple(conflicts)})


def found_instead(expectation: str, value: Any, words: Sequence[str] = ()) -> str:
    """Say what was expected and found, and which of `words` is near."""
    message = f"expected {expectation}, found {spell_found(value)}"
    near = nearest(value, words) if isinstance(value, str) else None
    return f'{message}; did you mean "{near}"?' if near else message


def problems_of(error: ValidationError, model: type[BaseModel]) -> Iterator[Problem]:
    """The problems in what pydantic reports about `model`."""
    for item in error.errors(include_url=False):
        yield from _READERS.get(item["type"], _wrong_value)(item, model)


def recipe_error(problems: Sequence[Problem], locate: Locate, kind: type[RecipeError]) -> RecipeError:
    """One error for all problems, with the place of each.

    Args:
        problems: at least one.
        locate: says where the keys of a problem were written.
        kind: the class of the error.
    """
    if len(problems) == 1:
        problem = problems[0]
        return kind(_line(problem), where=locate(problem.paths))
    lines = [f"{locate(problem.paths)}: {_line(problem)}" for problem in problems]
    return kind("\n  ".join([f"{len(lines)} errors:", *lines]))


def _line(problem: Problem) -> str:
    key = spell_path(problem.paths[0])
    return f"{key}: {problem.message}" if key else problem.message


def _wrong_value(item: ErrorDetails, model: type[BaseModel]) -> Iterator[Problem]:
    path, value = item["loc"], item["input"]
    message = found_instead(expected_at(model, path), value, choices_at(model, path))
    if item["type"] == "int_type" and isinstance(value, float) and value.is_integer():
        message += f"; write {int(value)}"
    yield Problem((path,), message)


def _no_text(item: ErrorDetails, model: type[BaseModel]) -> Iterator[Problem]:
    """A name of a file or folder that is not UTF-8, or that the locale of this process cannot say."""
    found = spell_found(item["input"])
    yield Problem((item["loc"],), f"expected text in UTF-8, found {found}; rename it, or set PYTHONUTF8=1")


def _missing(item: ErrorDetails, model: type[BaseModel]) -> Iterator[Problem]:
    path = item["loc"]
    yield Problem((path,), f"expected {expected_at(model, path)}, but it is missing")


def _unknown_key(item: ErrorDetails, model: type[BaseModel]) -> Iterator[Problem]:
    path = item["loc"]
    keys = keys_at(model, path[:-1])
    near = _meant(path, keys, model)
    advice = f"did you mean {near}?" if near else f"expected one of {', '.join(keys)}"
    yield Problem((path,), f"unknown key, found {spell_found(item['input'])}; {advice}")


def _meant(path: KeyPath, keys: Sequence[str], model: type[BaseModel]) -> str | None:
    """The key that was meant: in the same table, else of the same name anywhere, else of a near spelling."""
    known = tuple(known_keys(model))
    near = nearest(str(path[-1]), keys)
    if near:
        return spell_path((*path[:-1], near))
    elsewhere = [key for key in known if key.rpartition(".")[2] == path[-1]]
    return elsewhere[0] if elsewhere else nearest(str(path[-1]), known)


def _refused(item: ErrorDetails, model: type[BaseModel]) -> Iterator[Problem]:
    yield Problem((item["loc"],), item["msg"])


def _conflicts(item: ErrorDetails, model: type[BaseModel]) -> Iterator[Problem]:
    for fields, message, idle in item["ctx"]["conflicts"]:
        yield Problem(tuple((*item["loc"], *field.split(".")) for field in fields), message, idle)


_READERS = {
    "extra_forbidden": _unknown_key,
    "missing": _missing,
    "string_unicode": _no_text,
    "refused": _refused,
    "conflicts": _conflicts,
}
