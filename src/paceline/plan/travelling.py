"""What a rank keeps for that which travels between ranks: to code it, or to send it along a route."""

from __future__ import annotations

from collections.abc import Mapping

from paceline.layout.placement import Held
from paceline.plan.coding import coding_bytes
from paceline.plan.hops import hop_bytes
from paceline.plan.paths import paths_of
from paceline.recipe import Recipe


def travelling_bytes(
    recipe: Recipe, held: Mapping[str, Held], item_bytes: Mapping[str, int], processes: int, *, common: bool
) -> int:
    """Bytes beside buckets and sums. Of parameters that are gathered `gathers` says it, of servers the rule.

    Args:
        recipe: its strategy has its replicas filled in.
        held: by name, what the rank holds; `item_bytes` of one value.
        common: all ranks run on one host.
    """
    strategy = recipe.strategy
    if not strategy.rule.sums:
        return 0
    paths = [*paths_of(recipe, held, item_bytes, processes, waits=common or strategy.zero < 3)]
    if strategy.is_coded:
        return coding_bytes(recipe, paths)
    return sum(hop_bytes(recipe, one, common=common) for one in paths)
