"""Every layout of so many ranks, and whether it runs: what `paceline strategies --ranks N` prints."""

from __future__ import annotations

from collections.abc import Iterator

from paceline.recipe.strategy import Strategy
from paceline.recipe.strategy_table import Row
from paceline.recipe.support import support

_AXES = ("replicas", "shard", "tensor", "context", "pipeline")


def layouts(ranks: int) -> list[Row]:
    """Every way to lay a model out: replica x shard (with each `zero`) x tensor x context x pipeline.

    Whether one runs is asked with one micro-batch for each rank; plain replicas come first.
    """
    found = []
    for degrees in sorted(_products(ranks, len(_AXES)), reverse=True):
        named = dict(zip(_AXES, degrees, strict=True))
        for zero in (1, 2, 3) if named["shard"] > 1 else (0,):
            strategy = Strategy.model_validate(named | {"zero": zero})
            answer = support(strategy, processes=ranks, shards=ranks)
            found.append(Row(_spelled(strategy), strategy, ranks, answer))
    return found


def _spelled(strategy: Strategy) -> str:
    """Its degrees above one, as they are written."""
    terms = {name: getattr(strategy, name) for name in (*_AXES[:2], "zero", *_AXES[2:])}
    return " ".join(f"{name}={n}" for name, n in terms.items() if name == "replicas" or n > (name != "zero"))


def _products(number: int, length: int) -> Iterator[tuple[int, ...]]:
    """Every ordered product of so many integers that makes a number."""
    if length == 1:
        yield (number,)
        return
    for first in range(1, number + 1):
        if number % first == 0:
            for rest in _products(number // first, length - 1):
                yield (first, *rest)
