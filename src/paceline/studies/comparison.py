"""Strategies side by side: what every one measured over its seeds, and the nine rows of each. Pure.

Invariant: every cell is a number that was measured, or says that it was not; nothing is taken from prose.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from math import isfinite
from typing import Any

from paceline.studies.measured import Target
from paceline.studies.recovery import Recovery
from paceline.studies.summary import Spread
from paceline.studies.trial import Trial


@dataclass(frozen=True)
class Compared:
    """One strategy.

    Args:
        strategy: in full.
        planned: runs that were wanted.
        numbers: over the runs that are complete; a number that not every one of them has is left out.
        recovery: of those runs in which a worker was killed.
        goes_with: further terms that it accepts, of those in `tried`.
        failed: why runs are not complete.
    """

    name: str
    strategy: str
    planned: int
    runs: int
    roles: tuple[int, int]
    numbers: Mapping[str, Spread]
    recovery: Sequence[Recovery]
    goes_with: Sequence[str]
    tried: Sequence[str]
    failed: Sequence[str]

    @property
    def recovery_seconds(self) -> Spread | None:
        """Of the kills after which it went on; None: of none."""
        return Spread.of([one.seconds for one in self.recovery if one.seconds is not None])


@dataclass(frozen=True)
class Comparison:
    """All of them.

    Args:
        target: what "to target" means; None: no run was evaluated.
        rows: in the order of the file.
    """

    target: Target | None
    rows: Sequence[Compared]

    def to_json(self) -> dict[str, Any]:
        """Plain values, the nine rows among them."""
        base = self.rows[0].numbers.get("samples/s") if self.rows else None
        return {
            "target": str(self.target) if self.target is not None else None,
            "rows": [{**asdict(row), "nine_rows": nine_rows(row, base)} for row in self.rows],
        }


@dataclass(frozen=True)
class Tried:
    """What there is of one strategy before it is put together; see `Compared`."""

    name: str
    strategy: str
    planned: int
    trials: Sequence[Trial]
    recovery: Sequence[Recovery]
    goes_with: Sequence[str]
    tried: Sequence[str]
    failed: Sequence[str]


def compare(tried: Sequence[Tried], target: Target | None = None) -> Comparison:
    """Put runs together.

    Args:
        target: None: the evaluation loss that every complete run has reached at some time.
    """
    best = [trial.best_loss for one in tried for trial in one.trials if isfinite(trial.best_loss)]
    if target is None and best:
        target = Target("loss", max(best), upward=False)
    return Comparison(target, [_row(one, target) for one in tried])


def _row(one: Tried, target: Target | None) -> Compared:
    each = [
        {**trial.numbers, **(trial.to_target(target) if target is not None else {})} for trial in one.trials
    ]
    names = [name for name in each[0] if all(name in other for other in each)] if each else []
    spreads = {name: Spread.of([other[name] for other in each]) for name in names}
    return Compared(
        name=one.name,
        strategy=one.strategy,
        planned=one.planned,
        runs=len(one.trials),
        roles=one.trials[0].roles if one.trials else (0, 0),
        numbers={name: spread for name, spread in spreads.items() if spread is not None},
        recovery=one.recovery,
        goes_with=one.goes_with,
        tried=one.tried,
        failed=one.failed,
    )


NOT_MEASURED = "not measured"


def nine_rows(row: Compared, base: Spread | None) -> dict[str, str]:
    """Replication, roles and so on, as measured.

    Args:
        base: samples a second of the first strategy.
    """
    numbers = row.numbers

    def say(name: str, form: str) -> str:
        return form.format(numbers[name].mean) if name in numbers else NOT_MEASURED

    speed = numbers.get("samples/s")
    return {
        "replication": _memory(numbers.get("memory")),
        "roles": f"{row.roles[0]} compute, {row.roles[1]} serve" if row.runs else NOT_MEASURED,
        "communication": say("bytes a sample", "{:,.0f} bytes a sample"),
        "scalability": f"{speed.mean / base.mean:.2f} x the first" if speed and base else NOT_MEASURED,
        "flexibility": f"{len(row.goes_with)} of {len(row.tried)}: {', '.join(row.goes_with) or 'none'}",
        "complexity": say("calls a step", "{:.1f} messages or collectives a step of rank 0"),
        "synchrony": _synchrony(row),
        "fault tolerance": _tolerance(row),
        "status": f"{row.runs} of {row.planned} runs complete",
    }


def _memory(found: Spread | None) -> str:
    return NOT_MEASURED if found is None else f"{found.mean / 2**20:.0f} MiB in the largest process"


def _synchrony(row: Compared) -> str:
    stale, oldest = row.numbers.get("staleness"), row.numbers.get("oldest")
    if stale is None:
        every = row.numbers.get("steps a round")
        return f"all agree every {every.mean:.3g} steps" if every else NOT_MEASURED
    return f"{stale.mean:.2f} updates old" + (f", the oldest {oldest.mean:.0f}" if oldest else "")


def _tolerance(row: Compared) -> str:
    if not row.recovery:
        return NOT_MEASURED
    first, seconds = row.recovery[0], row.recovery_seconds
    took = f" after {seconds.mean:.1f} s" if seconds else ""
    again = sum(one.steps_again for one in row.recovery) / len(row.recovery)
    return f"{first.how}{took}, {again:.0f} steps again"
