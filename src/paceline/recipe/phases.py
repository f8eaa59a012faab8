"""A run whose rule changes on the way: `sync = "every-step@1000,diloco:50"`, or a list of tables in a recipe.

Invariant: the text says everything; a list of tables is read as it. Pure.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

from paceline.recipe.problems import found_instead, refused
from paceline.recipe.specs import Refusal, SyncSpec

_SHAPE = '"every-step@1000,diloco:50", or [{ until = 1000, rule = "every-step" }, { rule = "diloco:50" }]'
_SWITCHES = Refusal(
    "a run can switch between rules that sum over replicas: every-step, local and diloco",
    lambda strategy: not strategy.rule.sums,
)


class Phase(NamedTuple):
    """A stretch of a run under one rule.

    Args:
        until: the step before which it ends; None: the end of the run.
    """

    rule: str
    until: int | None


def phases_of(text: str) -> tuple[Phase, ...]:
    """The phases that a text names, in order.

    Raises:
        ValueError: steps do not ascend, or another phase than the last has no end.
    """
    found = []
    for number, term in enumerate(terms := text.split(",")):
        rule, at, step = term.partition("@")
        is_last = number == len(terms) - 1
        if bool(at) == is_last or (at and not (step.isascii() and step.isdigit())):
            raise refused(found_instead(f"a step behind each rule but the last, as in {_SHAPE}", text))
        found.append(Phase(rule, int(step) if at else None))
    steps = [phase.until for phase in found if phase.until is not None]
    if steps != sorted({*steps}) or steps[:1] == [0]:
        raise refused(found_instead("steps that ascend, from 1 on", text))
    return tuple(found)


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
    return next(phase for phase in phases if phase.until is None or step < phase.until)


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
        sums=all(spec.sums for spec in specs),
        reads=tuple(dict.fromkeys(table for spec in specs for table in spec.reads)),
        refusals=(_SWITCHES,),
    )
