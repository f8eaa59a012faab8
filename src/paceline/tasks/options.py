"""Typed options of the shipped tasks: tables like those of a recipe, with the same errors."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Annotated, Any, TypeVar

from pydantic import PlainValidator

from paceline.recipe.problems import refused
from paceline.recipe.spell import KeyPath, spell_found, spell_path
from paceline.recipe.strict import Table

Options = TypeVar("Options", bound=Table)


def read_options(kind: type[Options], options: Mapping[str, Any]) -> Options:
    """Check the options that a recipe gives to its task.

    Raises:
        RecipeError: an option is unknown, of the wrong type or impossible; names each, and the nearest
            right spelling.
    """
    return kind.read(dict(options), _place)


def _place(paths: Sequence[KeyPath]) -> str:
    return f"options.{spell_path(paths[0])}"


def _widths(value: Any) -> tuple[int, ...]:
    if isinstance(value, (list, tuple)) and all(type(width) is int and width > 0 for width in value):
        return tuple(value)
    raise refused(f"expected a list of integers >= 1, found {spell_found(value)}")


def _strings(value: Any) -> tuple[str, ...]:
    strings = [value] if isinstance(value, str) else value
    if isinstance(strings, (list, tuple)) and strings and all(isinstance(text, str) for text in strings):
        return tuple(strings)
    raise refused(f"expected a string or a list of strings, found {spell_found(value)}")


Widths = Annotated[tuple[int, ...], PlainValidator(_widths)]
Strings = Annotated[tuple[str, ...], PlainValidator(_strings)]
