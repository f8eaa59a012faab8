"""The supported strategy that is nearest to one that is not. Pure."""

from __future__ import annotations

from collections.abc import Callable
from itertools import combinations, product
from typing import Any

from paceline.recipe.specs import ScheduleSpec, SyncSpec, known
from paceline.recipe.strategy import Strategy

_COSTS = {  # of a change, by field: what a user would give up last costs most
    "servers": 1,
    "partition": 1,
    "balance": 1,
    "schedule": 2,
    "stages": 1,
    "rechunk": 1,
    "route": 2,
    "channel": 1,
    "lanes": 2,
    "cut": 3,
    "zero": 3,
    "shard": 3,
    "codec": 4,
    "context": 5,
    "tensor": 4,
    "pipeline": 5,
    "sync": 6,
}
_LOST_STAGES = 10
_MOST_CHANGES = 3


def nearest_supported(
    filled: Strategy, processes: int, shards: int, fits: Callable[[Strategy], bool]
) -> Strategy:
    """The supported strategy that changes least on as many processes; if none, plain replicas on fewer."""
    staged = filled.schedule != Strategy.model_fields["schedule"].default  # an order of stages was asked for
    filled = _built_words(filled)
    choices = {field: options for field in _COSTS if (options := _options(filled, field, processes))}
    for changes in range(_MOST_CHANGES + 1):
        found: list[tuple[int, int, Strategy]] = []
        for fields in combinations(choices, changes):
            cost = sum(_COSTS[field] for field in fields)
            for values in product(*(choices[field] for field in fields)):
                candidate = _refilled(filled.replace(**dict(zip(fields, values, strict=True))), processes)
                if fits(candidate):
                    lost = _LOST_STAGES if staged and candidate.pipeline == 1 else 0
                    found.append((cost + lost, len(found), candidate))
        if found:
            return min(found)[2]
    return Strategy(replicas=min(processes, shards))


def cost_of_change(now: Strategy, other: Strategy) -> int:
    """How much a user would give up."""
    changed = [field for field in _COSTS if getattr(now, field) != getattr(other, field)]
    return sum(_COSTS[field] for field in changed)


def _built_words(strategy: Strategy) -> Strategy:
    """Without the words of its wire that are not built, which cannot be kept whatever else changes."""
    described = {
        "codec": strategy.form,
        "route": strategy.path,
        "channel": strategy.carrier,
        "schedule": strategy.order,
    }
    defaults = {
        field: Strategy.model_fields[field].default for field, spec in described.items() if not spec.is_built
    }
    return strategy.replace(**defaults)


def _options(strategy: Strategy, field: str, processes: int) -> list[Any]:
    """Other values of a field, the likeliest first."""
    now, default = getattr(strategy, field), Strategy.model_fields[field].default
    values: list[Any]
    if field == "servers":
        values = [strategy.rule.needs_server]
    elif field == "zero":
        values = [1, 2, 3, 0] if strategy.shard > 1 else [0]
    elif field in ("shard", "tensor", "pipeline", "context"):
        values = [1, *(n for n in (2, 3, 4, 8) if n <= processes and processes % n == 0)]
    elif field == "sync":
        words = (spec for spec in known(SyncSpec).values() if spec.is_built)
        values = [spec.example for spec in words if bool(spec.needs_server) == bool(strategy.servers)][:3]
    elif field == "schedule":
        values = [
            spec.example for spec in known(ScheduleSpec).values() if spec.is_built and spec.word != "file"
        ]
    else:
        values = [default]
    return [value for value in values if value != now]


def _refilled(candidate: Strategy, processes: int) -> Strategy:
    """With as many replicas as fill the processes."""
    replicas = max(1, (processes - candidate.servers) // candidate.ranks_per_replica)
    return candidate if candidate.replicas == replicas else candidate.replace(replicas=replicas)
