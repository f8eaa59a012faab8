"""Names of strategies that users already know.

The text of a strategy as terms by name: `NAME=VALUE`, or a preset and terms that change it.

A run whose rule changes on the way: `sync = "every-step@1000,diloco:50"`, or a list of tables in a recipe.

A phase ends before a step, or (`every-step@straggler,backup:1`) where a rank is named as slow. Once that has
happened the step is known, and the run is one that was asked to switch there; so with the way back, and the
next time. Behind `auto:` stand the rules that a run may go on with once its first steps were measured.

Invariant: the text says everything; a list of tables is read as it. Pure.

The words of a strategy as users write them: each is known, and its argument fits.

Raises: what `value_error` makes of them; names the nearest right spelling.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator, Mapping, Sequence
from functools import lru_cache
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, NamedTuple

from paceline.pipeline_schedule.schedule_formats import schedule_word
from paceline.recipe.registry.route_specs import ChannelSpec
from paceline.recipe.registry.word_spec import (
    CodecSpec,
    LayoutSpec,
    RouteSpec,
    ScheduleSpec,
    StrategyRefusal,
    SyncSpec,
    WordSpec,
    find_spec,
    known_specs,
    plugin_specs,
)
from paceline.recipe.toml_text import closest_word, toml_value
from paceline.recipe.validation import KeyConflict, expected_message, value_error

if TYPE_CHECKING:
    from paceline.recipe.strategy import Strategy


class StrategyPreset(NamedTuple):
    """A name that users already know; where a degree has to be given it is the smallest, to be changed."""

    terms: str
    summary: str


PRESETS: Mapping[str, StrategyPreset] = MappingProxyType(
    {
        "ddp": StrategyPreset("replicas=all", "a whole model on every process, gradients averaged each step"),
        "fsdp": StrategyPreset("replicas=1 shard=2 zero=3", "one replica, all state sharded"),
        "hsdp": StrategyPreset("shard=2 zero=3", "several replicas, each sharded inside"),
        "zero1": StrategyPreset("shard=2 zero=1", "optimizer state sharded"),
        "zero2": StrategyPreset("shard=2 zero=2", "optimizer state and gradients sharded"),
        "zero3": StrategyPreset("shard=2 zero=3", "optimizer state, gradients and weights sharded"),
        "mirrored": StrategyPreset("replicas=all", "as ddp, on one machine"),
        "multi-worker-mirrored": StrategyPreset(
            "replicas=all route=hierarchical", "as ddp, on several machines, inside each first"
        ),
        "parameter-server": StrategyPreset("servers=1 sync=server", "workers push gradients to a server"),
        "central-storage": StrategyPreset(
            "replicas=1 shard=2 zero=3 route=shared-memory", "one copy of weights and moments on a machine"
        ),
        "hogwild": StrategyPreset("sync=hogwild", "lock-free updates of shared weights, on one machine"),
        "local-sgd": StrategyPreset("sync=local:8", "replicas train alone and average every 8 steps"),
        "diloco": StrategyPreset("sync=diloco:50", "local steps with an outer optimizer"),
        "pipedream": StrategyPreset(
            "replicas=1 pipeline=2 sync=pipedream", "stages that never wait for a flush"
        ),
        "gpipe": StrategyPreset("pipeline=2", "stages of layers, all forwards before all backwards"),
        "1f1b": StrategyPreset(
            "pipeline=2 schedule=1f1b", "stages of layers, forwards and backwards in turn"
        ),
        "3d": StrategyPreset("tensor=2 pipeline=2", "replicas x tensor x pipeline"),
        "auto": StrategyPreset("replicas=all", "what fits: today every process is a replica"),
    }
)


def read_terms(text: str, names: Collection[str]) -> dict[str, int | str]:
    """The terms of a text; `names` are those there are."""
    first, *rest = text.split() or [""]
    if not first:
        raise value_error('expected terms such as "replicas=2 sync=every-step" or a preset, found nothing')
    if "=" in first:
        return _parse_pairs([first, *rest])
    return {**_parse_pairs(_expand_preset(first, names).split()), **_parse_pairs(rest)}


def _expand_preset(name: str, names: Collection[str]) -> str:
    if name in PRESETS:
        return PRESETS[name].terms
    near = closest_word(name, (*PRESETS, *names))
    advice = f'did you mean "{near}"?' if near else f"expected NAME=VALUE or one of {', '.join(PRESETS)}"
    raise value_error(f"unknown preset {toml_value(name)}; {advice}")


def _parse_pairs(words: list[str]) -> dict[str, int | str]:
    pairs: dict[str, int | str] = {}
    for word in words:
        name, equals, value = word.partition("=")
        if not (name and equals and value):
            raise value_error(f"expected NAME=VALUE, found {toml_value(word)}")
        if name in pairs:
            raise value_error(f"{name} is given twice, {pairs[name]} and {value}")
        pairs[name] = int(value) if re.fullmatch(r"[+-]?[0-9]+", value) else value
    return pairs


_PHASES_EXAMPLE = (
    '"every-step@1000,diloco:50", or [{ until = 1000, rule = "every-step" }, { rule = "diloco:50" }]'
)
UNTIL_STRAGGLER = "straggler"
"""Ends a phase where a rank is named as slow."""
UNTIL_MEASURED = "sync"
"""Ends a phase where a rule is chosen by measuring."""
AUTO_PREFIX = "auto:"


def _can_be_last(strategy: Strategy) -> bool:
    last = strategy.rules[-1]
    return last.sums or last.sends or last.needs_server > 0


def _starts_local_on_event(strategy: Strategy) -> bool:
    """Whether something that happens decides when replicas begin to train alone."""
    waits = any(isinstance(phase.until, str) for phase in phases_of(strategy.sync))
    return waits and any(spec.agrees == "replica" for spec in strategy.rules)


_SWITCH_REFUSALS = (
    StrategyRefusal(
        "a run can switch between rules that sum over replicas (every-step, local and diloco), and at last to"
        " one of a server, or to gossip",
        lambda strategy: any(not spec.sums for spec in strategy.rules[:-1]) or not _can_be_last(strategy),
    ),
    StrategyRefusal(
        "replicas of several ranks are not followed until they keep up, nor is a rule chosen for them by"
        " measuring: name a step in place of @straggler or auto",
        lambda strategy: strategy.ranks_per_replica > 1 and _starts_local_on_event(strategy),
    ),
    StrategyRefusal(
        "a run can switch to one server, which holds all: set servers=1",
        lambda strategy: strategy.servers > 1,
    ),
)


class SyncPhase(NamedTuple):
    """A stretch of a run under one rule.

    Args:
        until: the step before which it ends; where a rank is named ("straggler"), or a rule is chosen
            ("sync"); None: the end of the run.
    """

    rule: str
    until: int | str | None

    @property
    def end(self) -> int | None:
        """The step before which it ends, as far as that is known."""
        return self.until if isinstance(self.until, int) else None


@lru_cache(maxsize=256)
def phases_of(text: str) -> tuple[SyncPhase, ...]:
    """The phases that a text names, in order; of rules to choose from, all.

    Raises:
        ValueError: steps do not ascend, or another phase than the last has no end.
    """
    if allowed := choices_of(text):
        return tuple(SyncPhase(rule, UNTIL_MEASURED) for rule in allowed)
    found = []
    for number, term in enumerate(terms := text.split(",")):
        rule, at, step = term.partition("@")
        is_last = number == len(terms) - 1
        waits = step == UNTIL_STRAGGLER and number == len(terms) - 2
        if bool(at) == is_last or (at and not waits and not (step.isascii() and step.isdigit())):
            raise value_error(
                expected_message(
                    f"a step behind each rule but the last, as in {_PHASES_EXAMPLE}, or {UNTIL_STRAGGLER} behind the last"
                    " but one",
                    text,
                )
            )
        if waits and rule != "every-step":
            raise value_error(
                expected_message(f"every-step before @{UNTIL_STRAGGLER}, which alone names it", text)
            )
        found.append(SyncPhase(rule, None if is_last else UNTIL_STRAGGLER if waits else int(step)))
    steps = [phase.end for phase in found if phase.end is not None]
    if steps != sorted({*steps}) or steps[:1] == [0]:
        raise value_error(expected_message("steps that ascend, from 1 on", text))
    return tuple(found)


def choices_of(text: str) -> tuple[str, ...]:
    """The rules that a run may choose from; empty: they are named."""
    return tuple(text.removeprefix(AUTO_PREFIX).split(",")) if text.startswith(AUTO_PREFIX) else ()


def phases_to_text(value: Any) -> Any:
    """A list of tables as a text; anything else as it is."""
    if not isinstance(value, list):
        return value
    terms = []
    for one in value:
        if not (isinstance(one, dict) and "rule" in one and one.keys() <= {"rule", "until"}):
            raise value_error(
                expected_message(f"tables of rule and until, as in {_PHASES_EXAMPLE}", str(one))
            )
        terms.append(f"{one['rule']}@{one['until']}" if "until" in one else str(one["rule"]))
    return ",".join(terms)


def phase_at_step(phases: Sequence[SyncPhase], step: int) -> SyncPhase:
    """The phase that a step belongs to."""
    return next(phase for phase in phases if phase.end is None or step < phase.end)


def resolve_phases(text: str, step: int, chosen: str = "") -> str:
    """The phases, once what one of them has waited for has happened before a step.

    Args:
        chosen: the rule, where some were allowed.
    """
    if allowed := choices_of(text):
        return chosen if chosen == allowed[0] else f"{allowed[0]}@{step},{chosen}"
    return text.replace(f"@{UNTIL_STRAGGLER}", f"@{step}")


def append_return(asked: str, found: str, step: int) -> str:
    """The phases, once the slow rank is as fast as others again: back, until the next one is slow."""
    return f"{found}@{step},{','.join(asked.split(',')[-2:])}"


def count_returns(asked: str, found: str) -> int:
    """How often a run has gone back."""
    return (len(phases_of(found)) - len(phases_of(asked))) // 2


def is_resolved_from(text: str, found: str) -> bool:
    """Whether phases are those of a text, of which it is known by now when they end, and what was chosen."""
    asked, known = phases_of(text), phases_of(found)
    if (allowed := choices_of(text)) and found != text:
        rules = [phase.rule for phase in known]
        return rules[0] == allowed[0] and len(rules) <= 2 and rules[-1] in allowed
    if asked[-2:-1] and asked[-2].until == UNTIL_STRAGGLER:  # the last two may have come again and again
        asked = (*asked, *asked[-2:] * count_returns(text, found))
    return len(asked) == len(known) and all(
        one.rule == other.rule and (one.until == other.until or not isinstance(one.until, int))
        for one, other in zip(asked, known, strict=True)
    )


def merge_sync_specs(specs: Sequence[SyncSpec]) -> SyncSpec:
    """What holds of a run that has all of these rules, one after another."""
    agrees = [spec.agrees for spec in specs]
    return SyncSpec(
        word="+".join(spec.word for spec in specs),
        build=specs[0].build if all(spec.is_built for spec in specs) else "",
        exact=all(spec.exact for spec in specs),
        agrees=next(a for a in ("nobody", "replica", "world") if a in agrees),
        shares_state=all(spec.shares_state for spec in specs),
        steady=all(spec.steady for spec in specs),
        needs_server=max(spec.needs_server for spec in specs),
        needs_whole_replicas=any(spec.needs_whole_replicas for spec in specs),
        sums=any(spec.sums for spec in specs),
        sends=any(spec.sends for spec in specs),
        reads=tuple(dict.fromkeys(table for spec in specs for table in spec.reads)),
        refusals=_SWITCH_REFUSALS,
    )


def switch_conflicts(
    text: str, rules: Sequence[SyncSpec], *, names_slow: bool, reads_ahead: bool
) -> Iterator[KeyConflict]:
    """What of a recipe would stop its run where it switches.

    Args:
        names_slow: a rank that is slow is named.
        reads_ahead: samples are read by processes of their own.
    """
    if any(phase.until == UNTIL_STRAGGLER for phase in phases_of(text)) and not names_slow:
        yield KeyConflict(
            ("strategy.sync", "health.straggler_factor"),
            f"expected health.straggler_factor with @{UNTIL_STRAGGLER}: without it no rank is named",
        )
    if len(rules) > 1 and rules[-1].needs_server and reads_ahead:
        yield KeyConflict(
            ("loader.workers", "strategy.sync"),
            "expected 0 with a switch to a server: nobody knows which samples come next",
        )


_AUTO_EXAMPLE = "auto:every-step,diloco:8"


def check_word(text: str, kind: type[WordSpec]) -> str:
    """A word of a choice with its argument, as it is written."""
    word, colon, argument = text.partition(":")
    spec = find_spec(kind, word)
    if spec is None:
        words = tuple(known_specs(kind))
        raise value_error(expected_message("one of " + ", ".join(words), text, words))
    if spec.argument is None and colon:
        raise value_error(expected_message(f'"{word}" without an argument', text))
    if not colon and spec.argument_may_be_missing:
        return text
    if spec.argument is not None and not (argument and spec.argument.fits(argument)):
        raise value_error(expected_message(f'{spec.argument.says}, as in "{spec.example}"', text))
    return text


def check_sync(text: str) -> str:
    """Every rule of a run, or every-step and what it may choose instead."""
    words = known_specs(SyncSpec)
    specs = [words[check_word(p.rule, SyncSpec).partition(":")[0]] for p in phases_of(text)]
    fits = not any(spec.chooses for spec in specs)
    if allowed := choices_of(text):
        fits &= all((spec.sums or spec.sends) and not spec.needs_server for spec in specs)
        fits &= allowed[0] == "every-step" and 1 < len(allowed) == len({*allowed})
    if not fits:
        rules = "every-step, then local:H, diloco:H or gossip:S by comma"
        raise value_error(expected_message(f"{rules}, as in {_AUTO_EXAMPLE}", text))
    return text


def check_codec(text: str) -> str:
    """A codec, a chain of them, or some to choose from."""
    word, _, allowed = text.partition(":")
    whole = find_spec(CodecSpec, word)
    if whole is not None and whole.chooses:
        for one in allowed.split(",") if allowed else ():
            if check_codec(one).partition(":")[0] in (word, "fp32"):
                raise value_error(expected_message(f"codecs by comma behind {word}", one))
        return text
    return "+".join(check_word(link, CodecSpec) for link in text.split("+"))


def check_route(text: str) -> str:
    """A route."""
    return check_word(text, RouteSpec)


def check_channel(text: str) -> str:
    """A channel."""
    return check_word(text, ChannelSpec)


def check_schedule(text: str) -> str:
    """A schedule."""
    return check_word(schedule_word(text), ScheduleSpec)


def check_stages(text: str) -> str:
    """How a pipeline is cut: a word, or a number of modules for each of its stages."""
    counts = text.split(",")
    if text in ("parameters", "time") or all(n.isdecimal() and int(n) > 0 for n in counts):
        return text
    words = ("parameters", "time")
    raise value_error(expected_message("parameters, time, or numbers of modules as in 3,5", text, words))


def check_rechunk(text: str) -> str:
    """In how many parts stages run micro-batches: a number for each stage."""
    if all(n.isdecimal() and int(n) > 0 for n in text.split(",") if text):
        return text
    raise value_error(expected_message("a number of parts for each stage, as in 1,4", text))


def parse_counts(text: str) -> list[int]:
    """What stands between commas, once it was checked."""
    return [int(n) for n in text.split(",") if n]


_PARTITIONS = ("fixed", "min-size:BYTES", "max-size:BYTES")


def check_partition(text: str) -> str:
    """How tensors are cut for several servers."""
    kind, _, count = text.partition(":")
    if text == "fixed" or (kind in ("min-size", "max-size") and count.isdecimal() and int(count) > 0):
        return text
    raise value_error(expected_message("fixed, min-size:BYTES or max-size:BYTES", text, _PARTITIONS))


def check_cut(text: str) -> str:
    """A cut that an installed package brings."""
    words = tuple(plugin_specs(LayoutSpec))
    if text and text not in words:
        installed = f"one of {', '.join(words)}" if words else "nothing, as no installed package brings a cut"
        raise value_error(expected_message(installed, text, words))
    return text


def parse_replicas(value: Any) -> Any:
    """`replicas=all`."""
    return None if value == "all" else value
