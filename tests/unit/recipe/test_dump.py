"""A resolved recipe is read back as an equal one."""

from __future__ import annotations

import random
import tomllib
from datetime import UTC, date, datetime, time
from pathlib import Path
from typing import Any

import pytest

from paceline.recipe import Recipe, load_recipe, to_toml

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
        "\n[options]\nlayers = [8, 4]\n\n[batch]\nsize = 32\n"
    )
    assert "\nbucket_bytes = 16777216\n" in text
