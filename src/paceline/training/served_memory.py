"""What servers keep, and their workers, by the rule of the servers: see `paceline.sync.memory`."""

from __future__ import annotations

from paceline.recipe import num_micro_batches
from paceline.sync.beside_coding import ThroughCodec
from paceline.sync.beside_servers import AsTheyAre, ByNodes, Form, memory_beside_servers, num_workers
from paceline.sync.memory import Asked, RuleMemory
from paceline.training.codecs import make_codec


def server(asked: Asked) -> RuleMemory:
    """An update of all pushes of a step."""
    return served(asked, together=num_workers(asked))


def server_async(asked: Asked) -> RuleMemory:
    """An update of every push."""
    return served(asked, together=1)


def bounded(asked: Asked) -> RuleMemory:
    """An update of every push; without a step between workers of all of them."""
    return served(asked, together=1 if _number(asked) else num_workers(asked))


def backup(asked: Asked) -> RuleMemory:
    """An update of the first pushes of a step."""
    return served(asked, together=num_workers(asked) - int(_number(asked)))


def served(asked: Asked, together: int) -> RuleMemory:
    """What a rank keeps under a rule of servers; also for rules of other packages.

    Args:
        together: pushes that make an update.
    """
    return memory_beside_servers(asked, together, _form(asked))


def _form(asked: Asked) -> Form:
    """As `paceline.training.serving` chooses traffic and pushes."""
    if asked.recipe.is_ordered:
        return ByNodes(num_micro_batches(asked.recipe, asked.processes))
    codec = make_codec(asked.recipe.strategy)
    return AsTheyAre() if codec is None else ThroughCodec(codec)


def _number(asked: Asked) -> float:
    return float(asked.recipe.strategy.sync.partition(":")[2])
