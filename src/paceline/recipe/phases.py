"""A run whose rule changes on the way: `sync = "every-step@1000,diloco:50"`, or a list of tables in a recipe.

A phase ends before a step, or (`every-step@straggler,backup:1`) where a rank is named as slow. Once that has
happened the step is known, and the run is one that was asked to switch there; so with the way back, and the
next time. Behind `auto:` stand the rules that a run may go on with once its first steps were measured.

Invariant: the text says everything; a list of tables is read as it. Pure.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import lru_cache
from typing import TYPE_CHECKING, Any, NamedTuple

from paceline.recipe.problems import Conflict, found_instead, refused
from paceline.recipe.specs import Refusal, SyncSpec

if TYPE_CHECKING:
    from paceline.recipe.strategy import Strategy

_SHAPE = '"every-step@1000,diloco:50", or [{ until = 1000, rule = "every-step" }, { rule = "diloco:50" }]'
STRAGGLER = "straggler"
"""Ends a phase where a rank is named as slow."""
CHOSEN = "sync"
"""Ends a phase where a rule is chosen by measuring."""
AUTO = "auto:"


def _can_be_last(strategy: Strategy) -> bool:
    last = strategy.rules[-1]
    return last.sums or last.sends or last.needs_server > 0


def _waits_for_alone(strategy: Strategy) -> bool:
    """Whether something that happens decides when replicas begin to train alone."""
    waits = any(isinstance(phase.until, str) for phase in phases_of(strategy.sync))
    return waits and any(spec.agrees == "replica" for spec in strategy.rules)


_REFUSALS = (
    Refusal(
        "a run can switch between rules that sum over replicas (every-step, local and diloco), and at last to"
        " one of a server, or to gossip",
        lambda strategy: any(not spec.sums for spec in strategy.rules[:-1]) or not _can_be_last(strategy),
    ),
    Refusal(
        "replicas of several ranks are not followed until they keep up, nor is a rule chosen for them by"
        " measuring: name a step in place of @straggler or auto",
        lambda strategy: strategy.ranks_per_replica > 1 and _waits_for_alone(strategy),
    ),
    Refusal(
        "a run can switch to one server, which holds all: set servers=1",
        lambda strategy: strategy.servers > 1,
    ),
)


class Phase(NamedTuple):
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
def phases_of(text: str) -> tuple[Phase, ...]:
    """The phases that a text names, in order; of rules to choose from, all.

    Raises:
        ValueError: steps do not ascend, or another phase than the last has no end.
    """
    if allowed := choices_of(text):
        return tuple(Phase(rule, CHOSEN) for rule in allowed)
    found = []
    for number, term in enumerate(terms := text.split(",")):
        rule, at, step = term.partition("@")
        is_last = number == len(terms) - 1
        waits = step == STRAGGLER and number == len(terms) - 2
        if bool(at) == is_last or (at and not waits and not (step.isascii() and step.isdigit())):
            raise refused(
                found_instead(
                    f"a step behind each rule but the last, as in {_SHAPE}, or {STRAGGLER} behind the last"
                    " but one",
                    text,
                )
            )
        if waits and rule != "every-step":
            raise refused(found_instead(f"every-step before @{STRAGGLER}, which alone names it", text))
        found.append(Phase(rule, None if is_last else STRAGGLER if waits else int(step)))
    steps = [phase.end for phase in found if phase.end is not None]
    if steps != sorted({*steps}) or steps[:1] == [0]:
        raise refused(found_instead("steps that ascend, from 1 on", text))
    return tuple(found)


def choices_of(text: str) -> tuple[str, ...]:
    """The rules that a run may choose from; empty: they are named."""
    return tuple(text.removeprefix(AUTO).split(",")) if text.startswith(AUTO) else ()


def as_text(value: Any) -> Any:
    """A list of tables as a text; anything else as it is."""
    if not isinstance(value, list):
        return value
    terms = []
    for one in value:
        if not (isinstance(one, dict) and "rule" in one and one.keys() <= {"rule", "until"}):
            raise refused(found_instead(f"tables of rule and until, as in {_SHAPE}", str(one)))
        terms.append(f"{one['rule']}@{one['until']}" if "until" in one else str(one["rule"]))
    return ",".join(terms)


def at_step(phases: Sequence[Phase], step: int) -> Phase:
    """The phase that a step belongs to."""
    return next(phase for phase in phases if phase.end is None or step < phase.end)


def ended(text: str, step: int, chosen: str = "") -> str:
    """The phases, once what one of them has waited for has happened before a step.

    Args:
        chosen: the rule, where some were allowed.
    """
    if allowed := choices_of(text):
        return chosen if chosen == allowed[0] else f"{allowed[0]}@{step},{chosen}"
    return text.replace(f"@{STRAGGLER}", f"@{step}")


def returned(asked: str, found: str, step: int) -> str:
    """The phases, once the slow rank is as fast as others again: back, until the next one is slow."""
    return f"{found}@{step},{','.join(asked.split(',')[-2:])}"


def num_returns(asked: str, found: str) -> int:
    """How often a run has gone back."""
    return (len(phases_of(found)) - len(phases_of(asked))) // 2


def is_reading(text: str, found: str) -> bool:
    """Whether phases are those of a text, of which it is known by now when they end, and what was chosen."""
    asked, known = phases_of(text), phases_of(found)
    if (allowed := choices_of(text)) and found != text:
        rules = [phase.rule for phase in known]
        return rules[0] == allowed[0] and len(rules) <= 2 and rules[-1] in allowed
    if asked[-2:-1] and asked[-2].until == STRAGGLER:  # the last two may have come again and again
        asked = (*asked, *asked[-2:] * num_returns(text, found))
    return len(asked) == len(known) and all(
        one.rule == other.rule and (one.until == other.until or not isinstance(one.until, int))
        for one, other in zip(asked, known, strict=True)
    )


def together(specs: Sequence[SyncSpec]) -> SyncSpec:
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
        whole_replicas=any(spec.whole_replicas for spec in specs),
        sums=any(spec.sums for spec in specs),
        sends=any(spec.sends for spec in specs),
        reads=tuple(dict.fromkeys(table for spec in specs for table in spec.reads)),
        refusals=_REFUSALS,
    )


def switch_conflicts(
    text: str, rules: Sequence[SyncSpec], *, names_slow: bool, reads_ahead: bool
) -> Iterator[Conflict]:
    """What of a recipe would stop its run where it switches.

    Args:
        names_slow: a rank that is slow is named.
        reads_ahead: samples are read by processes of their own.
    """
    if any(phase.until == STRAGGLER for phase in phases_of(text)) and not names_slow:
        yield Conflict(
            ("strategy.sync", "health.straggler_factor"),
            f"expected health.straggler_factor with @{STRAGGLER}: without it no rank is named",
        )
    if len(rules) > 1 and rules[-1].needs_server and reads_ahead:
        yield Conflict(
            ("loader.workers", "strategy.sync"),
            "expected 0 with a switch to a server: nobody knows which samples come next",
        )
