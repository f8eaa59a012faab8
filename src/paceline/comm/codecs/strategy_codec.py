"""The codec of a strategy, from its words, and the collective that sums by it."""

from __future__ import annotations

from functools import reduce

from paceline.comm.codecs.codec_protocol import Codec
from paceline.comm.collectives.coded_collective import CodedCollective
from paceline.comm.collectives.collective_protocol import AllToAllCollective, CodingCollective
from paceline.errors import StrategyError
from paceline.recipe.recipe import Recipe
from paceline.recipe.registry.word_spec import import_object
from paceline.recipe.strategy import Strategy
from paceline.task import Task


def build_codec(strategy: Strategy) -> Codec | None:
    """The codec of its words, each joined to those before it; None: values travel as they are.

    Raises:
        MissingExtraError: a library that it needs is not installed.
    """
    made = [(spec, spec.load()(argument)) for spec, argument in strategy.links]
    codec: Codec | None = reduce(
        lambda before, link: import_object(link[0].join)(before, link[1]), made[1:], made[0][1]
    )
    return codec


def local_clip_norm(strategy: Strategy) -> float | None:
    """Of the whole gradient, where each rank clips what it sends (`dgc:K:M:C`); None: nobody does."""
    for spec, argument in strategy.links:
        said = argument.split(":")
        if spec.word == "dgc" and len(said) == 3:
            return float(said[2])
    return None


def build_coded_collective(path: AllToAllCollective, strategy: Strategy, seed: int) -> CodingCollective:
    """Put the codec of a strategy on a path, whose process group nobody else uses.

    Args:
        seed: of the random numbers that coding draws.
    """
    spec, argument = strategy.links[0]
    if spec.summed:
        found: CodingCollective = import_object(spec.summed)(path, argument, seed)
        return found
    codec = build_codec(strategy)
    assert codec is not None, strategy.codec
    return CodedCollective(path, codec, seed=seed)
