"""Every key of a TOML text is found on its line."""

from __future__ import annotations

import random
import tomllib
from collections.abc import Iterator
from typing import Any

import pytest

from paceline.recipe.toml_text import KeyPath, locate_keys, toml_key, toml_value

HARD = '''# a comment with [a.header] and key = "value"
"quoted key" = 1
bare = "a # no comment \\" [x] = {"   # a comment
[a . "b.c"] # header
'literal' = 'C:\\path'
x.y."z z" = 1.5
many = [ # open
  1, 2,
  [3, "]"],

  {p = 1, q = [4]},
]
text = """
[not.a.header]
key = "value" \\""" and ""quotes"""""
raw = \'\'\'
x = 1
\'\'\'
when = 1979-05-27 07:32:00.5Z
inline = {one = 1, two.three = "}", "four" = {}}
[[list]]
k = 1
[[list]]
k = 2
[list.sub]
s = -1e-5
[[list.deep]]
d = true
[[list.deep]]
d = false
[after]
last = 0x1F
tricky = ["""a"""", "]",
  7]'''


def paths(value: Any, path: KeyPath = ()) -> Iterator[KeyPath]:
    entries = (
        value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    )
    for name, item in entries:
        yield (*path, name)
        yield from paths(item, (*path, name))


def test_hard_toml() -> None:
    lines = locate_keys(HARD)
    assert set(lines) == set(paths(tomllib.loads(HARD)))
    expected = {
        ("quoted key",): 2,
        ("bare",): 3,
        ("a",): 4,
        ("a", "b.c"): 4,
        ("a", "b.c", "literal"): 5,
        ("a", "b.c", "x", "y", "z z"): 6,
        ("a", "b.c", "many"): 7,
        ("a", "b.c", "many", 1): 8,
        ("a", "b.c", "many", 2, 1): 9,
        ("a", "b.c", "many", 3, "q", 0): 11,
        ("a", "b.c", "text"): 13,
        ("a", "b.c", "raw"): 16,
        ("a", "b.c", "when"): 19,
        ("a", "b.c", "inline", "two", "three"): 20,
        ("list",): 21,
        ("list", 0, "k"): 22,
        ("list", 1): 23,
        ("list", 1, "k"): 24,
        ("list", 1, "sub", "s"): 26,
        ("list", 1, "deep"): 27,
        ("list", 1, "deep", 0, "d"): 28,
        ("list", 1, "deep", 1): 29,
        ("after", "last"): 32,
        ("after", "tricky", 1): 33,
        ("after", "tricky", 2): 34,
    }
    assert {path: lines[path] for path in expected} == expected


def test_windows_line_ends_and_an_empty_text() -> None:
    assert locate_keys("") == {}
    assert locate_keys("# nothing\n\n") == {}
    assert locate_keys("a = 1\r\n[b]\r\nc = 'x'\r\n") == {("a",): 1, ("b",): 2, ("b", "c"): 3}


def value(rng: random.Random, depth: int) -> Any:
    kinds = 6 if depth else 4
    kind = rng.randrange(kinds)
    if kind == 0:
        return rng.randint(-100, 100)
    if kind == 1:
        return rng.uniform(-1, 1) * 10.0 ** rng.randint(-20, 20)
    if kind == 2:
        return rng.random() < 0.5
    if kind == 3:
        return "".join(rng.choice("ab #[]{}=,.\"'\\\n\té😀\x7f\x01") for _ in range(rng.randint(0, 8)))
    if kind == 4:
        return [value(rng, depth - 1) for _ in range(rng.randint(0, 3))]
    return {name(rng): value(rng, depth - 1) for _ in range(rng.randint(0, 3))}


def name(rng: random.Random) -> str:
    return "".join(rng.choice("ab-_ .\"'=#é") for _ in range(rng.randint(0, 4)))


@pytest.mark.parametrize("seed", range(150))
def test_random_tables_are_read_back_and_found(seed: int) -> None:
    rng = random.Random(seed)
    lines: list[str] = []
    expected: dict[KeyPath, int] = {}
    want: dict[str, dict[str, Any]] = {}
    for number in range(rng.randint(1, 6)):
        head = f"t{number}"
        lines += ["# [comment]"] * rng.randint(0, 2) + [f"[{head}]"]
        expected[(head,)] = len(lines)
        want[head] = {name(rng): value(rng, 2) for _ in range(4)}
        for key, item in want[head].items():
            lines.append(f"{toml_key(key)} = {toml_value(item)}  # x = 1")
            expected.update({path: len(lines) for path in paths({key: item}, (head,))})
    text = "\n".join(lines)
    assert tomllib.loads(text) == want
    assert locate_keys(text) == expected
