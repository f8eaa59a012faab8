"""What BatchNorm over all ranks of a step does not go with. Pure."""

from __future__ import annotations

from collections.abc import Iterator

from paceline.recipe.learning import BatchRecipe
from paceline.recipe.problems import Conflict
from paceline.recipe.strategy import Strategy

KEY = "batch.sync_batchnorm"


def synced_conflicts(
    batch: BatchRecipe, strategy: Strategy, *, reproducible: bool, recomputes: bool, compiles: bool
) -> Iterator[Conflict]:
    """Choices under which not all ranks run one forward of all samples, at once and once."""
    wrong = {
        ("batch.accumulation", "micro-batches of a rank run one after another"): (batch.accumulation or 1)
        > 1,
        ("strategy", "every rank has to run one whole forward a step"): _runs_otherwise(strategy),
        ("reproducible", "a sum over ranks has an order of its own"): reproducible,
        ("memory.recompute", "a block would sum again in backward"): recomputes,
        ("runtime.compile", "a compiled graph has no sums over ranks"): compiles,
    }
    for (key, why), holds in wrong.items():
        if holds:
            yield Conflict((KEY, key), f"does not go with this {key}: {why}")


def _runs_otherwise(strategy: Strategy) -> bool:
    spread = max(strategy.pipeline, strategy.tensor, strategy.context, strategy.lanes) > 1
    waits = strategy.rule.exact and not strategy.servers and strategy.balance == "even"
    return spread or not waits or bool(strategy.cut)
