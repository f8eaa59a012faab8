"""Values that a task takes as options: only what TOML can hold, so that a run can write its recipe down.

Invariant: the result shares nothing mutable with what was given; subclasses become the plain type and tuples
become lists, so that Python and a file give a task the same values.
"""

from __future__ import annotations

from datetime import date, time
from functools import singledispatch
from typing import Any

from paceline.recipe.problems import refused
from paceline.recipe.spell import spell_key


@singledispatch
def plain(value: Any, key: str) -> Any:
    """Copy a value.

    Args:
        value: strings, bools, numbers, dates, and lists, tuples and dicts of these.
        key: where the value stands, for the message.
    Raises:
        PydanticCustomError: TOML cannot hold it.
    """
    raise refused(f"expected values that TOML can hold, found {type(value).__name__} at {key}")


@plain.register
def _plain_bool(value: bool, key: str) -> bool:
    return value


@plain.register
def _plain_int(value: int, key: str) -> int:
    return int(value)


@plain.register
def _plain_float(value: float, key: str) -> float:
    return float(value)


@plain.register
def _plain_text(value: str, key: str) -> str:
    return str.__str__(value)


@plain.register(date)
@plain.register(time)
def _plain_date(value: date | time, key: str) -> date | time:
    return value


@plain.register(list)
@plain.register(tuple)
def _plain_list(value: list[Any] | tuple[Any, ...], key: str) -> list[Any]:
    return [plain(item, f"{key}[{index}]") for index, item in enumerate(value)]


@plain.register
def _plain_table(value: dict, key: str) -> dict[str, Any]:
    return {_name(name, key): plain(item, f"{key}.{spell_key(str(name))}") for name, item in value.items()}


def _name(name: Any, key: str) -> str:
    if not isinstance(name, str):
        raise refused(f"expected strings as keys, found {name!r} in {key}")
    return name
