"""TOML text: writing values and keys, reading documents, and finding the line of each key.

Invariant: `tomllib` reads what `toml_value` writes as an equal value. A document that cannot be read is one
error, whatever is wrong with it. For text that `tomllib` accepts, every key that it returns has a line; only
the structure is parsed here, and `tomllib` reads the values. This module knows nothing of recipes.
"""

from __future__ import annotations

import json
import re
import tomllib
from collections.abc import Iterable, Mapping
from datetime import date, time
from functools import singledispatch
from typing import Any, NamedTuple

KeyPath = tuple[str | int, ...]  # ("optimizer", "betas", 0) is optimizer.betas[0]

_BARE_KEY = re.compile(r"[A-Za-z0-9_-]+")
_MAX_SHOWN = 60  # characters of a value that an error message shows


@singledispatch
def toml_value(value: Any) -> str:
    """Write one value as TOML on one line.

    Args:
        value: a string, bool, int, float, date or time, or lists, tuples and mappings of these.
    Raises:
        TypeError: TOML has no such value.
    """
    raise TypeError(f"TOML has no {type(value).__name__}")


@toml_value.register
def _bool_value(value: bool) -> str:
    return "true" if value else "false"


@toml_value.register(int)
@toml_value.register(float)
def _number_value(value: float) -> str:
    return repr(value)


@toml_value.register
def _text_value(value: str) -> str:
    return json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007f")


@toml_value.register(date)
@toml_value.register(time)
def _date_value(value: date | time) -> str:
    return value.isoformat()


@toml_value.register(list)
@toml_value.register(tuple)
def _list_value(value: Iterable[Any]) -> str:
    return "[" + ", ".join(toml_value(item) for item in value) + "]"


@toml_value.register(Mapping)
def _table_value(value: Mapping[str, Any]) -> str:
    return "{" + ", ".join(f"{toml_key(name)} = {toml_value(item)}" for name, item in value.items()) + "}"


def toml_key(name: str) -> str:
    """Write one part of a key: bare where TOML allows it, else in quotes."""
    return name if _BARE_KEY.fullmatch(name) else toml_value(name)


def dotted_key(path: KeyPath) -> str:
    """Write a whole key: `optimizer.betas[0]`; the empty path is empty."""
    text = "".join(f"[{part}]" if isinstance(part, int) else f".{toml_key(part)}" for part in path)
    return text.removeprefix(".")


def shown_value(value: Any) -> str:
    """Return a text for an unexpected value in an error message; long values are shortened."""
    if isinstance(value, Mapping):
        return "a table"
    try:
        text = toml_value(value)
    except TypeError:
        text = repr(value)
    return text if len(text) <= _MAX_SHOWN else text[: _MAX_SHOWN - 3] + "..."


def closest_word(word: str, words: Iterable[str]) -> str | None:
    """Return the one of `words` that is most similar to `word`, or None if none is close."""
    from difflib import get_close_matches  # only an error needs it

    folded = {other.lower().replace("-", "_"): other for other in words}
    matches = get_close_matches(word.lower().replace("-", "_"), folded, n=1)
    return folded[matches[0]] if matches else None


_MAX_DEPTH = 32
_MAX_INTEGER = 2**1000  # larger numbers cannot be converted to float


def parse_toml(text: str) -> dict[str, Any]:
    """Read a document.

    Raises:
        tomllib.TOMLDecodeError: it is not valid TOML, is nested too deeply, or has too large a number.
    """
    try:
        values = tomllib.loads(text)
    except RecursionError:
        raise tomllib.TOMLDecodeError("it is nested too deeply") from None
    except tomllib.TOMLDecodeError:
        raise
    except ValueError as error:  # an integer of thousands of digits, a date that is none
        raise tomllib.TOMLDecodeError(f"a value is impossible: {str(error)[:80]}") from None
    _check_limits(values)
    return values


def _check_limits(values: dict[str, Any]) -> None:
    level: list[Any] = [values]
    for _ in range(_MAX_DEPTH):
        inside: list[Any] = []
        for item in level:
            if isinstance(item, dict):
                inside += item.values()
            elif isinstance(item, list):
                inside += item
            elif type(item) is int and not -_MAX_INTEGER <= item < _MAX_INTEGER:
                raise tomllib.TOMLDecodeError("an integer has hundreds of digits")
        level = inside
    if level:
        raise tomllib.TOMLDecodeError(f"it is nested more than {_MAX_DEPTH} deep")


_TOKEN = re.compile(
    r'''
      (?P<string> """(?:\\.|[^\\])*?"""(?!") | \'\'\'.*?\'\'\'(?!') | "(?:\\.|[^"\\\n])*" | '[^'\n]*' )
    | (?P<skip>   [^\S\n]+ | \#[^\n]* )
    | (?P<end>    \n )
    | (?P<mark>   [\[\]{}=,.] )
    | (?P<bare>   [^\s"'\#\[\]{}=,.]+ )
    ''',
    re.VERBOSE | re.DOTALL,
)


class _Token(NamedTuple):
    kind: str
    text: str
    line: int


def locate_keys(text: str) -> dict[KeyPath, int]:
    """Find every key of a valid TOML text.

    Returns:
        Key path to line, counted from 1: for tables the line of the first header that names it, for
        entries of arrays the line where the entry begins.
    """
    reader = _LineFinder(_tokens(text))
    while reader.more():
        reader.statement()
    return reader.lines


def _tokens(text: str) -> list[_Token]:
    line, tokens = 1, []
    for match in _TOKEN.finditer(text):
        if match.lastgroup != "skip":
            tokens.append(_Token(match.lastgroup or "", match.group(), line))
        line += match.group().count("\n")
    return [*tokens, _Token("end", "", line)]


class _LineFinder:
    """A recursive-descent parser over tokens; `lines` is the result so far."""

    def __init__(self, tokens: list[_Token]) -> None:
        self.lines: dict[KeyPath, int] = {}
        self._tokens = tokens
        self._at = 0
        self._table: KeyPath = ()
        self._num_entries: dict[KeyPath, int] = {}  # of arrays of tables

    def more(self) -> bool:
        return self._at < len(self._tokens)

    def statement(self) -> None:
        token = self._tokens[self._at]
        if token.kind == "end":
            self._at += 1
        elif token.text == "[":
            self._header()
        else:
            self._pair(self._table)

    def _next(self) -> _Token:
        self._at += 1
        return self._tokens[self._at - 1]

    def _peek(self) -> str:
        return self._tokens[self._at].text

    def _header(self) -> None:
        line = self._next().line
        many = self._peek() == "["
        if many:
            self._next()
        path: KeyPath = ()
        for part in self._key():
            path = self._newest((*path, part))
            self.lines.setdefault(path, line)
        for _ in range(2 if many else 1):
            self._next()
        if many:
            path = path if isinstance(path[-1], str) else path[:-1]
            path = (*path, self._num_entries.setdefault(path, 0))
            self._num_entries[path[:-1]] += 1
            self.lines[path] = line
        self._table = path

    def _newest(self, path: KeyPath) -> KeyPath:
        """Return a path, extended by the newest entry if it names an array of tables."""
        count = self._num_entries.get(path)
        return path if count is None else (*path, count - 1)

    def _key(self) -> list[str]:
        parts = [self._part(self._next())]
        while self._peek() == ".":
            self._next()
            parts.append(self._part(self._next()))
        return parts

    def _part(self, token: _Token) -> str:
        return next(iter(tomllib.loads(f"{token.text} = 0")))

    def _pair(self, table: KeyPath) -> None:
        line = self._tokens[self._at].line
        path = table
        for part in self._key():
            path = (*path, part)
            self.lines.setdefault(path, line)
        self._next()  # the equals sign
        self._value(path)

    def _value(self, path: KeyPath) -> None:
        opener = self._peek()
        if opener == "[":
            self._array(path)
        elif opener == "{":
            self._inline_table(path)
        else:
            while self._peek() not in (",", "]", "}") and self._tokens[self._at].kind != "end":
                self._next()

    def _array(self, path: KeyPath) -> None:
        self._next()
        index = 0
        while self._skip_breaks() != "]":
            self.lines[(*path, index)] = self._tokens[self._at].line
            self._value((*path, index))
            index += 1
            if self._skip_breaks() == ",":
                self._next()
        self._next()

    def _inline_table(self, path: KeyPath) -> None:
        self._next()
        while self._skip_breaks() != "}":
            self._pair(path)
            if self._skip_breaks() == ",":
                self._next()
        self._next()

    def _skip_breaks(self) -> str:
        while self._tokens[self._at].kind == "end":
            self._next()
        return self._peek()
