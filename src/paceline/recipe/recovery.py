"""What a job does when it loses a process, by layout and sync rule; pure.

One table has an answer for every strategy: the other ranks continue in their processes, all of them start
again from the newest checkpoint, or the job ends.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from paceline.recipe.strategy import Strategy
from paceline.recipe.validation import FieldNeed

if TYPE_CHECKING:
    from paceline.recipe.recipe import Recipe

RecoveryKind = Literal["in process", "from a checkpoint", "none"]


@dataclass(frozen=True)
class Recovery:
    """The reaction of a job to the loss of a process.

    Args:
        kind: "in process": the other ranks repeat the step without it; "from a checkpoint": all ranks are
            started again from the newest one; "none": the job ends.
        reason: why it is not the kind before; empty for "in process".
    """

    kind: RecoveryKind
    reason: str = ""


def buddy_conflicts(recipe: Recipe) -> list[str]:
    """Return what keeps ranks from rebuilding the state from copies of their neighbours; pure."""
    strategy = recipe.strategy
    divides = strategy.fills == "shard" or strategy.shard > 1
    stages = strategy.fills == "pipeline" or strategy.pipeline > 1
    reasons = {
        "no shard and no pipeline": not (divides or stages),
        "shard and pipeline together": divides and stages,
        f"tensor={strategy.tensor}": strategy.tensor > 1,
        f"context={strategy.context}": strategy.context > 1,
        f"cut={strategy.cut}": bool(strategy.cut),
        f"lanes={strategy.lanes}": strategy.lanes > 1,
        f"storage={strategy.storage}": strategy.is_set("storage"),
        f"stages={strategy.stages}": strategy.is_set("stages"),
        f"sync={strategy.sync}": strategy.is_set("sync"),
        f"codec={strategy.codec}": strategy.is_coded,
        "batch.sync_batchnorm": recipe.batch.sync_batchnorm,
    }
    return [reason for reason, holds in reasons.items() if holds]


BUDDY_NEEDS = (
    FieldNeed(
        lambda recipe: not buddy_conflicts(recipe),
        "with shard or pipeline, under sync=every-step",
        "found strategy {t.strategy}",
        keys=tuple(
            f"strategy.{word}" for word in ("shard", "zero", "pipeline", "tensor", "context", "sync", "codec")
        ),
        scope="recipe",
    ),
)


def trains_in_rounds(recipe: Recipe) -> bool:
    """Return whether the replicas train alone between meetings, so that a lost one only leaves its round.

    Every rank has the parameters with which the round began, and an optimizer of its own.
    """
    strategy, outer = recipe.strategy, recipe.outer
    is_local = len(strategy.sync_words) == 1 and strategy.sync_spec.leaves_rounds
    return is_local and outer.fragments == 1 and not strategy.balances_by_speed and strategy.lanes == 1


def partial_state_reasons(recipe: Recipe) -> list[str]:
    """Return what keeps a rank from having the whole state of the run; empty: every rank has all of it."""
    strategy = recipe.strategy
    reasons = {
        "a partitioned model": bool(strategy.cuts),
        f"sync={strategy.sync}": strategy.is_set("sync") and not trains_in_rounds(recipe),
        f"codec={strategy.codec}": strategy.is_coded,
        "batch.sync_batchnorm": recipe.batch.sync_batchnorm,
        "private.noise": recipe.private.is_on,
    }
    return [reason for reason, holds in reasons.items() if holds]


def recovery_of(recipe: Recipe) -> Recovery:
    """Return what a job with this recipe does when it loses a process.

    Under a rule with servers the loss of a worker is survived by the rule itself, and this is about a server.
    """
    if recipe.elastic.mode == "off":
        return Recovery("none", 'elastic.mode = "off"')
    reasons = partial_state_reasons(recipe)
    if not reasons or keeps_copies(recipe):
        return Recovery("in process")
    return Recovery("from a checkpoint", f"no remaining rank has the whole state: {', '.join(reasons)}")


def keeps_copies(recipe: Recipe) -> bool:
    """Return whether each rank has a copy of its neighbour's part of the state."""
    return recipe.elastic.redundancy == "buddy" and not buddy_conflicts(recipe)


def strategy_for_members(strategy: Strategy, processes: int) -> Strategy:
    """Return the strategy with which a number of processes continues a run whose ranks hold parts; pure.

    Where the number is no multiple of the ranks of a replica, all of them share the state of one replica.

    Args:
        strategy: as the recipe has it.
    """
    if strategy.fills != "replicas" and processes > 1:
        return strategy
    open_ended = strategy.replace(replicas=None)
    if processes > 1 and processes % strategy.ranks_per_replica == 0:
        return open_ended
    if processes > 1:
        return open_ended.replace(**{"shard" if strategy.shard > 1 else "pipeline": processes})
    plain = {"fills": "replicas", "shard": 1, "zero": 0, "pipeline": 1}
    return open_ended.replace(**plain, schedule=Strategy.model_fields["schedule"].default, rechunk="")
