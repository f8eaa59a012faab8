"""Whether a strategy works here, and if not, why not and what does: asked before any process starts.

Invariant: one pure function over one table of rules. A rule that is kept adds no text, so the
reasons of a refusal are all its reasons. What is not built is refused, never replaced by something near.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from itertools import pairwise
from typing import NamedTuple

from paceline.errors import StrategyError
from paceline.recipe.channel_words import PLAIN, ChannelSpec, has_channel
from paceline.recipe.nearest import nearest_supported
from paceline.recipe.phases import phases_of
from paceline.recipe.specs import CodecSpec, RouteSpec, ScheduleSpec, Spec, SyncSpec, known
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
    called: str


class _Rule(NamedTuple):
    """A reason to refuse; both functions take the strategy with its replicas filled in."""

    broken: Callable[[Strategy, _Place], bool]
    reason: Callable[[Strategy, _Place], str]


def _word_not_built(kind: type[Spec], described: Callable[[Strategy], Spec], meaning: str) -> _Rule:
    def reason(strategy: Strategy, place: _Place) -> str:
        words = sorted(spec.word for spec in known(kind).values() if spec.is_built)
        return _not_built(strategy, kind.choice, words, meaning)

    return _Rule(lambda strategy, place: not described(strategy).is_built, reason)


def _not_built(strategy: Strategy, field: str, built: Sequence[str], meaning: str) -> str:
    return (
        f"{field}={getattr(strategy, field)} is not built yet, only {field}={' or '.join(built)} ({meaning})"
    )


def _because(reason: str, broken: Callable[[Strategy], bool]) -> _Rule:
    return _Rule(lambda strategy, place: broken(strategy), lambda strategy, place: reason)


def _refusals(strategy: Strategy) -> list[str]:
    """What the words themselves do not go with."""
    specs: list[Spec] = [strategy.rule, strategy.form, strategy.path, strategy.carrier, strategy.order]
    specs += strategy.cuts
    return [refusal.reason for spec in specs for refusal in spec.refusals if refusal.holds(strategy)]


def _is_chain(strategy: Strategy) -> bool:
    """Whether every codec can stand behind the one before it."""
    specs = [spec for spec, _ in strategy.links]
    ends = all(spec.after != "bytes" for spec in specs[:-1])
    joins = all(spec.word != "fp32" and not spec.summed and not spec.chooses for spec in specs)
    firsts = joins or len(specs) == 1
    return ends and firsts and all(b.goes_after(a) for a, b in pairwise(specs))


_COMBINATIONS = (
    _because("shard without zero shares nothing: add zero=1", lambda s: s.shard > 1 and not s.zero),
    _because("zero shares state among shard ranks: add shard=2", lambda s: s.zero > 0 and s.shard == 1),
    _because(
        "in a chain of codecs topk or randomk comes first, then one that codes the values they keep, and"
        " lossless last, as in topk:0.01+int4+lossless",
        lambda s: not _is_chain(s),
    ),
    _because(
        "replicas that hand on whole models must be whole on one rank: leave out shard, tensor and pipeline",
        lambda s: s.rule.whole_replicas and s.ranks_per_replica > 1,
    ),
    _because(
        "this rule sums nothing over replicas, so there is nothing to route: leave out route",
        lambda s: not s.path.by_default and not s.rule.sums,
    ),
    _because(
        "this rule sends no messages from rank to rank: leave out channel",
        lambda s: s.channel != PLAIN and not has_channel(s.rule),
    ),
    _because(
        "this route sends no bytes, so a codec has no effect: leave out codec or route",
        lambda s: s.path.coded == 0 and s.codec != "fp32",
    ),
    _because("this rule needs a server: add servers=1", lambda s: s.servers < s.rule.needs_server),
    _because(
        "this rule uses no server: leave out servers",
        lambda s: s.servers > s.rule.needs_server == 0,
    ),
    _because(
        "lanes need an exact sync and an exact codec: leave out lanes, or change sync or codec",
        lambda s: s.lanes > 1 and s.is_approximate,
    ),
    _because(
        "with lanes and pipeline, each stage is a lane: set lanes equal to pipeline, or lanes=1",
        lambda s: s.lanes > 1 < s.pipeline != s.lanes,
    ),
    _because(
        "lanes sum in a fixed order, and this route in another: leave out lanes or route",
        lambda s: s.lanes > 1 and s.path.any_order,
    ),
    _because(
        "lanes run copies of the modules around whole parameters: leave out lanes, or tensor and zero=3",
        lambda s: s.lanes > 1 and (s.tensor > 1 or s.zero == 3),
    ),
    _because(
        "balance=speed deals the shards of every-step, hogwild:S or gossip:S to whole replicas: leave out"
        " balance, or another sync, lanes, shard, tensor and pipeline",
        lambda s: (
            s.balance == "speed"
            and (s.ranks_per_replica > 1 or s.lanes > 1 or not s.rule.deals(s) or bool(s.cut))
        ),
    ),
    _because(
        "partition says how tensors are cut for several servers: add servers=2",
        lambda s: s.servers < 2 and s.partition != "fixed",
    ),
    _because(
        "stages says how a pipeline is cut: add pipeline=2",
        lambda s: s.pipeline == 1 and s.stages != "parameters",
    ),
    _because(
        "stages that are lanes of one process are even in parameters: leave out lanes or stages",
        lambda s: s.lanes > 1 and s.stages != "parameters",
    ),
    _because(
        "schedule orders the stages of a pipeline: add pipeline=2",
        lambda s: s.pipeline == 1 and s.schedule != "gpipe",
    ),
)


def num_ranks(strategy: Strategy) -> int:
    """How many processes a strategy with its replicas filled in runs on."""
    return (strategy.replicas or 1) * strategy.ranks_per_replica + strategy.servers


def num_sharers(strategy: Strategy) -> int:
    """Ranks, and lanes that are no stages, that run samples of their own."""
    lanes = strategy.lanes if strategy.pipeline == 1 else 1
    return (strategy.replicas or 1) * strategy.shard * lanes


def _sharers(strategy: Strategy) -> str:
    shard = f" x shard={strategy.shard}" if strategy.shard > 1 else ""
    lanes = f" x lanes={strategy.lanes}" if strategy.lanes > 1 == strategy.pipeline else ""
    return f"replicas={strategy.replicas}{shard}{lanes}"


def _explain_shards(strategy: Strategy, place: _Place) -> str:
    lanes = strategy.lanes if strategy.pipeline == 1 else 1
    processes = place.shards // lanes
    fewer = f"start at most {processes} processes" if processes else "take fewer lanes"
    return (
        f"{_sharers(strategy)} is more than {place.called}={place.shards}, so a rank would have no work:"
        f" {fewer} or raise {place.called.split()[0]}"
    )


def _explain_ranks(strategy: Strategy, place: _Place) -> str:
    degrees = {"replicas": strategy.replicas, **strategy.degrees}
    names = ("replicas", "shard", "tensor", "pipeline", "context")
    terms = {name: degrees[name] or 1 for name in names}
    product = " x ".join(f"{name}={n}" for name, n in terms.items() if name == "replicas" or n > 1)
    servers = f" + servers={strategy.servers}" if strategy.servers else ""
    return f"{product}{servers} needs {num_ranks(strategy)} processes, and there are {place.processes}"


_RULES = (
    _word_not_built(SyncSpec, lambda s: s.rule, "see `paceline strategies`"),
    _word_not_built(CodecSpec, lambda s: s.form, "the form of what travels"),
    _word_not_built(RouteSpec, lambda s: s.path, "the path on which it travels"),
    _word_not_built(ChannelSpec, lambda s: s.carrier, "what carries messages"),
    _word_not_built(ScheduleSpec, lambda s: s.order, "the order of a stage's micro-batches"),
    *_COMBINATIONS,
    _Rule(lambda strategy, place: num_ranks(strategy) != place.processes, _explain_ranks),
    _Rule(lambda strategy, place: num_sharers(strategy) > place.shards, _explain_shards),
)


def support(strategy: Strategy, *, processes: int, shards: int, called: str = "batch.shards") -> Support:
    """Say whether `strategy` runs on this many processes with a batch cut into this many shards.

    Args:
        strategy: any valid strategy; `replicas=None` takes all processes that are left.
        processes: the world size, at least 1.
        shards: virtual shards of the global batch, the most that there can be, at least 1.
        called: the key of the recipe that says so.
    """
    filled = fill(strategy, processes)
    place = _Place(processes, shards, called)
    reasons = list(dict.fromkeys(_reasons(filled, place)))
    if not reasons:
        return Support(True, "", filled)
    nearest = nearest_supported(filled, processes, shards, lambda other: not any(_reasons(other, place)))
    return Support(False, "; ".join(reasons), nearest)


def _reasons(filled: Strategy, place: _Place) -> Iterator[str]:
    yield from (rule.reason(filled, place) for rule in _RULES if rule.broken(filled, place))
    yield from _refusals(filled)
    phases = phases_of(filled.sync)
    each_rule = [filled.under(phase.rule) for phase in phases] if len(phases) > 1 else []
    others = filled.alternatives
    for one in [*(others if len(others) > 1 else ()), *each_rule]:
        yield from _reasons(one, place)


def resolve(strategy: Strategy, *, processes: int, shards: int, called: str = "batch.shards") -> Strategy:
    """The strategy with its replicas filled in.

    Raises:
        StrategyError: it is not supported; gives the reason and the nearest that is.
    """
    answer = support(strategy, processes=processes, shards=shards, called=called)
    if answer.ok:
        return answer.nearest
    raise StrategyError(
        answer.reason,
        where=f'strategy "{strategy}" on {processes} processes',
        next_step=f'the nearest that works is "{answer.nearest}" on {num_ranks(answer.nearest)} processes',
    )


def fill(strategy: Strategy, processes: int) -> Strategy:
    """With as many replicas as there are processes for, if it leaves them open."""
    if strategy.replicas is not None:
        return strategy
    return strategy.replace(replicas=max(1, (processes - strategy.servers) // strategy.ranks_per_replica))
