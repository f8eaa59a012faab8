"""Quantities as people write them: "100mbit", "2ms", "64mb", "0.1%". Pure.

Invariant: a quantity without a unit that could be misread is an error, never a guess.
"""

from __future__ import annotations

import re
from collections.abc import Mapping

from paceline.errors import RecipeError

_NUMBER = re.compile(r"(?P<number>\d+(?:\.\d+)?)\s*(?P<unit>[a-z%]*)")
_RATES = {"bit": 1.0, "kbit": 1e3, "mbit": 1e6, "gbit": 1e9}
_TIMES = {"us": 1e-6, "ms": 1e-3, "s": 1.0}
_SIZES = {"b": 1.0, "kb": 1024.0, "mb": 1024.0**2, "gb": 1024.0**3}
_SHARES = {"%": 0.01}


def rate_bits(text: str) -> float:
    """Bits per second of "10mbit"; 0 for the empty text, which means unlimited."""
    return _parse(text, _RATES, "a rate, for example 100mbit or 1gbit")


def duration_seconds(text: str) -> float:
    """Seconds of "500us", "2ms" or "1.5s"; 0 for the empty text."""
    return _parse(text, _TIMES, "a time, for example 500us or 2ms")


def size_bytes(text: str) -> int:
    """Bytes of "64mb", in powers of 1,024; 0 for the empty text."""
    return int(_parse(text, _SIZES, "a size, for example 64mb"))


def share(text: str) -> float:
    """The fraction that "0.1%" stands for; 0 for the empty text."""
    found = _parse(text, _SHARES, "a share, for example 0.1%")
    if found > 1:
        raise RecipeError(f"'{text}' is more than everything", next_step="a share is at most 100%")
    return found


def _parse(text: str, units: Mapping[str, float], expected: str) -> float:
    if not text:
        return 0.0
    found = _NUMBER.fullmatch(text.strip().lower())
    if found is None or found["unit"] not in units:
        raise RecipeError(f"'{text}' is not {expected}", next_step=f"known units: {', '.join(units)}")
    return float(found["number"]) * units[found["unit"]]
