"""JSON that others may have written or damaged: every way in which it can be wrong is a ValueError."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

_LARGEST = 2**62
_LARGEST_NUMBER = 1e308


def parse(data: bytes | str) -> Any:
    """A JSON value.

    Raises:
        ValueError: it is none, or is nested too deeply.
    """
    try:
        return json.loads(data)
    except RecursionError:
        raise ValueError("it is nested too deeply") from None


def table(value: Any, what: str) -> Mapping[str, Any]:
    """`value`, if it is a table; ValueError otherwise, as in all that follow."""
    if not isinstance(value, dict):
        raise ValueError(f"{what} is no table")
    return value


def fields(value: Any, what: str, names: frozenset[str]) -> Mapping[str, Any]:
    """A table with exactly these keys."""
    found = table(value, what)
    if found.keys() != names:
        odd = sorted(found.keys() ^ names)[0]
        raise ValueError(f"{what} has {'an unknown' if odd in found else 'no'} '{odd[:40]}'")
    return found


def listed(value: Any, what: str) -> list[Any]:
    """A list."""
    if not isinstance(value, list):
        raise ValueError(f"{what} is no list")
    return value


def text(value: Any, what: str) -> str:
    """A text."""
    if not isinstance(value, str):
        raise ValueError(f"{what} is no text")
    return value


def count(value: Any, what: str) -> int:
    """A whole number from 0 on that fits 64 bits."""
    if type(value) is not int or not 0 <= value <= _LARGEST:
        raise ValueError(f"{what} is no count")
    return value


def numeric(value: Any, what: str) -> float | int:
    """A number; not a truth value."""
    if isinstance(value, bool) or not isinstance(value, int | float) or not abs(value) < _LARGEST_NUMBER:
        raise ValueError(f"{what} is no number")
    return value
