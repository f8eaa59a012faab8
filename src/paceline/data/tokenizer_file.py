"""The text of a tokenizer.json, if nothing in it would make the library reserve memory without end."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

_MOST_BYTES = 2**28
_MOST_TOKENS = 2**24


def read_checked(path: Path) -> str:
    """Read the file.

    Raises:
        OSError: it cannot be read.
        ValueError: it is no text, no JSON, or has token ids that no vocabulary has.
    """
    if path.exists() and not path.is_file():
        raise OSError("it is no regular file")
    if path.stat().st_size > _MOST_BYTES:
        raise ValueError(f"it has more than {_MOST_BYTES} bytes")
    text = path.read_text(encoding="utf-8")
    try:
        _check_ids(json.loads(text))
    except RecursionError:
        raise ValueError("it is nested too deeply") from None
    return text


def _check_ids(value: Any) -> None:
    """Ids stand in the vocabulary, in `added_tokens`, and in post-processors: no whole number is larger."""
    level = [value]
    while level:
        inside: list[Any] = []
        for one in level:
            if isinstance(one, dict):
                inside += one.values()
            elif isinstance(one, list):
                inside += one
            elif type(one) is int and not 0 <= one < _MOST_TOKENS:
                raise ValueError(f"it has the number {str(one)[:20]}, which is no token's")
        level = inside
