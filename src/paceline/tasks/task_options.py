"""Typed options of the shipped tasks: tables like those of a recipe, with the same errors."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Annotated, Any, TypeVar

from pydantic import PlainValidator

from paceline.recipe.toml_text import KeyPath, dotted_key, shown_value
from paceline.recipe.validation import RecipeTable, value_error

OptionsT = TypeVar("OptionsT", bound=RecipeTable)


def read_options(kind: type[OptionsT], options: Mapping[str, Any]) -> OptionsT:
    """Check the options that a recipe gives to its task.

    Raises:
        RecipeError: an option is unknown, of the wrong type or impossible; names each, and the nearest
            right spelling.
    """
    return kind.read(dict(options), _option_path)


def _option_path(paths: Sequence[KeyPath]) -> str:
    return f"options.{dotted_key(paths[0])}"


def _widths(value: Any) -> tuple[int, ...]:
    if isinstance(value, (list, tuple)) and all(type(width) is int and width > 0 for width in value):
        return tuple(value)
    raise value_error(f"expected a list of integers >= 1, found {shown_value(value)}")


def _strings(value: Any) -> tuple[str, ...]:
    strings = [value] if isinstance(value, str) else value
    if isinstance(strings, (list, tuple)) and strings and all(isinstance(text, str) for text in strings):
        return tuple(strings)
    raise value_error(f"expected a string or a list of strings, found {shown_value(value)}")


Widths = Annotated[tuple[int, ...], PlainValidator(_widths)]
Strings = Annotated[tuple[str, ...], PlainValidator(_strings)]
