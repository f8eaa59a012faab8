"""Strategies side by side: what every one measured over its seeds, and the nine rows of each. Pure.

Invariant: every cell is a number that was measured, or says that it was not; nothing is taken from prose.

A comparison as tables of text.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from math import isfinite
from typing import Any

from paceline.studies.comparison_trials import KillRecovery, TrialMeasurements
from paceline.studies.sweep_summary import MeanAndDeviation, MetricTarget


@dataclass(frozen=True)
class StrategyResult:
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
    numbers: Mapping[str, MeanAndDeviation]
    recovery: Sequence[KillRecovery]
    goes_with: Sequence[str]
    tried: Sequence[str]
    failed: Sequence[str]

    @property
    def recovery_seconds(self) -> MeanAndDeviation | None:
        """Of the kills after which it went on; None: of none."""
        return MeanAndDeviation.of([one.seconds for one in self.recovery if one.seconds is not None])


@dataclass(frozen=True)
class StrategyComparison:
    """All of them.

    Args:
        target: what "to target" means; None: no run was evaluated.
        rows: in the order of the file.
    """

    target: MetricTarget | None
    rows: Sequence[StrategyResult]

    def to_json(self) -> dict[str, Any]:
        """Plain values, the nine rows among them."""
        base = self.rows[0].numbers.get("samples/s") if self.rows else None
        return {
            "target": str(self.target) if self.target is not None else None,
            "rows": [{**asdict(row), "nine_rows": property_rows(row, base)} for row in self.rows],
        }


@dataclass(frozen=True)
class StrategyTrials:
    """What there is of one strategy before it is put together; see `StrategyResult`."""

    name: str
    strategy: str
    planned: int
    trials: Sequence[TrialMeasurements]
    recovery: Sequence[KillRecovery]
    goes_with: Sequence[str]
    tried: Sequence[str]
    failed: Sequence[str]


def compare_strategies(
    tried: Sequence[StrategyTrials], target: MetricTarget | None = None
) -> StrategyComparison:
    """Put runs together.

    Args:
        target: None: the evaluation loss that every complete run has reached at some time.
    """
    best = [trial.best_loss for one in tried for trial in one.trials if isfinite(trial.best_loss)]
    if target is None and best:
        target = MetricTarget("loss", max(best), upward=False)
    return StrategyComparison(target, [_strategy_result(one, target) for one in tried])


def _strategy_result(one: StrategyTrials, target: MetricTarget | None) -> StrategyResult:
    each = [
        {**trial.numbers, **(trial.to_target(target) if target is not None else {})} for trial in one.trials
    ]
    names = [name for name in each[0] if all(name in other for other in each)] if each else []
    spreads = {name: MeanAndDeviation.of([other[name] for other in each]) for name in names}
    return StrategyResult(
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


def property_rows(row: StrategyResult, base: MeanAndDeviation | None) -> dict[str, str]:
    """Replication, roles and so on, as measured.

    Args:
        base: samples a second of the first strategy.
    """
    numbers = row.numbers

    def say(name: str, form: str) -> str:
        return form.format(numbers[name].mean) if name in numbers else NOT_MEASURED

    speed = numbers.get("samples/s")
    return {
        "replication": _memory_text(numbers.get("memory")),
        "roles": f"{row.roles[0]} compute, {row.roles[1]} serve" if row.runs else NOT_MEASURED,
        "communication": say("bytes a sample", "{:,.0f} bytes a sample"),
        "scalability": f"{speed.mean / base.mean:.2f} x the first" if speed and base else NOT_MEASURED,
        "flexibility": f"{len(row.goes_with)} of {len(row.tried)}: {', '.join(row.goes_with) or 'none'}",
        "complexity": say("calls a step", "{:.1f} messages or collectives a step of rank 0"),
        "synchrony": _synchrony_text(row),
        "fault tolerance": _recovery_text(row),
        "status": f"{row.runs} of {row.planned} runs complete",
    }


def _memory_text(found: MeanAndDeviation | None) -> str:
    return NOT_MEASURED if found is None else f"{found.mean / 2**20:.0f} MiB in the largest process"


def _synchrony_text(row: StrategyResult) -> str:
    stale, oldest = row.numbers.get("staleness"), row.numbers.get("oldest")
    if stale is None:
        every = row.numbers.get("steps a round")
        return f"all agree every {every.mean:.3g} steps" if every else NOT_MEASURED
    return f"{stale.mean:.2f} updates old" + (f", the oldest {oldest.mean:.0f}" if oldest else "")


def _recovery_text(row: StrategyResult) -> str:
    if not row.recovery:
        return NOT_MEASURED
    first, seconds = row.recovery[0], row.recovery_seconds
    took = f" after {seconds.mean:.1f} s" if seconds else ""
    again = sum(one.steps_again for one in row.recovery) / len(row.recovery)
    return f"{first.how}{took}, {again:.0f} steps again"


TableColumn = tuple[str, str, Callable[[float], str]]


def _format_bytes(value: float) -> str:
    units = ("B", "kB", "MB", "GB", "TB")
    for unit in units:
        if abs(value) < 1000 or unit == units[-1]:
            break
        value /= 1000
    return f"{value:.3g} {unit}"


def _number_format(digits: int) -> Callable[[float], str]:
    return lambda value: f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.{digits}g}"


_COST_COLUMNS: tuple[TableColumn, ...] = (
    ("samples/s", "samples/s", _number_format(3)),
    ("s a step", "ms a step", lambda value: f"{1000 * value:.3g}"),
    ("idle", "idle", lambda value: f"{100 * value:.0f} %"),
    ("bytes a sample", "bytes/sample", _format_bytes),
    ("staleness", "staleness", _number_format(2)),
    ("oldest", "oldest", _number_format(3)),
    ("memory", "memory", _format_bytes),
)
_TARGET_COLUMNS: tuple[TableColumn, ...] = (
    ("samples to target", "samples to target", _number_format(3)),
    ("s to target", "seconds", _number_format(3)),
    ("bytes to target", "bytes", _format_bytes),
)


def render_results_table(found: StrategyComparison) -> tuple[list[str], list[list[str]]]:
    """Head and rows: what held-out samples say at the end, and what the target took."""
    finals = dict.fromkeys(name for row in found.rows for name in row.numbers if name.startswith("final "))
    columns = [(name, name.removeprefix("final "), _number_format(4)) for name in finals]
    return _render_table(found, [*columns, *(_TARGET_COLUMNS if found.target is not None else ())])


def render_costs_table(found: StrategyComparison) -> tuple[list[str], list[list[str]]]:
    """Head and rows: speed, idle share, bytes, staleness, memory, and recovery after a kill."""
    head, rows = _render_table(found, _COST_COLUMNS)
    return [*head, "after a kill"], [
        [*cells, _format_recovery(row)] for cells, row in zip(rows, found.rows, strict=True)
    ]


def render_properties_table(found: StrategyComparison) -> tuple[list[str], list[list[str]]]:
    """Head and rows: the nine rows, one strategy a line."""
    base = found.rows[0].numbers.get("samples/s") if found.rows else None
    each = [property_rows(row, base) for row in found.rows]
    head = ["strategy", *(each[0] if each else ())]
    return head, [[row.name, *cells.values()] for row, cells in zip(found.rows, each, strict=True)]


def render_comparison(found: StrategyComparison) -> list[str]:
    """For a terminal: what was learned, what it cost, and what failed; means, ± over the seeds."""
    lines = [
        *_align_columns(*render_results_table(found)),
        *_render_notes(found),
        "",
        *_align_columns(*render_costs_table(found)),
    ]
    for row in found.rows:
        lines += [f"failed: {row.name}: {why}" for why in row.failed]
    return lines


def _render_notes(found: StrategyComparison) -> list[str]:
    runs = sorted({row.runs for row in found.rows})
    counts = " or ".join(map(str, runs))
    about = f"means of {counts} run{'s' if runs != [1] else ''} each, ± their standard deviation"
    if found.target is None:
        return [about]
    return [f"{about}; target: {found.target}, looked at whenever a run was evaluated"]


def _render_table(
    found: StrategyComparison, columns: Sequence[TableColumn]
) -> tuple[list[str], list[list[str]]]:
    shown = [column for column in columns if any(column[0] in row.numbers for row in found.rows)]
    rows = [
        [row.name, *(_format_mean(row.numbers.get(name), say) for name, _, say in shown)]
        for row in found.rows
    ]
    return ["strategy", *(title for _, title, _ in shown)], rows


def _format_mean(found: MeanAndDeviation | None, say: Callable[[float], str]) -> str:
    if found is None:
        return "-"
    return say(found.mean) + (f" ±{say(found.deviation)}" if found.deviation else "")


def _format_recovery(row: StrategyResult) -> str:
    if not row.recovery:
        return "-"
    seconds, again = row.recovery_seconds, max(one.steps_again for one in row.recovery)
    took = "" if seconds is None else " " + _format_mean(seconds, lambda value: f"{value:.1f}") + " s"
    return f"{row.recovery[0].how}{took}" + (f", {again} steps again" if again else "")


def _align_columns(head: Sequence[str], rows: Sequence[Sequence[str]]) -> list[str]:
    lines = [head, *rows]
    widths = [max(len(line[i]) for line in lines) for i in range(len(head))]
    return [
        "  ".join(
            [line[0].ljust(widths[0]), *(c.rjust(w) for c, w in zip(line[1:], widths[1:], strict=True))]
        )
        for line in lines
    ]
