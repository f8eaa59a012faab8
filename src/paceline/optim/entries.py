"""What an optimizer keeps of one parameter, as tensors and JSON values: also in lists and tables.

A tensor of the parameter's shape, a number or a word stands under its own key. Anything else is a JSON value
that says how it is put together, and its tensors have names of their own: `KEY%0`, `KEY%1`.
Invariant: `join` of what `take_apart` gave is equal to what was taken apart, with the same types.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from torch import Tensor

_PLAIN = (bool, int, float, str, type(None))
_ROWS: Mapping[str, type[Any]] = {"list": list, "tuple": tuple}

Whole = Mapping[str, Any]
Tensors = dict[str, Tensor]


class CannotBeSaved(Exception):
    """Carries the key, and the type of what is there."""


def take_apart(entries: Mapping[Any, Any], suits: Callable[[Tensor], bool]) -> tuple[Tensors, dict[str, Any]]:
    """Tensors and JSON values by name; neither is copied.

    Args:
        suits: whether a tensor is cut as its parameter is; any other gets a name with a number.
    Raises:
        CannotBeSaved: a key is no word, or something is no tensor, number, word, list or table.
    """
    tensors: Tensors = {}
    values: dict[str, Any] = {}
    for key, value in entries.items():
        if not isinstance(key, str):
            raise CannotBeSaved(repr(key), f"under a key of type {type(key).__name__}")
        name = _quoted(key)
        if isinstance(value, Tensor) and suits(value):
            tensors[name] = value
        elif _is_plain(value):
            values[name] = value
        else:
            values[name] = _shape_of(value, name, tensors)
    return tensors, values


def join(names: Mapping[str, Any], place: Callable[[Any], Any]) -> dict[str, Any]:
    """The inverse of `take_apart`.

    Args:
        names: tensors and JSON values.
        place: makes of a tensor what the optimizer shall hold.
    """
    return {
        _unquoted(name): _built(value, names, place) if isinstance(value, Mapping) else place(value)
        for name, value in names.items()
        if not is_numbered(name)
    }


def is_numbered(name: str) -> bool:
    """Whether this is a tensor inside something, or one of a shape of its own."""
    return "%" in name.replace("%25", "").replace("%2F", "")


def tensors_of(shape: Any) -> Iterator[str]:
    """The names of the tensors that a JSON value speaks of."""
    if not isinstance(shape, Mapping):
        return
    if "tensor" in shape:
        yield str(shape["tensor"])
    rows: list[Any] = [*shape.get("list", []), *shape.get("tuple", [])]
    rows += shape["deque"][1] if "deque" in shape else []
    rows += [one for _, one in shape.get("table", [])]
    for one in rows:
        yield from tensors_of(one)


def _shape_of(value: Any, key: str, tensors: Tensors) -> dict[str, Any]:
    """How a container is put together; its tensors are added to the others."""
    if isinstance(value, Tensor):
        name = f"{key}%{sum(other.startswith(f'{key}%') for other in tensors)}"
        tensors[name] = value
        return {"tensor": name}
    if _is_plain(value):
        return {"is": value}
    for word, kind in _ROWS.items():
        if type(value) is kind:
            return {word: [_shape_of(one, key, tensors) for one in value]}
    if type(value) is deque:
        return {"deque": [value.maxlen, [_shape_of(one, key, tensors) for one in value]]}
    if type(value) is dict and all(map(_is_plain, value)):
        return {"table": [[k, _shape_of(one, key, tensors)] for k, one in value.items()]}
    raise CannotBeSaved(_unquoted(key), f"as {type(value).__name__}")


def _built(shape: Whole, names: Mapping[str, Any], place: Callable[[Any], Any]) -> Any:
    if "tensor" in shape:
        return place(names[shape["tensor"]])
    if "is" in shape:
        return shape["is"]
    for word, kind in _ROWS.items():
        if word in shape:
            return kind(_built(one, names, place) for one in shape[word])
    if "deque" in shape:
        longest, rows = shape["deque"]
        return deque((_built(one, names, place) for one in rows), longest)
    return {k: _built(one, names, place) for k, one in shape["table"]}


def _is_plain(value: Any) -> bool:
    return isinstance(value, _PLAIN)


def _quoted(key: str) -> str:
    """Without the characters that names are made of."""
    return key.replace("%", "%25").replace("/", "%2F")


def _unquoted(name: str) -> str:
    return name.replace("%2F", "/").replace("%25", "%")
