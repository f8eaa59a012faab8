"""Amounts of memory as people write them: "2GiB", "512MiB", or a number of bytes. Pure."""

from __future__ import annotations

import re
from typing import Any

from paceline.recipe.problems import found_instead, refused

EXPECTED = 'bytes, such as "2GiB", "512MiB", "2GB" or 4096'
_WRITTEN = re.compile(r"(\d+(?:\.\d+)?)\s*([kmgt]?i?)b", re.IGNORECASE)
_POWERS = {"": 0, "k": 1, "m": 2, "g": 3, "t": 4}


def as_bytes(value: Any) -> Any:
    """The number of bytes; None, which means that nothing is bounded, stays.

    KiB, MiB, GiB and TiB are powers of 1,024; kB, MB, GB and TB powers of 1,000.
    """
    if value is None or type(value) is int:
        return value
    found = _WRITTEN.fullmatch(value.strip()) if isinstance(value, str) else None
    if found is None:
        raise refused(found_instead(EXPECTED, value))
    prefix = found[2].lower()
    base = 1024 if prefix.endswith("i") else 1000
    if prefix == "i":
        raise refused(found_instead(EXPECTED, value))
    return int(float(found[1]) * base ** _POWERS[prefix.removesuffix("i")])
