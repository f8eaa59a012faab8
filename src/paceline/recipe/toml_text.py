"""TOML that anybody may have written, as plain values: every way in which it can be wrong is one error."""

from __future__ import annotations

import tomllib
from typing import Any

_MOST_DEEP = 32
_LARGEST = 2**1000  # what is larger is no float any more


def parse_toml(text: str) -> dict[str, Any]:
    """Read a document.

    Raises:
        tomllib.TOMLDecodeError: it is none, is nested too deeply, or has a number that is too large.
    """
    try:
        values = tomllib.loads(text)
    except RecursionError:
        raise tomllib.TOMLDecodeError("it is nested too deeply") from None
    except tomllib.TOMLDecodeError:
        raise
    except ValueError as error:  # an integer of thousands of digits, a date that is none
        raise tomllib.TOMLDecodeError(f"a value is impossible: {str(error)[:80]}") from None
    _check(values)
    return values


def _check(values: dict[str, Any]) -> None:
    level: list[Any] = [values]
    for _ in range(_MOST_DEEP):
        inside: list[Any] = []
        for one in level:
            if isinstance(one, dict):
                inside += one.values()
            elif isinstance(one, list):
                inside += one
            elif type(one) is int and not -_LARGEST <= one < _LARGEST:
                raise tomllib.TOMLDecodeError("an integer has hundreds of digits")
        level = inside
    if level:
        raise tomllib.TOMLDecodeError(f"it is nested more than {_MOST_DEEP} deep")
