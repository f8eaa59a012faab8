"""Strategies: text, table and object are the same thing."""

from __future__ import annotations

import random
import re
from typing import Any

import pytest

from paceline.errors import StrategyError
from paceline.recipe import PRESETS, Recipe, Strategy
from paceline.recipe.registry import CodecSpec, RouteSpec, ScheduleSpec, SyncSpec, WordSpec, known_specs
from paceline.recipe.registry.route_specs import ChannelSpec


def examples(kind: type[WordSpec]) -> list[str]:
    return [spec.example for spec in known_specs(kind).values()]


def draw(rng: random.Random) -> Strategy:
    """Any valid strategy."""
    return Strategy(
        replicas=rng.choice([None, 1, 2, 7]),
        shard=rng.randint(1, 4),
        zero=rng.randint(0, 3),
        tensor=rng.randint(1, 4),
        pipeline=rng.randint(1, 4),
        context=rng.randint(1, 4),
        lanes=rng.randint(1, 4),
        servers=rng.randint(0, 3),
        sync=rng.choice(examples(SyncSpec)),
        codec="+".join(rng.sample(examples(CodecSpec), rng.randint(1, 3))),
        route=rng.choice(examples(RouteSpec)),
        channel=rng.choice(examples(ChannelSpec)),
        schedule=rng.choice(examples(ScheduleSpec)),
    )


@pytest.mark.parametrize("seed", range(200))
def test_text_table_and_object_are_the_same(seed: int) -> None:
    strategy = draw(random.Random(seed))
    if strategy.sync_spec.trains_clients:  # simulated clients send no messages
        strategy = strategy.replace(channel=Strategy().channel)
    assert Strategy.parse(str(strategy)) == strategy
    assert str(Strategy.parse(str(strategy))) == str(strategy)
    assert hash(Strategy.parse(str(strategy))) == hash(strategy)
    forms: tuple[Any, ...] = (str(strategy), strategy, strategy.model_dump())
    if strategy.sync_spec.learns_alone:  # actors need environments, see tests/unit/recipe/test_support.py
        return
    for written in forms:
        assert Recipe(task="digits", steps=1, strategy=written).strategy == strategy


@pytest.mark.parametrize("seed", range(50))
def test_the_order_of_terms_does_not_matter(seed: int) -> None:
    rng = random.Random(seed)
    strategy = draw(rng)
    terms = str(strategy).split()
    rng.shuffle(terms)
    assert Strategy.parse("  ".join(terms)) == strategy


def test_the_text_says_who_and_when_and_what_is_special() -> None:
    assert str(Strategy()) == "replicas=all sync=every-step"
    assert str(Strategy.parse("replicas=2 sync=every-step")) == "replicas=2 sync=every-step"
    text = "replicas=2 shard=2 zero=3 tensor=2 sync=diloco:50 codec=int8"
    assert str(Strategy.parse(text)) == text


@pytest.mark.capability("B1")
def test_the_names_that_users_know_are_presets() -> None:
    names = (
        "ddp fsdp hsdp zero1 zero2 zero3 mirrored multi-worker-mirrored parameter-server central-storage "
        "hogwild local-sgd diloco pipedream gpipe 1f1b 3d"
    )
    assert list(PRESETS) == names.split()
    for name, preset in PRESETS.items():
        assert Strategy.parse(name) == Strategy.parse(preset.terms)
        assert preset.summary
    assert Strategy.parse("ddp") == Strategy()
    assert Strategy.parse("zero2").zero == 2
    assert Strategy.parse("3d").ranks_per_replica == 4
    assert Strategy.parse("diloco").sync == "diloco:50"


def test_terms_after_a_preset_change_it() -> None:
    assert Strategy.parse("fsdp shard=8") == Strategy(replicas=1, shard=8, zero=3)
    assert Strategy.parse("ddp replicas=4") == Strategy(replicas=4)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", 'expected terms such as "replicas=2 sync=every-step" or a preset, found nothing'),
        ("   ", 'expected terms such as "replicas=2 sync=every-step" or a preset, found nothing'),
        ("dpp", 'unknown preset "dpp"; did you mean "ddp"?'),
        ("DDP ", None),
        ("qqq", f'unknown preset "qqq"; expected NAME=VALUE or one of {", ".join(PRESETS)}'),
        ("replicas", 'unknown preset "replicas"; did you mean "replicas"?'),
        ("replicas=2 ddp", 'expected NAME=VALUE, found "ddp"'),
        ("replicas=", 'expected NAME=VALUE, found "replicas="'),
        ("=2", 'expected NAME=VALUE, found "=2"'),
        ("replicas=2 replicas=3", "replicas is given twice, 2 and 3"),
        ("replica=2", "replica: unknown key, found 2; did you mean replicas?"),
        ("replicas=two", 'replicas: expected an integer >= 1 or "all", found "two"'),
        ("replicas=0", 'replicas: expected an integer >= 1 or "all", found 0'),
        ("shard=-1", "shard: expected an integer >= 1, found -1"),
        ("shard=1.5", 'shard: expected an integer >= 1, found "1.5"'),
        ("zero=4", "zero: expected an integer >= 0 and <= 3, found 4"),
        ("servers=-1", "servers: expected an integer >= 0, found -1"),
        (
            "sync=evry-step",
            f"sync: expected one of {', '.join(known_specs(SyncSpec))},"
            ' found "evry-step"; did you mean "every-step"?',
        ),
        ("sync=every-step:2", 'sync: expected "every-step" without an argument, found "every-step:2"'),
        ("sync=diloco", 'sync: expected an integer >= 1, as in "diloco:50", found "diloco"'),
        ("sync=diloco:", 'sync: expected an integer >= 1, as in "diloco:50", found "diloco:"'),
        (
            "codec=int8+topk",
            'codec: expected a share above 0 and at most 1, or a count, as in "topk:0.01", found "topk"',
        ),
        ("sync=local:0", 'sync: expected an integer >= 1, as in "local:8", found "local:0"'),
        ("sync=backup:-1", 'sync: expected an integer >= 0, as in "backup:1", found "backup:-1"'),
        (
            "codec=topk:0",
            'codec: expected a share above 0 and at most 1, or a count, as in "topk:0.01", found "topk:0"',
        ),
        (
            "codec=topk:2.0",
            'codec: expected a share above 0 and at most 1, or a count, as in "topk:0.01", found "topk:2.0"',
        ),
        ("cut=rows", 'cut: expected nothing, as no installed package brings a cut, found "rows"'),
        ("route=3", "route: expected a string, found 3"),
    ],
)
def test_what_cannot_be_parsed_is_explained(text: str, message: str | None) -> None:
    if message is None:  # a capital letter is a wrong spelling like any other
        message = f'unknown preset "{text.strip()}"; did you mean "ddp"?'
    with pytest.raises(StrategyError, match=re.escape(message)) as caught:
        Strategy.parse(text)
    assert caught.value.what == message
    assert caught.value.where == f'strategy "{text}"'


def test_several_errors_in_a_strategy_come_together() -> None:
    with pytest.raises(StrategyError) as caught:
        Strategy.parse("replicas=two shrad=2")
    assert caught.value.what.startswith("2 errors:")
    assert "did you mean shard?" in caught.value.what


@pytest.mark.parametrize("field", ["replicas", "shard", "tensor", "pipeline", "context", "lanes"])
def test_degrees_are_at_least_one(field: str) -> None:
    with pytest.raises(StrategyError, match=f"{field}: expected an integer >= 1"):
        Strategy.parse(f"{field}=0")
