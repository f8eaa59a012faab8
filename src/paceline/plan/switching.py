"""A run whose rule changes on the way: what it has under each of its rules, and while one follows another.

Between two rules the state goes from rank to rank some tensors at a time; see `paceline.layout.handover`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from paceline.plan.handed_over import most_on_its_way
from paceline.plan.parts import RankMemory
from paceline.plan.planner import Planner


def under(rank: RankMemory, planner: Planner) -> RankMemory:
    """A rank whose moments are told with their rule."""
    word = planner.recipe.strategy.sync
    return replace(rank, moments={f"{when} under {word}": parts for when, parts in rank.moments.items()})


def while_switching(
    before: Planner, ranks: Sequence[RankMemory], after: Planner, others: Sequence[RankMemory]
) -> list[RankMemory]:
    """What there is where a rule has ended and another begins: of the first its state alone is left.

    Args:
        before, ranks: of the rule that has ended.
        after, others: of the other.
    """
    strategy = before.recipe.strategy
    ranks_and_parts = strategy.ranks_per_replica, before.processes, strategy.shard * strategy.tensor
    word, found = after.recipe.strategy.sync, []
    for number in range(max(len(ranks), len(others))):
        new, rule = others[number % len(others)], before.rule_of(number)
        kept = rule.state if rule.saved else 0  # what is saved lies beside what is not
        state = before.state_of(number).tensors(after.state_of(number))
        parts = replace(
            new.stays,
            gradients=after.own_sums(number),
            moments=new.stays.moments + kept,
            activations=most_on_its_way(state, *ranks_and_parts, is_first=number == 0),
        )
        found.append(replace(new, rank=number, moments={f"switch to {word}": parts}))
    return found
