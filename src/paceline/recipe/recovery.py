"""What a job does when it loses a process, by layout and sync rule; pure.

One table has an answer for every strategy: the other ranks continue in their processes, all of them start
again from the newest checkpoint, or the job ends.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

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


def partial_state_reasons(recipe: Recipe) -> list[str]:
    """Return what keeps a rank from having the whole state of the run; empty: every rank has all of it."""
    strategy = recipe.strategy
    reasons = {
        "a partitioned model": bool(strategy.cuts),
        f"sync={strategy.sync}": strategy.is_set("sync"),
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
    if not reasons:
        return Recovery("in process")
    return Recovery("from a checkpoint", f"no remaining rank has the whole state: {', '.join(reasons)}")
