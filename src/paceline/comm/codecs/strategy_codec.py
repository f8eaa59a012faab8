"""Constructors of the codec of a strategy, and of the collective that sums with it."""

from __future__ import annotations

from functools import reduce

from paceline.comm.codecs.codec_protocol import Codec
from paceline.comm.collectives.coded_collective import CodedCollective
from paceline.comm.collectives.collective_protocol import AllToAllCollective, CodingCollective
from paceline.recipe.registry import import_object
from paceline.recipe.strategy import Strategy


def build_codec(strategy: Strategy) -> Codec | None:
    """Build the codec of a strategy from its words, each joined to those before it; None: values are sent as
    they are.

    Raises:
        MissingExtraError: a library that it needs is not installed.
    """
    links = [(spec, spec.load()(argument)) for spec, argument in strategy.codec_words]
    codec: Codec | None = reduce(
        lambda before, link: import_object(link[0].join)(before, link[1]), links[1:], links[0][1]
    )
    return codec


def build_coded_collective(path: AllToAllCollective, strategy: Strategy, seed: int) -> CodingCollective:
    """Put the codec of a strategy on a route, whose process group nothing else uses.

    Args:
        seed: seed of the random numbers of the encoding.
    """
    spec, argument = strategy.codec_words[0]
    if spec.summed:
        collective: CodingCollective = import_object(spec.summed)(path, argument, seed)
        return collective
    codec = build_codec(strategy)
    assert codec is not None, strategy.codec
    return CodedCollective(path, codec, seed=seed)
