"""Where a model lies that is not trained: what of a strategy's words an evaluation keeps."""

from __future__ import annotations

from paceline.errors import StrategyError
from paceline.recipe.strategy import Strategy
from paceline.recipe.support import resolve

_LAYOUT = ("tensor", "context", "cut")


def at_rest(strategy: Strategy) -> Strategy:
    """The layout alone: how the weights of one model are split over ranks, and replicas of that.

    Stages in threads of one process, and shards of optimizer and gradients alone, split no weights.
    """
    kept = {name: getattr(strategy, name) for name in _LAYOUT}
    if strategy.zero == 3:
        kept |= {"shard": strategy.shard, "zero": 3}
    if strategy.lanes == 1:
        stages = "parameters" if strategy.stages == "time" else strategy.stages  # nothing is measured again
        kept |= {"pipeline": strategy.pipeline, "stages": stages}
    return Strategy(**kept)


def layout_at_rest(run: Strategy, asked: str | None, processes: int) -> Strategy:
    """How the weights of a run lie on so many processes.

    Args:
        run: the strategy that it was trained under.
        asked: in place of its layout; None: that, or, on one process, all of it.
    Raises:
        StrategyError: the words or the number of processes do not go together, or some of them train.
    """
    if asked is None:
        chosen = Strategy() if processes == 1 else at_rest(run)
    else:
        chosen = Strategy.parse(asked)
        if chosen.servers or chosen.sync != "every-step":
            raise StrategyError(
                f"'{asked}' says how replicas agree while they train, and nothing is trained",
                next_step=f'--strategy "{at_rest(chosen)}"',
            )
    return resolve(chosen, processes=processes, shards=processes, called="the processes")
