"""Whether a strategy works here, and if not, why not and what does: asked before any process starts.

Invariant: one pure function over one table of rules. A rule that is not broken says nothing, so the
reasons of a refusal are all its reasons. What is not built is refused, never replaced by something near.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

from paceline.errors import StrategyError
from paceline.recipe.strategy import Strategy


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


class _Place(NamedTuple):
    processes: int
    shards: int


class _Rule(NamedTuple):
    """A reason to refuse; both functions take the strategy with its replicas filled in."""

    broken: Callable[[Strategy, _Place], bool]
    reason: Callable[[Strategy, _Place], str]


_BUILT: dict[str, tuple[frozenset[int | str], str]] = {  # choice: the words that are built, what they mean
    "zero": (frozenset({0, 1}), "optimizer state is whole, or cut among the shard ranks"),
    "tensor": (frozenset({1}), "tensors are whole"),
    "context": (frozenset({1}), "sequences are whole"),
    "sync": (
        frozenset({"every-step", "local", "diloco", "server-async", "backup", "pipedream"}),
        "see `paceline strategies`",
    ),
    "codec": (frozenset({"fp32", "int8"}), "values, or bytes with a scale for every block"),
    "route": (
        frozenset({"auto", "native", "shared-memory", "hierarchical"}),
        "the collectives of torch.distributed, the memory of one host, or inside nodes first",
    ),
    "schedule": (frozenset({"gpipe"}), "all forwards, then all backwards"),
}


def _not_built(field: str, built: frozenset[int | str], meaning: str) -> _Rule:
    return _Rule(
        lambda strategy, place: _word(strategy, field) not in built,
        lambda strategy, place: (
            f"{field}={getattr(strategy, field)} is not built yet, only {field}="
            f"{' or '.join(sorted(str(word) for word in built))} ({meaning})"
        ),
    )


def _word(strategy: Strategy, field: str) -> int | str:
    value: int | str = getattr(strategy, field)
    return value.partition(":")[0] if isinstance(value, str) else value


def _because(reason: str, broken: Callable[[Strategy], bool]) -> _Rule:
    return _Rule(lambda strategy, place: broken(strategy), lambda strategy, place: reason)


_ALONE = ("local", "diloco")
_SERVED = ("server", "server-async", "backup")
_CHOSEN = ("shared-memory", "hierarchical")  # routes that nobody takes by default
_COMBINATIONS = (
    _because("shard without zero shares nothing: add zero=1", lambda s: s.shard > 1 and not s.zero),
    _because("zero shares state among shard ranks: add shard=2", lambda s: s.zero > 0 and s.shard == 1),
    _because(
        "replicas that train alone must be whole on one rank: leave out shard and pipeline",
        lambda s: s.sync_word in _ALONE and s.ranks_per_replica > 1,
    ),
    _because(
        "zero inside a stage is not built yet: choose shard or pipeline",
        lambda s: s.shard > 1 and s.stage_ranks > 1,
    ),
    _because(
        "pipedream has one replica, so there is nothing to code: leave out codec",
        lambda s: s.codec != "fp32" and s.sync_word == "pipedream",
    ),
    _because(
        "this rule sums nothing over replicas, so there is nothing to route: leave out route",
        lambda s: s.route in _CHOSEN and s.sync_word in (*_SERVED, "pipedream"),
    ),
    _because(
        "coded sums have a path of their own: leave out codec or route",
        lambda s: s.route in _CHOSEN and s.codec != "fp32",
    ),
    _because(
        "a server is what this rule needs: add servers=1",
        lambda s: s.sync_word in _SERVED and s.servers != 1,
    ),
    _because(
        "nobody would talk to a server under this rule: leave out servers",
        lambda s: s.sync_word not in _SERVED and s.servers > 0,
    ),
    _because(
        "a server holds a whole model, and gradients reach it uncoded: leave out shard, pipeline and codec",
        lambda s: s.sync_word in _SERVED and (s.ranks_per_replica > 1 or s.codec != "fp32"),
    ),
    _because(
        "pipedream is a rule of one pipeline: replicas=1 and pipeline=2 or more",
        lambda s: s.sync_word == "pipedream" and (s.pipeline == 1 or s.replicas != 1),
    ),
    _because(
        "backup:B leaves out the last B of the replicas, and one must be left: add replicas",
        lambda s: s.sync_word == "backup" and int(s.sync.partition(":")[2]) >= (s.replicas or 1),
    ),
    _because(
        "lanes make one update, of all shards and as they are: leave out lanes, or the other sync or codec",
        lambda s: s.lanes > 1 and s.is_approximate,
    ),
    _because(
        "the stages of a process are its lanes: choose as many lanes as stages, or one",
        lambda s: s.lanes > 1 < s.pipeline != s.lanes,
    ),
    _because(
        "with lanes sums have one order, and this route another: leave out lanes or route",
        lambda s: s.lanes > 1 and s.route == "hierarchical",
    ),
    _because(
        "schedule orders the stages of a pipeline: add pipeline=2",
        lambda s: s.pipeline == 1 and s.schedule != "gpipe",
    ),
)


def num_ranks(strategy: Strategy) -> int:
    """How many processes a strategy with its replicas filled in runs on."""
    return (strategy.replicas or 1) * strategy.ranks_per_replica + strategy.servers


def _sharers(strategy: Strategy) -> str:
    shard = f" x shard={strategy.shard}" if strategy.shard > 1 else ""
    lanes = f" x lanes={strategy.lanes}" if _shard_lanes(strategy) > 1 else ""
    return f"replicas={strategy.replicas}{shard}{lanes}"


def _shard_lanes(strategy: Strategy) -> int:
    """Lanes that run shards of their own; those that are stages run the same."""
    return strategy.lanes if strategy.pipeline == 1 else 1


def _fewer(processes: int) -> str:
    return f"start at most {processes} processes" if processes else "take fewer lanes"


def _explain_ranks(strategy: Strategy, place: _Place) -> str:
    degrees = {"replicas": strategy.replicas, **strategy.degrees}
    names = ("replicas", "shard", "tensor", "pipeline", "context")
    terms = {name: degrees[name] or 1 for name in names}
    product = " x ".join(f"{name}={n}" for name, n in terms.items() if name == "replicas" or n > 1)
    servers = f" + servers={strategy.servers}" if strategy.servers else ""
    return f"{product}{servers} needs {num_ranks(strategy)} processes, and there are {place.processes}"


_RULES = (
    *(_not_built(field, built, meaning) for field, (built, meaning) in _BUILT.items()),
    *_COMBINATIONS,
    _Rule(lambda strategy, place: num_ranks(strategy) != place.processes, _explain_ranks),
    _Rule(
        lambda strategy, place: (
            (strategy.replicas or 1) * strategy.shard * _shard_lanes(strategy) > place.shards
        ),
        lambda strategy, place: (
            f"{_sharers(strategy)} is more than batch.shards={place.shards}, so a rank would have no work:"
            f" {_fewer(place.shards // _shard_lanes(strategy))} or raise batch.shards"
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
        next_step=f'the nearest that works is "{answer.nearest}" on {num_ranks(answer.nearest)} processes',
    )


def _fill(strategy: Strategy, processes: int) -> Strategy:
    if strategy.replicas is not None:
        return strategy
    return strategy.replace(replicas=max(1, (processes - strategy.servers) // strategy.ranks_per_replica))
