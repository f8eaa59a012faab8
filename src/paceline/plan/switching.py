"""A run whose rule changes on the way: what it has under each of its rules, and while one follows another.

Between two rules the state travels as a checkpoint would hold it, whole, to every rank: the first has it
twice, as it puts it together.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from paceline.plan.parts import RankMemory
from paceline.plan.planner import Planner


def under(rank: RankMemory, planner: Planner) -> RankMemory:
    """A rank whose moments are told with their rule."""
    word = planner.recipe.strategy.sync
    return replace(rank, moments={f"{when} under {word}": parts for when, parts in rank.moments.items()})


def while_switching(
    before: Planner, ranks: Sequence[RankMemory], after: Planner, others: Sequence[RankMemory]
) -> list[RankMemory]:
    """What there is where a rule has ended and another begins; nobody has let go of the first yet.

    Args:
        before, ranks: of the rule that has ended.
        after, others: of the other.
    """
    state, gathered = before.carried
    word, found = after.recipe.strategy.sync, []
    for number in range(max(len(ranks), len(others))):
        travels = gathered + state * (2 if number == 0 else 1)
        old, new = ranks[number % len(ranks)], others[number % len(others)]
        parts = replace(
            new.stays,
            gradients=old.stays.gradients,
            moments=new.stays.moments
            - after.rule.saved
            + before.rule.state,  # nothing is saved of the new one
            activations=travels,
            wire=new.stays.wire + old.stays.wire,
        )
        found.append(replace(new, rank=number, moments={f"switch to {word}": parts}))
    return found
