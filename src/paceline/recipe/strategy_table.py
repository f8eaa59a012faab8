"""The table of strategies: every preset and every word, each with its answer."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

from paceline.recipe.channel_words import ChannelSpec
from paceline.recipe.presets import PRESETS
from paceline.recipe.specs import (
    CodecSpec,
    LayoutSpec,
    RouteSpec,
    ScheduleSpec,
    Spec,
    SyncSpec,
    known,
    plugged_in,
)
from paceline.recipe.strategy import Strategy
from paceline.recipe.support import Support, num_ranks, support

_CHOICES: tuple[type[Spec], ...] = (SyncSpec, CodecSpec, RouteSpec, ChannelSpec, ScheduleSpec)


class Row(NamedTuple):
    """One line of the table of strategies: `processes` is the smallest number that shows it."""

    name: str
    strategy: Strategy
    processes: int
    support: Support


def table(*, shards: int = 8) -> tuple[Row, ...]:
    """Every preset and every word of the choices, each with its answer."""
    return tuple(_row(name, shards) for name in _names())


def _names() -> Iterator[str]:
    yield from PRESETS
    yield from ("tensor=2", "context=2", "lanes=2")
    for kind in _CHOICES:
        for spec in known(kind).values():
            yield f"{spec.with_terms} {kind.choice}={spec.example}".strip()
    for spec in plugged_in(LayoutSpec).values():
        yield f"{spec.with_terms} cut={spec.word}".strip()


def _row(name: str, shards: int) -> Row:
    strategy = Strategy.parse(name)
    smallest = strategy if strategy.replicas else strategy.replace(replicas=2)
    processes = num_ranks(smallest)
    return Row(name, strategy, processes, support(strategy, processes=processes, shards=shards))
