"""Which strategies run on a number of processes, why others do not, and the nearest strategy that does.

`support` is asked before any process starts. It collects the reasons of all rules: words that are not
implemented, needs of fields (`recipe.constraints`), refusals of words (`recipe.registry`), combinations,
and the numbers of ranks and shards. On top of it are the searches for the nearest supported strategy, for
the layout of an evaluation, and the tables that `paceline strategies` prints.

Invariant: pure functions over one list of rules, so the reasons of a refusal are all its reasons. A word
that is not implemented is refused, never replaced by a similar one.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from itertools import combinations, pairwise, product
from typing import Any, NamedTuple

from paceline.errors import StrategyError, format_count
from paceline.recipe.registry import (
    ChannelSpec,
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
from paceline.recipe.validation import find_unmet_needs

_COSTS = {  # of a change, by field: the higher, the more a user loses with it
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
    "storage": 2,
    "shard": 3,
    "codec": 4,
    "context": 5,
    "tensor": 4,
    "pipeline": 5,
    "sync": 6,
}
_LOST_STAGES_COST = 10
_MAX_CHANGES = 3  # fields; with a fourth the search takes seconds


def nearest_supported(
    filled: Strategy, processes: int, shards: int, is_supported: Callable[[Strategy], bool]
) -> Strategy:
    """Return the supported strategy with the cheapest changes; if there is none, plain replicas.

    Args:
        filled: the strategy, with its replicas filled in.
        processes: of the job. The result runs on as many, except for plain replicas with fewer shards.
        shards: the most ranks that can share a batch.
        is_supported: tests a candidate.
    """
    has_schedule = filled.is_set("schedule")  # such a user wants a pipeline
    filled = _replace_unbuilt_words(filled)
    choices = {field: options for field in _COSTS if (options := _options(filled, field, processes))}
    for num_changes in range(_MAX_CHANGES + 1):
        candidates: list[tuple[int, int, Strategy]] = []
        for fields in combinations(choices, num_changes):
            cost = sum(_COSTS[field] for field in fields)
            for values in product(*(choices[field] for field in fields)):
                changed = filled.replace(**dict(zip(fields, values, strict=True)))
                candidate = _refill_replicas(changed, processes)
                if is_supported(candidate):
                    lost_stages_cost = _LOST_STAGES_COST if has_schedule and candidate.pipeline == 1 else 0
                    candidates.append((cost + lost_stages_cost, len(candidates), candidate))
        if candidates:
            return min(candidates)[2]  # of equal costs the first
    return Strategy(replicas=min(processes, shards))


def cost_change(before: Strategy, after: Strategy) -> int:
    """Return how much a user loses with a change of strategy."""
    changed = [field for field in _COSTS if getattr(before, field) != getattr(after, field)]
    return sum(_COSTS[field] for field in changed)


def _replace_unbuilt_words(strategy: Strategy) -> Strategy:
    """Replace words that are not implemented by the defaults; no other change could keep them."""
    specs = {
        "codec": strategy.codec_spec,
        "route": strategy.route_spec,
        "channel": strategy.channel_spec,
        "schedule": strategy.schedule_spec,
    }
    fields = Strategy.model_fields
    return strategy.replace(
        **{name: fields[name].default for name, spec in specs.items() if not spec.is_built}
    )


def _options(strategy: Strategy, field: str, processes: int) -> list[Any]:
    """Return other values of a field, the likeliest first."""
    current, default = getattr(strategy, field), Strategy.model_fields[field].default
    values: list[Any]
    if field == "servers":
        values = [strategy.sync_spec.needs_server]
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
            if spec.is_built and not spec.reads_file
        ]
    else:
        values = [default]
    return [value for value in values if value != current]


def _refill_replicas(candidate: Strategy, processes: int) -> Strategy:
    """Return the candidate with as many replicas as fill the processes."""
    replicas = max(1, (processes - candidate.servers) // candidate.ranks_per_replica)
    return candidate if candidate.replicas == replicas else candidate.replace(replicas=replicas)


class SupportResult(NamedTuple):
    """The answer of `support` for one strategy.

    Args:
        ok: it can run.
        reason: why not, in one line; empty if it can.
        nearest: the strategy to run: this one with its replicas filled in, or the nearest that is supported.
    """

    ok: bool
    reason: str
    nearest: Strategy


class _Resources(NamedTuple):
    """The processes of a job, the most ranks that can share a batch, and the recipe key that limits them."""

    processes: int
    shards: int
    limit_key: str


class _RefusalRule(NamedTuple):
    """A reason to refuse; both functions take the strategy with its replicas filled in."""

    is_broken: Callable[[Strategy, _Resources], bool]
    reason: Callable[[Strategy, _Resources], str]


def _word_not_built(
    kind: type[WordSpec], spec_of: Callable[[Strategy], WordSpec], meaning: str
) -> _RefusalRule:
    def reason(strategy: Strategy, resources: _Resources) -> str:
        words = sorted(spec.word for spec in known_specs(kind).values() if spec.is_built)
        return (
            f"{kind.choice}={getattr(strategy, kind.choice)} is not built yet, only {kind.choice}="
            f"{' or '.join(words)} ({meaning})"
        )

    return _RefusalRule(lambda strategy, resources: not spec_of(strategy).is_built, reason)


def _refusal_rule(reason: str, is_broken: Callable[[Strategy], bool]) -> _RefusalRule:
    return _RefusalRule(lambda strategy, _: is_broken(strategy), lambda strategy, _: reason)


def _word_refusals(strategy: Strategy) -> list[str]:
    """Return the reasons of words that do not support the combination."""
    specs: list[WordSpec] = [
        strategy.sync_spec,
        strategy.codec_spec,
        strategy.route_spec,
        strategy.channel_spec,
        strategy.schedule_spec,
        *strategy.cuts,
    ]
    return [refusal.reason for spec in specs for refusal in spec.refusals if refusal.holds(strategy)]


def _is_chain(strategy: Strategy) -> bool:
    """Return whether every codec can follow the one before it."""
    specs = [word.spec for word in strategy.codec_words]
    bytes_come_last = all(spec.after != "bytes" for spec in specs[:-1])
    can_be_joined = all(not (spec.is_identity or spec.summed or spec.chooses) for spec in specs)
    pairs_fit = all(later.can_follow(earlier) for earlier, later in pairwise(specs))
    return bytes_come_last and (can_be_joined or len(specs) == 1) and pairs_fit


_COMBINATIONS = (
    _refusal_rule(
        "in a chain of codecs topk or randomk comes first, then one that codes the values they keep, and"
        " lossless last, as in topk:0.01+int4+lossless",
        lambda s: not _is_chain(s),
    ),
    _refusal_rule(
        "replicas that send each other whole models must be whole on one rank: leave out shard, tensor and"
        " pipeline",
        lambda s: s.sync_spec.needs_whole_replicas and s.ranks_per_replica > 1,
    ),
    _refusal_rule("this rule needs a server: add servers=1", lambda s: s.servers < s.sync_spec.needs_server),
    _refusal_rule(
        "this rule uses no server: leave out servers",
        lambda s: s.servers > s.sync_spec.needs_server == 0,
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
        lambda s: s.lanes > 1 and s.route_spec.has_own_sum_order,
    ),
    _refusal_rule(
        "lanes run copies of the modules around whole parameters: leave out lanes, or tensor and zero=3",
        lambda s: s.lanes > 1 and (s.tensor > 1 or s.zero == 3),
    ),
    _refusal_rule(
        "stages that are lanes of one process have equal parameters: leave out lanes or stages",
        lambda s: s.lanes > 1 and s.is_set("stages"),
    ),
)


def num_ranks(strategy: Strategy) -> int:
    """Return the number of processes of a strategy with its replicas filled in."""
    return (strategy.replicas or 1) * strategy.ranks_per_replica + strategy.servers


def num_sharers(strategy: Strategy) -> int:
    """Return how many ranks, and lanes that are no stages, run samples of their own."""
    lanes = strategy.lanes if strategy.pipeline == 1 else 1
    if strategy.sync_spec.learns_alone:
        return lanes
    return (strategy.replicas or 1) * strategy.shard * lanes


def _sharers_text(strategy: Strategy) -> str:
    shard = f" x shard={strategy.shard}" if strategy.shard > 1 else ""
    lanes = f" x lanes={strategy.lanes}" if strategy.lanes > 1 == strategy.pipeline else ""
    return f"replicas={strategy.replicas}{shard}{lanes}"


def _explain_shards(strategy: Strategy, resources: _Resources) -> str:
    lanes = strategy.lanes if strategy.pipeline == 1 else 1
    processes, key = resources.shards // lanes, resources.limit_key
    fewer = f"start at most {format_count(processes, 'process')}" if processes else "take fewer lanes"
    return (
        f"{_sharers_text(strategy)} is more than {key}={resources.shards}, so a rank would have no work:"
        f" {fewer} or raise {key.split()[0]}"
    )


def _explain_ranks(strategy: Strategy, resources: _Resources) -> str:
    degrees = {"replicas": strategy.replicas, **strategy.degrees}
    names = ("replicas", "shard", "tensor", "pipeline", "context")
    terms = {name: degrees[name] or 1 for name in names}
    product = " x ".join(f"{name}={n}" for name, n in terms.items() if name == "replicas" or n > 1)
    servers = f" + servers={strategy.servers}" if strategy.servers else ""
    needed = num_ranks(strategy)
    return f"{product}{servers} needs {format_count(needed, 'process')}, and there are {resources.processes}"


_RULES = (
    _word_not_built(SyncSpec, lambda s: s.sync_spec, "see `paceline strategies`"),
    _word_not_built(CodecSpec, lambda s: s.codec_spec, "how values are encoded"),
    _word_not_built(RouteSpec, lambda s: s.route_spec, "the path of collectives"),
    _word_not_built(ChannelSpec, lambda s: s.channel_spec, "what carries messages"),
    _word_not_built(ScheduleSpec, lambda s: s.schedule_spec, "the order of a stage's micro-batches"),
    *_COMBINATIONS,
    _RefusalRule(lambda strategy, resources: num_ranks(strategy) != resources.processes, _explain_ranks),
    _RefusalRule(lambda strategy, resources: num_sharers(strategy) > resources.shards, _explain_shards),
)


def support(
    strategy: Strategy, *, processes: int, shards: int, limit_key: str = "batch.shards"
) -> SupportResult:
    """Return whether `strategy` runs on this many processes with a batch of this many shards.

    Args:
        strategy: any valid strategy; `replicas=None` takes all processes that are left.
        processes: the world size, at least 1.
        shards: the most micro-batches of the global batch, at least 1.
        limit_key: the key of the recipe that limits the shards.
    """
    filled = fill_replicas(strategy, processes)
    resources = _Resources(processes, shards, limit_key)
    reasons = list(dict.fromkeys(_reasons(filled, resources)))
    if not reasons:
        return SupportResult(True, "", filled)
    nearest = nearest_supported(filled, processes, shards, lambda other: not any(_reasons(other, resources)))
    return SupportResult(False, "; ".join(reasons), nearest)


def _reasons(filled: Strategy, resources: _Resources) -> Iterator[str]:
    """Yield the reasons against a strategy, each of its sync rules, and each codec that it may choose."""
    yield from (conflict.message for conflict in find_unmet_needs(filled, "strategy"))
    yield from (rule.reason(filled, resources) for rule in _RULES if rule.is_broken(filled, resources))
    yield from _word_refusals(filled)
    phases, codecs = phases_of(filled.sync), filled.codec_alternatives
    with_codec = codecs if len(codecs) > 1 else []
    with_rule = [filled.with_sync(phase.rule) for phase in phases] if len(phases) > 1 else []
    for alternative in (*with_codec, *with_rule):
        yield from _reasons(alternative, resources)


def resolve_strategy(
    strategy: Strategy, *, processes: int, shards: int, limit_key: str = "batch.shards"
) -> Strategy:
    """Return the strategy with its replicas filled in; the arguments are those of `support`.

    Raises:
        StrategyError: it is not supported; the error has the reason and the nearest strategy that is.
    """
    answer = support(strategy, processes=processes, shards=shards, limit_key=limit_key)
    if answer.ok:
        return answer.nearest
    raise StrategyError(
        answer.reason,
        where=f'strategy "{strategy}" on {format_count(processes, "process")}',
        next_step=f'the nearest supported strategy is "{answer.nearest}"'
        f" on {format_count(num_ranks(answer.nearest), 'process')}",
    )


def fill_replicas(strategy: Strategy, processes: int) -> Strategy:
    """Return the strategy with as many replicas as there are processes for, if it names no number; or, with
    `shard=all` or `pipeline=all`, with as many ranks of that axis.
    """
    if (axis := strategy.filled_axis) is not None:
        replicas = strategy.replicas or 1
        others = max(1, replicas * strategy.ranks_per_replica // getattr(strategy, axis))
        if axis == "pipeline" and strategy.lanes > 1:
            degree = strategy.lanes  # the stages are lanes of one process
        else:
            degree = max(2, (processes - strategy.servers) // others)
        return strategy.replace(replicas=replicas, fills="replicas", **{axis: degree})
    if strategy.replicas is not None:
        return strategy
    return strategy.replace(replicas=max(1, (processes - strategy.servers) // strategy.ranks_per_replica))


_INFERENCE_FIELDS = ("tensor", "context", "cut")


def inference_strategy(strategy: Strategy) -> Strategy:
    """Return the part of a strategy that matters without training: how weights are split, and replicas.

    Stages in threads of one process, and shards of optimizer state and gradients, split no weights.
    """
    terms = {name: getattr(strategy, name) for name in _INFERENCE_FIELDS}
    if strategy.zero == 3:
        terms |= {"shard": strategy.shard, "zero": 3}
    if strategy.lanes == 1:
        terms |= {"pipeline": strategy.pipeline}
        if not strategy.has_timed_stages:  # time is not measured again
            terms |= {"stages": strategy.stages}
    return Strategy(**terms)


def resolve_inference_strategy(run: Strategy, requested: str | None, processes: int) -> Strategy:
    """Return how the weights of a run are split over a number of processes for an evaluation.

    Args:
        run: the strategy of the training run.
        requested: a strategy in its place; None: the layout of the run, or the whole model on one process.
        processes: of the evaluation.
    Raises:
        StrategyError: the strategy does not fit the number of processes, or has terms about training.
    """
    if requested is None:
        chosen = Strategy() if processes == 1 else inference_strategy(run)
    else:
        chosen = Strategy.parse(requested)
        if chosen.servers or chosen.is_set("sync"):
            raise StrategyError(
                f"'{requested}' says how replicas agree in training, and an evaluation does not train",
                next_step=f'--strategy "{inference_strategy(chosen)}"',
            )
    return resolve_strategy(chosen, processes=processes, shards=processes, limit_key="the processes")


_CHOICES: tuple[type[WordSpec], ...] = (SyncSpec, CodecSpec, RouteSpec, ChannelSpec, ScheduleSpec)


class StrategyRow(NamedTuple):
    """One line of the table of strategies; `processes` is the smallest number that shows it."""

    name: str
    strategy: Strategy
    processes: int
    support: SupportResult


def list_strategies(*, shards: int = 8) -> tuple[StrategyRow, ...]:
    """Return every preset and every word of every kind, each with the answer of `support`."""
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
    """Return every layout of a number of ranks, with the answer of `support` for one micro-batch per rank.

    A layout is replica x shard (with each `zero`) x tensor x context x pipeline; plain replicas come first.
    """
    rows = []
    for degrees in sorted(_factorizations(ranks, len(_AXES)), reverse=True):
        terms = dict(zip(_AXES, degrees, strict=True))
        for zero in (1, 2, 3) if terms["shard"] > 1 else (0,):
            strategy = Strategy.model_validate(terms | {"zero": zero})
            answer = support(strategy, processes=ranks, shards=ranks)
            rows.append(StrategyRow(_degrees_text(strategy), strategy, ranks, answer))
    return rows


def _degrees_text(strategy: Strategy) -> str:
    """Return the degrees above one, as terms of a strategy."""
    terms = {name: getattr(strategy, name) for name in (*_AXES[:2], "zero", *_AXES[2:])}
    return " ".join(f"{name}={n}" for name, n in terms.items() if name == "replicas" or n > (name != "zero"))


def _factorizations(number: int, length: int) -> Iterator[tuple[int, ...]]:
    """Yield every ordered product of `length` integers that is `number`."""
    if length == 1:
        yield (number,)
        return
    for first in range(1, number + 1):
        if number % first == 0:
            for others in _factorizations(number // first, length - 1):
                yield (first, *others)
