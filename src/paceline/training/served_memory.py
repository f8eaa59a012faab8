"""What servers keep, and their workers, by the rule of the servers: see `paceline.sync.memory`. Pure."""

from __future__ import annotations

from paceline.sync.memory import Asked, RuleMemory
from paceline.sync.served import memory_beside_servers


def server(asked: Asked) -> RuleMemory:
    """An update of all pushes of a step."""
    return memory_beside_servers(asked, together=_workers(asked))


def server_async(asked: Asked) -> RuleMemory:
    """An update of every push."""
    return memory_beside_servers(asked, together=1)


def bounded(asked: Asked) -> RuleMemory:
    """An update of every push; without a step between workers of all of them."""
    return memory_beside_servers(asked, together=1 if _number(asked) else _workers(asked))


def backup(asked: Asked) -> RuleMemory:
    """An update of the first pushes of a step."""
    return memory_beside_servers(asked, together=_workers(asked) - int(_number(asked)))


def _workers(asked: Asked) -> int:
    return asked.recipe.strategy.replicas or 1


def _number(asked: Asked) -> float:
    return float(asked.recipe.strategy.sync.partition(":")[2])
