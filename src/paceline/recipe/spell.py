"""How values and keys are spelled: in TOML, in error messages, and which word was probably meant.

Invariant: what `spell` writes, `tomllib` reads back as an equal value. Nothing here knows recipes.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping
from datetime import date, time
from functools import singledispatch
from typing import Any

KeyPath = tuple[str | int, ...]  # ("optimizer", "betas", 0) is optimizer.betas[0]

_BARE = re.compile(r"[A-Za-z0-9_-]+")
_LONGEST = 60  # characters of a value that an error message shows


@singledispatch
def spell(value: Any) -> str:
    """Write one value as TOML on one line.

    Args:
        value: a string, bool, int, float, date or time, or lists, tuples and mappings of these.
    Raises:
        TypeError: TOML has no such value.
    """
    raise TypeError(f"TOML has no {type(value).__name__}")


@spell.register
def _spell_bool(value: bool) -> str:
    return "true" if value else "false"


@spell.register(int)
@spell.register(float)
def _spell_number(value: float) -> str:
    return repr(value)


@spell.register
def _spell_text(value: str) -> str:
    return json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007f")


@spell.register(date)
@spell.register(time)
def _spell_date(value: date | time) -> str:
    return value.isoformat()


@spell.register(list)
@spell.register(tuple)
def _spell_list(value: Iterable[Any]) -> str:
    return "[" + ", ".join(spell(item) for item in value) + "]"


@spell.register(Mapping)
def _spell_table(value: Mapping[str, Any]) -> str:
    return "{" + ", ".join(f"{spell_key(name)} = {spell(item)}" for name, item in value.items()) + "}"


def spell_key(name: str) -> str:
    """Write one part of a key: bare where TOML allows it, else in quotes."""
    return name if _BARE.fullmatch(name) else spell(name)


def spell_path(path: KeyPath) -> str:
    """Write a whole key: `optimizer.betas[0]`; the empty path is empty."""
    text = "".join(f"[{part}]" if isinstance(part, int) else f".{spell_key(part)}" for part in path)
    return text.removeprefix(".")


def spell_found(value: Any) -> str:
    """Write a value that was found in place of another, shortened, whatever it is."""
    if isinstance(value, Mapping):
        return "a table"
    try:
        text = spell(value)
    except TypeError:
        text = repr(value)
    return text if len(text) <= _LONGEST else text[: _LONGEST - 3] + "..."


def nearest(word: str, words: Iterable[str]) -> str | None:
    """The one of `words` that `word` was probably meant to be, or None if none is close."""
    from difflib import get_close_matches  # only an error needs it

    folded = {other.lower().replace("-", "_"): other for other in words}
    found = get_close_matches(word.lower().replace("-", "_"), folded, n=1)
    return folded[found[0]] if found else None
