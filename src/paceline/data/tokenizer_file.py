"""The files of a tokenizer, here or behind a URL, if nothing in them would reserve memory without end.

A folder as model hubs have them holds a `tokenizer.json`, and beside it a `tokenizer_config.json` that says
which token ends a text.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from fsspec.core import url_to_fs

TOKENIZER = "tokenizer.json"
_CONFIG = "tokenizer_config.json"
_MOST_BYTES = 2**28
_MOST_TOKENS = 2**24


def in_folder(place: str) -> tuple[str, str | None]:
    """Where the tokenizer.json is, and its tokenizer_config.json; None: a file was named, not a folder."""
    is_folder = Path(place).is_dir() if "://" not in place else not place.partition("?")[0].endswith(".json")
    if not is_folder:
        return place, None
    folder = place.rstrip("/")
    return f"{folder}/{TOKENIZER}", f"{folder}/{_CONFIG}"


def end_of_text(config: str | None) -> str | None:
    """The token that ends a text, as the folder says; None: it does not.

    Raises:
        OSError: it cannot be read. ValueError: it is no such file.
    """
    try:
        found = json.loads(_read(config)) if config else {}
    except FileNotFoundError:
        return None
    except RecursionError:
        raise ValueError(f"{_CONFIG} is nested too deeply") from None
    token = _under("eos_token", found)
    token = _under("content", token) or token
    return token if type(token) is str else None


def _under(key: str, value: Any) -> Any:
    return value.get(key) if type(value) is dict else None


def read_checked(place: str) -> str:
    """Read a tokenizer.json.

    Args:
        place: a path or a URL.
    Raises:
        OSError: it cannot be read.
        ValueError: it is no text, no JSON, or has token ids that no vocabulary has.
    """
    text = _read(place)
    try:
        _check_ids(json.loads(text))
    except RecursionError:
        raise ValueError("it is nested too deeply") from None
    return text


def _read(place: str) -> str:
    if "://" in place:
        filesystem, path = url_to_fs(place)
        with filesystem.open(path, "rb") as stream:
            found = bytes(stream.read(_MOST_BYTES + 1))
    else:
        if Path(place).exists() and not Path(place).is_file():
            raise OSError("it is no regular file")
        with Path(place).open("rb") as file:
            found = file.read(_MOST_BYTES + 1)
    if len(found) > _MOST_BYTES:
        raise ValueError(f"it has more than {_MOST_BYTES} bytes")
    return found.decode()


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
