"""The table of strategies: every preset and every word, each with its answer."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

from paceline.recipe.strategy import PRESETS, Strategy
from paceline.recipe.support import Support, num_ranks, support
from paceline.recipe.words import CODECS, ROUTES, SCHEDULES, SYNCS


class Row(NamedTuple):
    """One line of the table of strategies: `processes` is the smallest number that shows it."""

    name: str
    strategy: Strategy
    processes: int
    support: Support


def table(*, shards: int = 8) -> tuple[Row, ...]:
    """Every preset and every word of the four choices, each with its answer."""
    return tuple(_row(name, shards) for name in _names())


def _names() -> Iterator[str]:
    yield from PRESETS
    yield from ("tensor=2", "context=2", "lanes=2")
    for choice, words in (("sync", SYNCS), ("codec", CODECS), ("route", ROUTES), ("schedule", SCHEDULES)):
        for word, example in words.items():
            yield f"{_NEEDED.get(word, '')}{choice}={example}"


_NEEDED = {  # what a word cannot do without
    "backup": "servers=1 ",
    "server-async": "servers=1 ",
    "pipedream": "replicas=1 pipeline=2 ",
    "hierarchical": "replicas=4 ",
    **dict.fromkeys(SCHEDULES, "pipeline=2 "),
}


def _row(name: str, shards: int) -> Row:
    strategy = Strategy.parse(name)
    smallest = strategy if strategy.replicas else strategy.replace(replicas=2)
    processes = num_ranks(smallest)
    return Row(name, strategy, processes, support(strategy, processes=processes, shards=shards))
