"""The codec of a strategy, from its words, and the collective that sums by it."""

from __future__ import annotations

from functools import reduce

from paceline.comm import Codec, CodedCollective
from paceline.comm.collectives import Coded, Exchanging
from paceline.errors import StrategyError
from paceline.recipe import Recipe, Strategy
from paceline.recipe.specs import imported
from paceline.task import Task


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


def refuse_second_momentum(recipe: Recipe, task: Task) -> None:
    """Raises: StrategyError: a codec that gives gradients their momentum leaves none to the optimizer."""
    sends = any(spec.word == "dgc" for one in recipe.strategy.alternatives for spec, _ in one.links)
    optimizer = recipe.optimizer
    if sends and task.optimizer is None and (optimizer.name != "sgd" or optimizer.momentum):
        raise StrategyError(
            "codec=dgc gives gradients their momentum where they are sent, and the optimizer would again:"
            f" found {optimizer.name}, momentum = {optimizer.momentum:g}",
            next_step='set optimizer.name = "sgd" without momentum, and its momentum by codec=dgc:0.01:0.9',
        )


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
