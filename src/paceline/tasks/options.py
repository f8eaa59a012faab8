"""Typed options of the shipped tasks: tables like those of a recipe, with the same errors."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, TypeVar

from paceline.recipe.spell import KeyPath, spell_path
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
