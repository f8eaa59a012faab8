"""Whether a strategy works here, and if not, why not and what does: asked before any process starts.

Invariant: one pure function over one table of rules. A rule that is not broken says nothing, so the
reasons of a refusal are all its reasons. What is not built is refused, never replaced by something near.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import NamedTuple

from paceline.errors import StrategyError
from paceline.recipe.strategy import CODECS, PRESETS, ROUTES, SYNCS, Strategy


class Support(NamedTuple):
    """The answer for one strategy.

    Args:
        ok: it can run.
        reason: why not, in one line; empty if it can.
        nearest: the strategy to run: this one with its replicas filled in, or the nearest that works.
    """

    ok: bool
    reason: str
    nearest: Strategy


class Row(NamedTuple):
    """One line of the table of strategies: `processes` is the smallest number that shows it."""

    name: str
    strategy: Strategy
    processes: int
    support: Support


class _Place(NamedTuple):
    processes: int
    shards: int


class _Rule(NamedTuple):
    """A reason to refuse; both functions take the strategy with its replicas filled in."""

    broken: Callable[[Strategy, _Place], bool]
    reason: Callable[[Strategy, _Place], str]


_BUILT: dict[str, tuple[int | str, str]] = {  # field: the one value that is built, and what it means
    "shard": (1, "a rank holds a whole replica"),
    "zero": (0, "state is not sharded"),
    "tensor": (1, "tensors are whole"),
    "pipeline": (1, "the model is one stage"),
    "context": (1, "sequences are whole"),
    "lanes": (1, "a process runs one shard at a time"),
    "servers": (0, "no process is a server"),
    "sync": ("every-step", "replicas agree after each batch"),
    "codec": ("fp32", "gradients travel uncompressed"),
    "route": ("native", "the collectives of torch.distributed"),
}


def _not_built(field: str, built: int | str, meaning: str) -> _Rule:
    return _Rule(
        lambda strategy, place: bool(getattr(strategy, field) != built),
        lambda strategy, place: (
            f"{field}={getattr(strategy, field)} is not built yet, only {field}={built} ({meaning})"
        ),
    )


def _num_ranks(strategy: Strategy) -> int:
    return (strategy.replicas or 1) * strategy.ranks_per_replica + strategy.servers


def _explain_ranks(strategy: Strategy, place: _Place) -> str:
    degrees = ("replicas", "shard", "tensor", "pipeline", "context")
    product = " x ".join(
        f"{name}={getattr(strategy, name)}"
        for name in degrees
        if name == "replicas" or getattr(strategy, name) > 1
    )
    servers = f" + servers={strategy.servers}" if strategy.servers else ""
    return f"{product}{servers} needs {_num_ranks(strategy)} processes, and there are {place.processes}"


_RULES = (
    *(_not_built(field, built, meaning) for field, (built, meaning) in _BUILT.items()),
    _Rule(lambda strategy, place: _num_ranks(strategy) != place.processes, _explain_ranks),
    _Rule(
        lambda strategy, place: (strategy.replicas or 1) > place.shards,
        lambda strategy, place: (
            f"replicas={strategy.replicas} is more than batch.shards={place.shards}, so a replica would"
            f" have no work: start at most {place.shards} processes or raise batch.shards"
        ),
    ),
)


def support(strategy: Strategy, *, processes: int, shards: int) -> Support:
    """Say whether `strategy` runs on this many processes with a batch cut into this many shards.

    Args:
        strategy: any valid strategy; `replicas=None` takes all processes that are left.
        processes: the world size, at least 1.
        shards: virtual shards of the global batch (`batch.shards`), at least 1.
    """
    place = _Place(processes, shards)
    filled = _fill(strategy, processes)
    reasons = [rule.reason(filled, place) for rule in _RULES if rule.broken(filled, place)]
    nearest = Strategy(replicas=min(processes, shards)) if reasons else filled
    return Support(not reasons, "; ".join(reasons), nearest)


def resolve(strategy: Strategy, *, processes: int, shards: int) -> Strategy:
    """The strategy with its replicas filled in.

    Raises:
        StrategyError: it is not supported; gives the reason and the nearest that is.
    """
    answer = support(strategy, processes=processes, shards=shards)
    if answer.ok:
        return answer.nearest
    raise StrategyError(
        answer.reason,
        where=f'strategy "{strategy}" on {processes} processes',
        next_step=f'the nearest that works is "{answer.nearest}" on {_num_ranks(answer.nearest)} processes',
    )


def table(*, shards: int = 8) -> tuple[Row, ...]:
    """Every preset and every word of the four choices, each with its answer."""
    return tuple(_row(name, shards) for name in _names())


def _fill(strategy: Strategy, processes: int) -> Strategy:
    if strategy.replicas is not None:
        return strategy
    return strategy.replace(replicas=max(1, (processes - strategy.servers) // strategy.ranks_per_replica))


def _names() -> Iterator[str]:
    yield from PRESETS
    yield from ("tensor=2", "context=2", "lanes=2")
    for choice, words in (("sync", SYNCS), ("codec", CODECS), ("route", ROUTES)):
        yield from (f"{choice}={example}" for example in words.values())


def _row(name: str, shards: int) -> Row:
    strategy = Strategy.parse(name)
    smallest = strategy if strategy.replicas else strategy.replace(replicas=2)
    processes = _num_ranks(smallest)
    return Row(name, strategy, processes, support(strategy, processes=processes, shards=shards))
