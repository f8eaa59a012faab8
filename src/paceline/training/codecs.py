"""The codec of a strategy, from its words, and the collective that sums by it."""

from __future__ import annotations

from functools import reduce

from paceline.comm import Codec, CodedCollective
from paceline.comm.collectives import Coded, Exchanging
from paceline.recipe import Strategy
from paceline.recipe.specs import imported


def make_codec(strategy: Strategy) -> Codec | None:
    """The codec of its words, each joined to those before it; None: values travel as they are.

    Raises:
        MissingExtraError: a library that it needs is not installed.
    """
    made = [(spec, spec.load()(argument)) for spec, argument in strategy.links]
    codec: Codec | None = reduce(
        lambda before, link: imported(link[0].join)(before, link[1]), made[1:], made[0][1]
    )
    return codec


def code(path: Exchanging, strategy: Strategy, seed: int) -> Coded:
    """Put the codec of a strategy on a path, whose process group nobody else uses.

    Args:
        seed: of the random numbers that coding draws.
    """
    spec, argument = strategy.links[0]
    if spec.summed:
        found: Coded = imported(spec.summed)(path, argument, seed)
        return found
    codec = make_codec(strategy)
    assert codec is not None, strategy.codec
    return CodedCollective(path, codec, seed=seed)
