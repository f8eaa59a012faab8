"""On which line each key of a TOML text stands.

Invariant: for text that `tomllib` accepts, every key that it returns has a line here. This reads only the
structure; values are `tomllib`'s business.
"""

from __future__ import annotations

import re
import tomllib
from typing import NamedTuple

from paceline.recipe.spell import KeyPath

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
    reader = _Reader(_tokens(text))
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


class _Reader:
    """Recursive descent over tokens; `lines` is the result so far."""

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
        """A key that names an array of tables means its newest entry."""
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
