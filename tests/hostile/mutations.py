"""Values like those of a pool, thousands a second: parts are exchanged, left out, doubled and damaged.

Hypothesis draws the pool from the grammar of a format, some hundred values a second; what it has drawn is
changed here, by its type alone, and mixed. A value keeps its type, and so do the parts of a tuple.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping, Sequence
from typing import Any

_NUMBERS = (0, 1, -1, 2, 3, 7, 255, 2**31, 2**32 - 1, 2**53, 2**63, 2**64, 10**30, 1e308, float("nan"))
_LETTERS = '\x00\n"\\{}[]=.,:/-+eE09aé東\ud800'
_MOST_BYTES, _MOST_ITEMS = 1 << 16, 64


def havoc(chance: random.Random, pool: Sequence[Any], part: int | None = None) -> Any:
    """A new value of the type of those of the pool.

    Args:
        part: of a tuple, the only one that may change; None: all may.
    """
    value = chance.choice(pool)
    for _ in range(chance.choice((1, 1, 2, 4))):
        other = chance.choice(pool)
        if part is None:
            value = _changed(chance, value, other)
        else:
            value = (*value[:part], _changed(chance, value[part], other[part]), *value[part + 1 :])
    return value


def _changed(chance: random.Random, value: Any, other: Any) -> Any:
    """The value with one change; `other` gives parts, where it is of the same type."""
    if isinstance(value, tuple):
        i = chance.randrange(len(value))
        part = other[i] if isinstance(other, tuple) and len(other) == len(value) else value[i]
        return (*value[:i], _changed(chance, value[i], part), *value[i + 1 :])
    change = _CHANGES.get(type(value), _leaf)
    return change(chance, value, other if type(other) is type(value) else value)


def _bytes(chance: random.Random, value: bytes | bytearray, other: bytes | bytearray) -> Any:
    out = bytearray(value)
    i, size = chance.randrange(len(out) + 1), chance.choice((1, 1, 2, 4, 8, chance.randrange(1, 65)))
    match chance.randrange(6):
        case 0 if i < len(out):
            out[i] ^= 1 << chance.randrange(8)
        case 1:
            del out[i : i + size]
        case 2:
            out[i:i] = chance.randbytes(size)
        case 3:
            out[i : i + size] = chance.choice((b"\x00", b"\xff", b"\x7f", b"9", b"[", b'"')) * size
        case 4:
            out[i:i] = out[i : i + size] * chance.choice((1, 2, 50))
        case _:
            j = chance.randrange(len(other) + 1)
            out[i:] = other[j:]
    return type(value)(out[:_MOST_BYTES])


def _text(chance: random.Random, value: str, other: str) -> str:
    i, j = chance.randrange(len(value) + 1), chance.randrange(len(other) + 1)
    match chance.randrange(4):
        case 0:
            new = value[:i] + chance.choice(_LETTERS) * chance.choice((1, 1, 3, 40)) + value[i:]
        case 1:
            new = value[:i] + value[i + chance.randrange(1, 9) :]
        case 2:
            new = value[:i] + str(chance.choice(_NUMBERS)) + value[i:]
        case _:
            new = value[:i] + other[j:]
    return new[:_MOST_BYTES]


def _list(chance: random.Random, value: list[Any], other: list[Any]) -> list[Any]:
    out, i = list(value), chance.randrange(len(value) + 1)
    if i == len(out) or not chance.randrange(6):
        out[i:i] = other[: chance.randrange(4)] or [_any(chance)]
    elif not chance.randrange(5):
        del out[i]
    else:
        out[i] = _changed(chance, out[i], chance.choice(other) if other else out[i])
    return out[:_MOST_ITEMS]


def _dict(chance: random.Random, value: dict[Any, Any], other: dict[Any, Any]) -> dict[Any, Any]:
    out = dict(value)
    key = chance.choice([*out, *other, "more"])
    if key not in out or not chance.randrange(6):
        out[key] = other.get(key, _any(chance))
    elif not chance.randrange(5):
        del out[key]
    else:
        out[key] = _changed(chance, out[key], other.get(key, out[key]))
    return out


def _leaf(chance: random.Random, value: Any, other: Any) -> Any:
    return chance.choice((other, _any(chance), -value if isinstance(value, float) else value))


def _any(chance: random.Random) -> Any:
    """A leaf, or nothing but brackets."""
    return chance.choice((None, True, "", "x", "../../x", [], {}, [[]], *_NUMBERS))


_CHANGES: Mapping[type, Callable[..., Any]] = {
    bytes: _bytes,
    bytearray: _bytes,
    str: _text,
    list: _list,
    dict: _dict,
}
