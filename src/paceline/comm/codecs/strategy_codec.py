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


def refuse_repeated_momentum_or_clip(recipe: Recipe, task: Task) -> None:
    """Raises: StrategyError: an optimizer does again what a codec does to gradients: momentum, or a clip."""
    codec_alternatives, optimizer = recipe.strategy.codec_alternatives, recipe.optimizer
    sends = any(spec.word == "dgc" for one in codec_alternatives for spec, _ in one.links)
    if optimizer.clip_norm is not None and any(
        local_clip_norm(one) is not None for one in codec_alternatives
    ):
        raise StrategyError(
            "codec=dgc:K:M:C clips gradients where they are sent, and optimizer.clip_norm their sum again",
            next_step="leave out optimizer.clip_norm, or the norm behind the momentum of dgc",
        )
    if sends and task.optimizer is None and (optimizer.name != "sgd" or optimizer.momentum):
        raise StrategyError(
            "codec=dgc gives gradients their momentum where they are sent, and the optimizer would again:"
            f" found {optimizer.name}, momentum = {optimizer.momentum:g}",
            next_step='set optimizer.name = "sgd" without momentum, and its momentum by codec=dgc:0.01:0.9',
        )


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
