"""Every key of a TOML text is found on its line."""

from __future__ import annotations

import random
import tomllib
from collections.abc import Iterator
from datetime import UTC, date, datetime, time
from pathlib import Path
from typing import Any

import pytest

from paceline.recipe import Recipe, load_recipe, to_toml
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


OPTIONS: dict[str, Any] = {
    "text": 'a "quoted" \\ line\nand a tab\t, \x7f, \x01, é, 😀',
    "key with space.and dot": 1,
    "numbers": [1, -2.5e-30, 1e300, float("inf"), 10**30],
    "nested": {"empty": {}, "none": [], "list of tables": [{"a": 1}, {"b": [True, False]}]},
    "dates": [date(2024, 2, 29), datetime(2024, 2, 29, 12, 30, tzinfo=UTC), time(1, 2, 3)],
}


def draw(rng: random.Random) -> Recipe:
    length: dict[str, Any] = rng.choice([{"steps": rng.randint(1, 10**6)}, {"epochs": rng.uniform(0.1, 9.0)}])
    name = rng.choice(["adamw", "adam", "sgd", "rmsprop"])
    optimizer: dict[str, Any] = {"name": name, "lr": rng.uniform(0, 1), "clip_norm": rng.choice([None, 1.5])}
    optimizer |= {"adamw": {"weight_decay": 0.1}, "sgd": {"momentum": 0.9, "nesterov": True}}.get(
        name, {"l2": 1e-4}
    )
    values: dict[str, Any] = {
        "task": rng.choice(["digits", 'odd "name".py:build']),
        "options": rng.choice([{}, OPTIONS]),
        "run_dir": rng.choice([None, "C:\\runs\\1"]),
        "batch": {"size": rng.randint(8, 99), "reduction": rng.choice(["mean", "sum"])},
        "optimizer": optimizer,
        "schedule": rng.choice([{}, {"decay": "cosine", "cycle_steps": 7}, {"warmup_steps": 3}]),
        "runtime": {"deadline_seconds": rng.uniform(1, 100)},
        "strategy": rng.choice(["ddp", "replicas=2 sync=diloco:50 codec=topk:0.01+int8", "hsdp"]),
    }
    return Recipe(**values, **length)


@pytest.mark.parametrize("seed", range(60))
def test_a_dump_is_read_back_as_an_equal_recipe(seed: int, tmp_path: Path) -> None:
    recipe = draw(random.Random(seed))
    path = tmp_path / "resolved.toml"
    path.write_text(to_toml(recipe), encoding="utf-8")
    again = load_recipe(path)
    assert again == recipe
    assert to_toml(again) == to_toml(recipe)


def test_a_dump_shows_every_field_that_is_not_none() -> None:
    recipe = Recipe(task="digits", steps=3)
    values = tomllib.loads(to_toml(recipe))
    for name, value in recipe.model_dump().items():
        if isinstance(value, dict):
            shown = {key for key, item in value.items() if item is not None}
            assert set(values.get(name, {})) == shown
        else:
            assert (name in values) == (value is not None)
    assert "epochs" not in values and "clip_norm" not in values["optimizer"] and "options" not in values


def test_the_text_of_a_dump() -> None:
    text = to_toml(Recipe(task="digits", epochs=2, options={"layers": [8, 4]}))
    assert text.startswith(
        'task = "digits"\nseed = 1\nepochs = 2.0\n'
        'reproducible = false\nhash_every = 0\non_divergence = "stop"\n'
        '\n[options]\nlayers = [8, 4]\n\n[rl]\nalgorithm = "ppo"\n'
    )
    assert "}\n\n[batch]\nsize = 32\n" in text
    assert "\nbucket_bytes = 16777216\n" in text
