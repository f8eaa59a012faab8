"""The supported strategy that is nearest to one that is not. Pure.

Whether a strategy works here, and if not, why not and what does: asked before any process starts.

Invariant: one pure function over one table of rules. A rule that is kept adds no text, so the
reasons of a refusal are all its reasons. What is not built is refused, never replaced by something near.

Where a model lies that is not trained: what of a strategy's words an evaluation keeps.

The table of strategies: every preset and every word, each with its answer.

Every layout of so many ranks, and whether it runs: what `paceline strategies --ranks N` prints.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from itertools import combinations, pairwise, product
from typing import Any, NamedTuple

from paceline.errors import StrategyError
from paceline.recipe.registry.route_specs import DEFAULT_CHANNEL, ChannelSpec, uses_channel
from paceline.recipe.registry.word_spec import (
    CodecSpec,
    LayoutSpec,
    RouteSpec,
    ScheduleSpec,
    SyncSpec,
    WordSpec,
    known_specs,
    plugin_specs,
)
from paceline.recipe.strategy import Strategy
from paceline.recipe.strategy_text import PRESETS, phases_of

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
_LOST_STAGES_COST = 10
_MAX_CHANGES = 3


def nearest_supported(
    filled: Strategy, processes: int, shards: int, fits: Callable[[Strategy], bool]
) -> Strategy:
    """The supported strategy that changes least on as many processes; if none, plain replicas on fewer."""
    staged = filled.schedule != Strategy.model_fields["schedule"].default  # an order of stages was asked for
    filled = _replace_unbuilt_words(filled)
    choices = {field: options for field in _COSTS if (options := _options(filled, field, processes))}
    for changes in range(_MAX_CHANGES + 1):
        found: list[tuple[int, int, Strategy]] = []
        for fields in combinations(choices, changes):
            cost = sum(_COSTS[field] for field in fields)
            for values in product(*(choices[field] for field in fields)):
                candidate = _refill_replicas(
                    filled.replace(**dict(zip(fields, values, strict=True))), processes
                )
                if fits(candidate):
                    lost = _LOST_STAGES_COST if staged and candidate.pipeline == 1 else 0
                    found.append((cost + lost, len(found), candidate))
        if found:
            return min(found)[2]
    return Strategy(replicas=min(processes, shards))


def cost_change(now: Strategy, other: Strategy) -> int:
    """How much a user would give up."""
    changed = [field for field in _COSTS if getattr(now, field) != getattr(other, field)]
    return sum(_COSTS[field] for field in changed)


def _replace_unbuilt_words(strategy: Strategy) -> Strategy:
    """Without the words of its wire that are not built, which cannot be kept whatever else changes."""
    described = {
        "codec": strategy.form,
        "route": strategy.path,
        "channel": strategy.channel_spec,
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
        words = (spec for spec in known_specs(SyncSpec).values() if spec.is_built)
        values = [spec.example for spec in words if bool(spec.needs_server) == bool(strategy.servers)][:3]
    elif field == "schedule":
        values = [
            spec.example
            for spec in known_specs(ScheduleSpec).values()
            if spec.is_built and spec.word != "file"
        ]
    else:
        values = [default]
    return [value for value in values if value != now]


def _refill_replicas(candidate: Strategy, processes: int) -> Strategy:
    """With as many replicas as fill the processes."""
    replicas = max(1, (processes - candidate.servers) // candidate.ranks_per_replica)
    return candidate if candidate.replicas == replicas else candidate.replace(replicas=replicas)


class SupportResult(NamedTuple):
    """The answer for one strategy.

    Args:
        ok: it can run.
        reason: why not, in one line; empty if it can.
        nearest: the strategy to run: this one with its replicas filled in, or the nearest that works.
    """

    ok: bool
    reason: str
    nearest: Strategy


class _Resources(NamedTuple):
    processes: int
    shards: int
    called: str


class _RefusalRule(NamedTuple):
    """A reason to refuse; both functions take the strategy with its replicas filled in."""

    broken: Callable[[Strategy, _Resources], bool]
    reason: Callable[[Strategy, _Resources], str]


def _word_not_built(
    kind: type[WordSpec], described: Callable[[Strategy], WordSpec], meaning: str
) -> _RefusalRule:
    def reason(strategy: Strategy, place: _Resources) -> str:
        words = sorted(spec.word for spec in known_specs(kind).values() if spec.is_built)
        return _not_built(strategy, kind.choice, words, meaning)

    return _RefusalRule(lambda strategy, place: not described(strategy).is_built, reason)


def _not_built(strategy: Strategy, field: str, built: Sequence[str], meaning: str) -> str:
    return (
        f"{field}={getattr(strategy, field)} is not built yet, only {field}={' or '.join(built)} ({meaning})"
    )


def _refusal_rule(reason: str, broken: Callable[[Strategy], bool]) -> _RefusalRule:
    return _RefusalRule(lambda strategy, place: broken(strategy), lambda strategy, place: reason)


def _refusals(strategy: Strategy) -> list[str]:
    """What the words themselves do not go with."""
    specs: list[WordSpec] = [
        strategy.rule,
        strategy.form,
        strategy.path,
        strategy.channel_spec,
        strategy.order,
    ]
    specs += strategy.cuts
    return [refusal.reason for spec in specs for refusal in spec.refusals if refusal.holds(strategy)]


def _is_chain(strategy: Strategy) -> bool:
    """Whether every codec can stand behind the one before it."""
    specs = [spec for spec, _ in strategy.links]
    ends = all(spec.after != "bytes" for spec in specs[:-1])
    joins = all(spec.word != "fp32" and not spec.summed and not spec.chooses for spec in specs)
    firsts = joins or len(specs) == 1
    return ends and firsts and all(b.can_follow(a) for a, b in pairwise(specs))


_COMBINATIONS = (
    _refusal_rule("shard without zero shares nothing: add zero=1", lambda s: s.shard > 1 and not s.zero),
    _refusal_rule("zero shares state among shard ranks: add shard=2", lambda s: s.zero > 0 and s.shard == 1),
    _refusal_rule(
        "in a chain of codecs topk or randomk comes first, then one that codes the values they keep, and"
        " lossless last, as in topk:0.01+int4+lossless",
        lambda s: not _is_chain(s),
    ),
    _refusal_rule(
        "replicas that hand on whole models must be whole on one rank: leave out shard, tensor and pipeline",
        lambda s: s.rule.needs_whole_replicas and s.ranks_per_replica > 1,
    ),
    _refusal_rule(
        "this rule sums nothing over replicas, so there is nothing to route: leave out route",
        lambda s: not s.path.by_default and not s.rule.sums,
    ),
    _refusal_rule(
        "this rule sends no messages from rank to rank: leave out channel",
        lambda s: s.channel != DEFAULT_CHANNEL and not uses_channel(s.rule),
    ),
    _refusal_rule(
        "this route sends no bytes, so a codec has no effect: leave out codec or route",
        lambda s: s.path.coded == 0 and s.codec != "fp32",
    ),
    _refusal_rule("this rule needs a server: add servers=1", lambda s: s.servers < s.rule.needs_server),
    _refusal_rule(
        "this rule uses no server: leave out servers",
        lambda s: s.servers > s.rule.needs_server == 0,
    ),
    _refusal_rule(
        "lanes need an exact sync and an exact codec: leave out lanes, or change sync or codec",
        lambda s: s.lanes > 1 and s.is_approximate,
    ),
    _refusal_rule(
        "with lanes and pipeline, each stage is a lane: set lanes equal to pipeline, or lanes=1",
        lambda s: s.lanes > 1 < s.pipeline != s.lanes,
    ),
    _refusal_rule(
        "lanes sum in a fixed order, and this route in another: leave out lanes or route",
        lambda s: s.lanes > 1 and s.path.any_order,
    ),
    _refusal_rule(
        "lanes run copies of the modules around whole parameters: leave out lanes, or tensor and zero=3",
        lambda s: s.lanes > 1 and (s.tensor > 1 or s.zero == 3),
    ),
    _refusal_rule(
        "balance=speed deals the shards of every-step, hogwild:S or gossip:S to whole replicas: leave out"
        " balance, or another sync, lanes, shard, tensor and pipeline",
        lambda s: (
            s.balance == "speed"
            and (s.ranks_per_replica > 1 or s.lanes > 1 or not s.rule.deals(s) or bool(s.cut))
        ),
    ),
    _refusal_rule(
        "partition says how tensors are cut for several servers: add servers=2",
        lambda s: s.servers < 2 and s.partition != "fixed",
    ),
    _refusal_rule(
        "stages says how a pipeline is cut: add pipeline=2",
        lambda s: s.pipeline == 1 and s.stages != "parameters",
    ),
    _refusal_rule(
        "stages that are lanes of one process are even in parameters: leave out lanes or stages",
        lambda s: s.lanes > 1 and s.stages != "parameters",
    ),
    _refusal_rule(
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


def _sharers_text(strategy: Strategy) -> str:
    shard = f" x shard={strategy.shard}" if strategy.shard > 1 else ""
    lanes = f" x lanes={strategy.lanes}" if strategy.lanes > 1 == strategy.pipeline else ""
    return f"replicas={strategy.replicas}{shard}{lanes}"


def _explain_shards(strategy: Strategy, place: _Resources) -> str:
    lanes = strategy.lanes if strategy.pipeline == 1 else 1
    processes = place.shards // lanes
    fewer = f"start at most {processes} processes" if processes else "take fewer lanes"
    return (
        f"{_sharers_text(strategy)} is more than {place.called}={place.shards}, so a rank would have no work:"
        f" {fewer} or raise {place.called.split()[0]}"
    )


def _explain_ranks(strategy: Strategy, place: _Resources) -> str:
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
    _word_not_built(ChannelSpec, lambda s: s.channel_spec, "what carries messages"),
    _word_not_built(ScheduleSpec, lambda s: s.order, "the order of a stage's micro-batches"),
    *_COMBINATIONS,
    _RefusalRule(lambda strategy, place: num_ranks(strategy) != place.processes, _explain_ranks),
    _RefusalRule(lambda strategy, place: num_sharers(strategy) > place.shards, _explain_shards),
)


def support(
    strategy: Strategy, *, processes: int, shards: int, called: str = "batch.shards"
) -> SupportResult:
    """Say whether `strategy` runs on this many processes with a batch cut into this many shards.

    Args:
        strategy: any valid strategy; `replicas=None` takes all processes that are left.
        processes: the world size, at least 1.
        shards: virtual shards of the global batch, the most that there can be, at least 1.
        called: the key of the recipe that says so.
    """
    filled = fill_replicas(strategy, processes)
    place = _Resources(processes, shards, called)
    reasons = list(dict.fromkeys(_reasons(filled, place)))
    if not reasons:
        return SupportResult(True, "", filled)
    nearest = nearest_supported(filled, processes, shards, lambda other: not any(_reasons(other, place)))
    return SupportResult(False, "; ".join(reasons), nearest)


def _reasons(filled: Strategy, place: _Resources) -> Iterator[str]:
    yield from (rule.reason(filled, place) for rule in _RULES if rule.broken(filled, place))
    yield from _refusals(filled)
    phases = phases_of(filled.sync)
    each_rule = [filled.under(phase.rule) for phase in phases] if len(phases) > 1 else []
    others = filled.codec_alternatives
    for one in [*(others if len(others) > 1 else ()), *each_rule]:
        yield from _reasons(one, place)


def resolve_strategy(
    strategy: Strategy, *, processes: int, shards: int, called: str = "batch.shards"
) -> Strategy:
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


def fill_replicas(strategy: Strategy, processes: int) -> Strategy:
    """With as many replicas as there are processes for, if it leaves them open."""
    if strategy.replicas is not None:
        return strategy
    return strategy.replace(replicas=max(1, (processes - strategy.servers) // strategy.ranks_per_replica))


_INFERENCE_FIELDS = ("tensor", "context", "cut")


def inference_strategy(strategy: Strategy) -> Strategy:
    """The layout alone: how the weights of one model are split over ranks, and replicas of that.

    Stages in threads of one process, and shards of optimizer and gradients alone, split no weights.
    """
    kept = {name: getattr(strategy, name) for name in _INFERENCE_FIELDS}
    if strategy.zero == 3:
        kept |= {"shard": strategy.shard, "zero": 3}
    if strategy.lanes == 1:
        stages = "parameters" if strategy.stages == "time" else strategy.stages  # nothing is measured again
        kept |= {"pipeline": strategy.pipeline, "stages": stages}
    return Strategy(**kept)


def resolve_inference_strategy(run: Strategy, asked: str | None, processes: int) -> Strategy:
    """How the weights of a run lie on so many processes.

    Args:
        run: the strategy that it was trained under.
        asked: in place of its layout; None: that, or, on one process, all of it.
    Raises:
        StrategyError: the words or the number of processes do not go together, or some of them train.
    """
    if asked is None:
        chosen = Strategy() if processes == 1 else inference_strategy(run)
    else:
        chosen = Strategy.parse(asked)
        if chosen.servers or chosen.sync != "every-step":
            raise StrategyError(
                f"'{asked}' says how replicas agree while they train, and nothing is trained",
                next_step=f'--strategy "{inference_strategy(chosen)}"',
            )
    return resolve_strategy(chosen, processes=processes, shards=processes, called="the processes")


_CHOICES: tuple[type[WordSpec], ...] = (SyncSpec, CodecSpec, RouteSpec, ChannelSpec, ScheduleSpec)


class StrategyRow(NamedTuple):
    """One line of the table of strategies: `processes` is the smallest number that shows it."""

    name: str
    strategy: Strategy
    processes: int
    support: SupportResult


def list_strategies(*, shards: int = 8) -> tuple[StrategyRow, ...]:
    """Every preset and every word of the choices, each with its answer."""
    return tuple(_strategy_row(name, shards) for name in _names())


def _names() -> Iterator[str]:
    yield from PRESETS
    yield from ("tensor=2", "context=2", "lanes=2")
    for kind in _CHOICES:
        for spec in known_specs(kind).values():
            yield f"{spec.with_terms} {kind.choice}={spec.example}".strip()
    for spec in plugin_specs(LayoutSpec).values():
        yield f"{spec.with_terms} cut={spec.word}".strip()


def _strategy_row(name: str, shards: int) -> StrategyRow:
    strategy = Strategy.parse(name)
    smallest = strategy if strategy.replicas else strategy.replace(replicas=2)
    processes = num_ranks(smallest)
    return StrategyRow(name, strategy, processes, support(strategy, processes=processes, shards=shards))


_AXES = ("replicas", "shard", "tensor", "context", "pipeline")


def list_layouts(ranks: int) -> list[StrategyRow]:
    """Every way to lay a model out: replica x shard (with each `zero`) x tensor x context x pipeline.

    Whether one runs is asked with one micro-batch for each rank; plain replicas come first.
    """
    found = []
    for degrees in sorted(_factorizations(ranks, len(_AXES)), reverse=True):
        named = dict(zip(_AXES, degrees, strict=True))
        for zero in (1, 2, 3) if named["shard"] > 1 else (0,):
            strategy = Strategy.model_validate(named | {"zero": zero})
            answer = support(strategy, processes=ranks, shards=ranks)
            found.append(StrategyRow(_degrees_text(strategy), strategy, ranks, answer))
    return found


def _degrees_text(strategy: Strategy) -> str:
    """Its degrees above one, as they are written."""
    terms = {name: getattr(strategy, name) for name in (*_AXES[:2], "zero", *_AXES[2:])}
    return " ".join(f"{name}={n}" for name, n in terms.items() if name == "replicas" or n > (name != "zero"))


def _factorizations(number: int, length: int) -> Iterator[tuple[int, ...]]:
    """Every ordered product of so many integers that makes a number."""
    if length == 1:
        yield (number,)
        return
    for first in range(1, number + 1):
        if number % first == 0:
            for rest in _factorizations(number // first, length - 1):
                yield (first, *rest)
