"""The text of a strategy: presets, terms, and the phases of a run whose sync rule changes.

Three forms mean the same: terms such as `replicas=2 sync=every-step`, a preset with terms that change it
(`ddp codec=int8`), and a TOML table. In `sync`, commas separate the phases of a run, and `@` stands before
the step at which a phase ends: `every-step@1000,diloco:50`. A phase can also end with an event: with
`every-step@straggler,backup:1` it ends when a rank is reported as slow, and with `auto:every-step,diloco:8`
when measurements have chosen one of the listed rules. Once the event has happened the step is known, and
the text is rewritten with it (`resolve_phases`), so a resumed run switches at the same step.

This module and `recipe.registry` are the only ones that split the text of words or compare their names
(tests/unit/recipe/registry/test_words_are_compared_in_the_registry.py). The check functions are pydantic
validators: they return the text, or raise a `PydanticCustomError` that names the nearest spelling. Pure.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping, Sequence
from functools import lru_cache
from types import MappingProxyType
from typing import Any, NamedTuple

from paceline.recipe.registry import (
    ChannelSpec,
    CodecSpec,
    LayoutSpec,
    ParsedWord,
    RouteSpec,
    ScheduleSpec,
    SyncSpec,
    WordSpec,
    find_spec,
    parse_word,
    plugin_specs,
)
from paceline.recipe.registry.codec_specs import LOSSLESS_CODEC, PLAIN_CODEC
from paceline.recipe.registry.layout_specs import schedule_word
from paceline.recipe.toml_text import closest_word, toml_value
from paceline.recipe.validation import expected_message, value_error

# ---------------------------------------------------------------------- presets and terms


class StrategyPreset(NamedTuple):
    """A strategy under a name that users already know; its degrees are the smallest, and meant to be
    changed.
    """

    terms: str
    summary: str


PRESETS: Mapping[str, StrategyPreset] = MappingProxyType(
    {
        "ddp": StrategyPreset("replicas=all", "a whole model on every process, gradients averaged each step"),
        "fsdp": StrategyPreset("replicas=1 shard=all zero=3", "one replica, all state sharded"),
        "hsdp": StrategyPreset("shard=2 zero=3", "several replicas, each sharded inside"),
        "zero1": StrategyPreset("shard=2 zero=1", "optimizer state sharded"),
        "zero2": StrategyPreset("shard=2 zero=2", "optimizer state and gradients sharded"),
        "zero3": StrategyPreset("shard=2 zero=3", "optimizer state, gradients and weights sharded"),
        "mirrored": StrategyPreset("replicas=all", "as ddp, on one machine"),
        "multi-worker-mirrored": StrategyPreset(
            "replicas=all route=hierarchical", "as ddp, on several machines, within each machine first"
        ),
        "parameter-server": StrategyPreset("servers=1 sync=server", "workers send gradients to a server"),
        "central-storage": StrategyPreset(
            "replicas=1 shard=all zero=3 storage=central route=shared-memory",
            "one copy of weights per machine, updated by one process",
        ),
        "hogwild": StrategyPreset("sync=hogwild", "lock-free updates of shared weights, on one machine"),
        "local-sgd": StrategyPreset("sync=local:8", "replicas train independently and average every 8 steps"),
        "diloco": StrategyPreset("sync=diloco:50", "local steps with an outer optimizer"),
        "pipedream": StrategyPreset(
            "replicas=1 pipeline=all sync=pipedream", "stages that never wait for a flush"
        ),
        "gpipe": StrategyPreset("pipeline=2", "stages of layers, all forwards before all backwards"),
        "1f1b": StrategyPreset(
            "pipeline=2 schedule=1f1b", "stages of layers, alternating forwards and backwards"
        ),
        "3d": StrategyPreset("tensor=2 pipeline=2", "replicas x tensor x pipeline"),
    }
)


def read_terms(text: str, names: Collection[str]) -> dict[str, int | str]:
    """Read the terms of a strategy.

    Args:
        text: `NAME=VALUE` terms, or a preset and terms that change it.
        names: of all terms, for the error about an unknown preset.
    """
    first, *others = text.split() or [""]
    if not first:
        raise value_error('expected terms such as "replicas=2 sync=every-step" or a preset, found nothing')
    if "=" in first:
        return _parse_terms([first, *others])
    return {**_parse_terms(_expand_preset(first, names).split()), **_parse_terms(others)}


def spell_out_terms(terms: dict[str, Any]) -> dict[str, Any]:
    """Return terms with numbers of modules and parts as text, and a degree that is "all" in two fields.

    A single number, as in `stages=3`, is read as an integer, and these fields are lists of numbers.
    """
    lists = {name: str(terms[name]) for name in _NUMBER_LISTS if type(terms.get(name)) is int}
    filled = next((axis for axis in _FILLED_AXES if terms.get(axis) == "all"), None)
    # Two is the least that shares anything; `fill_replicas` replaces it.
    return {**terms, **lists, **({} if filled is None else {filled: 2, "fills": filled})}


_NUMBER_LISTS = ("stages", "rechunk")
_FILLED_AXES = ("shard", "pipeline")


def inner_filled_axis(text: str) -> str | None:
    """Return the value of `fills` if it is an axis inside a replica."""
    return text if text in _FILLED_AXES else None


_PLANNER_MISSING = (
    "auto is not built yet: no planner chooses a strategy. Name one, such as ddp, or compare some:"
    " paceline compare RECIPE --strategy ddp --strategy fsdp"
)


def _expand_preset(name: str, names: Collection[str]) -> str:
    if name in PRESETS:
        return PRESETS[name].terms
    if name == "auto":
        raise value_error(_PLANNER_MISSING)
    near = closest_word(name, (*PRESETS, *names))
    advice = f'did you mean "{near}"?' if near else f"expected NAME=VALUE or one of {', '.join(PRESETS)}"
    raise value_error(f"unknown preset {toml_value(name)}; {advice}")


def _parse_terms(terms: list[str]) -> dict[str, int | str]:
    values: dict[str, int | str] = {}
    for term in terms:
        name, equals, value = term.partition("=")
        if not (name and equals and value):
            raise value_error(f"expected NAME=VALUE, found {toml_value(term)}")
        if name in values:
            raise value_error(f"{name} is given twice, {values[name]} and {value}")
        values[name] = int(value) if re.fullmatch(r"[+-]?[0-9]+", value) else value
    return values


# ---------------------------------------------------------------------- phases of the sync rule

_PHASES_EXAMPLE = (
    '"every-step@1000,diloco:50", or [{ until = 1000, rule = "every-step" }, { rule = "diloco:50" }]'
)
_FIRST_RULE = "every-step"
UNTIL_STRAGGLER = "straggler"
"""The event that ends a phase when a rank is reported as slow."""
UNTIL_MEASURED = "sync"
"""The event that ends a phase when measurements have chosen a rule."""
AUTO_PREFIX = "auto:"


class SyncPhase(NamedTuple):
    """A range of steps of a run under one sync rule.

    Args:
        rule: the rule as it is written.
        until: the step after its last one, or the event that ends it (`UNTIL_STRAGGLER`, `UNTIL_MEASURED`);
            None: the end of the run.
    """

    rule: str
    until: int | str | None

    @property
    def word(self) -> ParsedWord[SyncSpec]:
        """Return the rule, parsed."""
        return parse_word(SyncSpec, self.rule)

    @property
    def end(self) -> int | None:
        """Return the step after its last one; None if that is not known yet, or is the end of the run."""
        return self.until if isinstance(self.until, int) else None


@lru_cache(maxsize=256)
def phases_of(text: str) -> tuple[SyncPhase, ...]:
    """Return the phases of a text, in order; of `auto` one for each rule that it may choose.

    Raises:
        PydanticCustomError: steps do not ascend, or a phase other than the last has no end.
    """
    if choices := choices_of(text):
        return tuple(SyncPhase(rule, UNTIL_MEASURED) for rule in choices)
    phases = []
    terms = text.split(",")
    for number, term in enumerate(terms):
        rule, at, step = term.partition("@")
        is_last = number == len(terms) - 1
        waits = step == UNTIL_STRAGGLER and number == len(terms) - 2
        if bool(at) == is_last or (at and not waits and not (step.isascii() and step.isdigit())):
            expectation = (
                f"a step behind each rule but the last, as in {_PHASES_EXAMPLE}, or {UNTIL_STRAGGLER} behind"
                " the last but one"
            )
            raise value_error(expected_message(expectation, text))
        if waits and rule != _FIRST_RULE:
            raise value_error(
                expected_message(f"{_FIRST_RULE} before @{UNTIL_STRAGGLER}; no other rule reports one", text)
            )
        phases.append(SyncPhase(rule, None if is_last else UNTIL_STRAGGLER if waits else int(step)))
    steps = [phase.end for phase in phases if phase.end is not None]
    if steps != sorted({*steps}) or steps[:1] == [0]:
        raise value_error(expected_message("steps that ascend, from 1 on", text))
    return tuple(phases)


def choices_of(text: str) -> tuple[str, ...]:
    """Return the rules that a run may choose from by measuring; empty: the text names its rules."""
    return tuple(text.removeprefix(AUTO_PREFIX).split(",")) if text.startswith(AUTO_PREFIX) else ()


def phases_to_text(value: Any) -> Any:
    """Convert a list of tables (`rule`, `until`) to text; return any other value as it is."""
    if not isinstance(value, list):
        return value
    terms = []
    for table in value:
        if not (isinstance(table, dict) and "rule" in table and table.keys() <= {"rule", "until"}):
            raise value_error(
                expected_message(f"tables of rule and until, as in {_PHASES_EXAMPLE}", str(table))
            )
        terms.append(f"{table['rule']}@{table['until']}" if "until" in table else str(table["rule"]))
    return ",".join(terms)


def phase_at_step(phases: Sequence[SyncPhase], step: int) -> SyncPhase:
    """Return the phase to which a step belongs."""
    return next(phase for phase in phases if phase.end is None or step < phase.end)


def waits_for_straggler(text: str) -> bool:
    """Return whether a phase ends when a rank is reported as slow."""
    return any(phase.until == UNTIL_STRAGGLER for phase in phases_of(text))


def resolve_phases(text: str, step: int, chosen: str = "") -> str:
    """Replace the event that ends a phase by the first step of the next phase.

    Args:
        text: the phases.
        step: the first step of the next phase.
        chosen: the rule that was chosen, where several were allowed.
    """
    if choices := choices_of(text):
        return chosen if chosen == choices[0] else f"{choices[0]}@{step},{chosen}"
    return text.replace(f"@{UNTIL_STRAGGLER}", f"@{step}")


def append_return(configured: str, resolved: str, step: int) -> str:
    """Return the phases of a run that returns to its first rule, now that a slow rank has recovered.

    Args:
        configured: the phases of the recipe.
        resolved: the phases of the run so far.
        step: the first step under the first rule again.
    """
    return f"{resolved}@{step},{','.join(configured.split(',')[-2:])}"


def count_returns(configured: str, resolved: str) -> int:
    """Return how often a run has returned to its first rule."""
    return (len(phases_of(resolved)) - len(phases_of(configured))) // 2


def is_resolved_from(configured: str, resolved: str) -> bool:
    """Return whether phases are those of a recipe, with events replaced by the steps at which they
    happened.
    """
    wanted, known = phases_of(configured), phases_of(resolved)
    if (choices := choices_of(configured)) and resolved != configured:
        rules = [phase.rule for phase in known]
        return rules[0] == choices[0] and len(rules) <= 2 and rules[-1] in choices
    if wanted[-2:-1] and wanted[-2].until == UNTIL_STRAGGLER:  # the last two may have been repeated
        wanted = (*wanted, *wanted[-2:] * count_returns(configured, resolved))
    return len(wanted) == len(known) and all(
        phase.rule == other.rule and (phase.until == other.until or not isinstance(phase.until, int))
        for phase, other in zip(wanted, known, strict=True)
    )


# ---------------------------------------------------------------------- the words of a strategy

_AUTO_EXAMPLE = "auto:every-step,diloco:8"


def check_word(text: str, kind: type[WordSpec]) -> str:
    """Check that a word is known and that its argument is valid; return the text."""
    parse_word(kind, text)
    return text


def check_sync(text: str) -> str:
    """Check the rules of a run: one, several with the steps between them, or `auto` with rules to choose
    from.
    """
    specs = [phase.word.spec for phase in phases_of(text)]
    is_valid = not any(spec.chooses for spec in specs)
    if choices := choices_of(text):
        is_valid &= all((spec.sums or spec.sends) and not spec.needs_server for spec in specs)
        is_valid &= choices[0] == _FIRST_RULE and 1 < len(choices) == len({*choices})
    if not is_valid:
        rules = "every-step, then local:H, diloco:H or gossip:S by comma"
        raise value_error(expected_message(f"{rules}, as in {_AUTO_EXAMPLE}", text))
    return text


def check_codec(text: str) -> str:
    """Check a codec, a chain of codecs, or `auto` with codecs to choose from."""
    first = parse_codec(text)[0]
    for choice in first.argument or () if first.spec.chooses else ():
        links = parse_codec(choice)
        if links[0].spec.chooses or links[0].spec.is_identity:
            raise value_error(expected_message(f"codecs by comma behind {first.spec.word}", choice))
        check_codec(choice)
    return text


def parse_codec(text: str) -> tuple[ParsedWord[CodecSpec], ...]:
    """Parse a codec; of a chain such as `topk:0.01+int4` return each link."""
    word = text.partition(":")[0]
    whole = find_spec(CodecSpec, word)
    if whole is not None and whole.chooses:  # its argument lists whole chains, so `+` does not end it
        return (parse_word(CodecSpec, text),)
    return tuple(parse_word(CodecSpec, link) for link in text.split("+"))


def codec_choices(text: str) -> tuple[str, ...]:
    """Return the codecs that a run may choose from, uncoded values first; empty: the text names its codec."""
    first = parse_codec(text)[0]
    return (PLAIN_CODEC, *(first.argument or (LOSSLESS_CODEC,))) if first.spec.chooses else ()


def check_route(text: str) -> str:
    """Check a route."""
    return check_word(text, RouteSpec)


def check_channel(text: str) -> str:
    """Check a channel."""
    return check_word(text, ChannelSpec)


def check_schedule(text: str) -> str:
    """Check a schedule; the path of a CSV file becomes `file:PATH`."""
    return check_word(schedule_word(text), ScheduleSpec)


def check_cut(text: str) -> str:
    """Check a partition that an installed package adds."""
    words = tuple(plugin_specs(LayoutSpec))
    if text and text not in words:
        installed = f"one of {', '.join(words)}" if words else "nothing, as no installed package brings a cut"
        raise value_error(expected_message(installed, text, words))
    return text


# ---------------------------------------------------------------------- terms that are not words of the
# registry


class StageLengths(NamedTuple):
    """The value of `stages`.

    Args:
        by_time: stages have equal measured time, which is measured when a session starts.
        lengths: the number of modules of each chunk; None: equal parameters or time.
    """

    by_time: bool
    lengths: tuple[int, ...] | None


def parse_stages(text: str) -> StageLengths:
    """Parse `parameters`, `time`, or a number of modules for each stage: `3,5`."""
    counts = text.split(",")
    if text in ("parameters", "time"):
        return StageLengths(text == "time", None)
    if all(_is_positive(count) for count in counts):
        return StageLengths(False, tuple(map(int, counts)))
    words = ("parameters", "time")
    raise value_error(expected_message("parameters, time, or numbers of modules as in 3,5", text, words))


def check_stages(text: str) -> str:
    """Check how a pipeline is divided into stages."""
    parse_stages(text)
    return text


def check_rechunk(text: str) -> str:
    """Check the number of parts in which each stage runs a micro-batch."""
    if all(_is_positive(count) for count in text.split(",") if text):
        return text
    raise value_error(expected_message("a number of parts for each stage, as in 1,4", text))


class PieceSize(NamedTuple):
    """The value of `partition`: bytes of the pieces of a tensor on several servers.

    Args:
        at_least: bytes that each piece has at least; None: no lower limit.
        at_most: bytes that each piece has at most; None: no upper limit. Without limits each server holds one
            piece.
    """

    at_least: int | None = None
    at_most: int | None = None


_PARTITIONS = ("fixed", "min-size:BYTES", "max-size:BYTES")


def parse_partition(text: str) -> PieceSize:
    """Parse `fixed`, `min-size:BYTES` or `max-size:BYTES`."""
    kind, _, count = text.partition(":")
    if text == "fixed":
        return PieceSize()
    if kind in ("min-size", "max-size") and _is_positive(count):
        return PieceSize(at_least=int(count)) if kind == "min-size" else PieceSize(at_most=int(count))
    raise value_error(expected_message("fixed, min-size:BYTES or max-size:BYTES", text, _PARTITIONS))


def check_partition(text: str) -> str:
    """Check how tensors are divided among several servers."""
    parse_partition(text)
    return text


def is_speed_balance(text: str) -> bool:
    """Return whether the shards of a batch are assigned by the speed of replicas."""
    return text == "speed"


def parse_replicas(value: Any) -> Any:
    """Convert `replicas=all` to None, which fills the processes."""
    return None if value == "all" else value


def _is_positive(text: str) -> bool:
    return text.isdecimal() and int(text) > 0
