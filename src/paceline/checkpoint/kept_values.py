"""What a manifest may say of an optimizer's lists and tables; `paceline.optim.entries` puts them together."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from paceline.checkpoint.strict_json import count, listed, table, text

_DEEPEST = 64


def check_kept(value: Any, name: str) -> None:
    """A number, a word, nothing, or how a list or a table is put together.

    Raises:
        ValueError: it is something else.
    """
    if isinstance(value, Mapping):
        _check_shape(value, name, _DEEPEST)
    else:
        _check_plain(value, name, 0)


def _check_shape(value: Any, name: str, depth: int) -> None:
    found = table(value, name)
    word = next(iter(found), "")
    if len(found) != 1 or word not in _CHECKS or not depth:
        raise ValueError(f"'{name}' of the optimizer is put together in no known way")
    _CHECKS[word](found[word], name, depth - 1)


def _check_plain(value: Any, name: str, depth: int) -> None:
    if not isinstance(value, bool | int | float | str | None):
        raise ValueError(f"'{name}' of the optimizer is no number")


def _check_word(value: Any, name: str, depth: int) -> None:
    text(value, name)


def _check_rows(value: Any, name: str, depth: int) -> None:
    for one in listed(value, name):
        _check_shape(one, name, depth)


def _check_deque(value: Any, name: str, depth: int) -> None:
    longest, rows = _pair(value, name)
    if longest is not None:
        count(longest, name)
    _check_rows(rows, name, depth)


def _check_table(value: Any, name: str, depth: int) -> None:
    for entry in listed(value, name):
        key, one = _pair(entry, name)
        _check_plain(key, name, depth)
        _check_shape(one, name, depth)


def _pair(value: Any, name: str) -> tuple[Any, Any]:
    found = listed(value, name)
    if len(found) != 2:
        raise ValueError(f"'{name}' of the optimizer has {len(found)} where two belong")
    return found[0], found[1]


_CHECKS: Mapping[str, Callable[[Any, str, int], None]] = {
    "tensor": _check_word,
    "is": _check_plain,
    "list": _check_rows,
    "tuple": _check_rows,
    "deque": _check_deque,
    "table": _check_table,
}
