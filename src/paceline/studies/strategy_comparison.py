"""The comparison of strategies: the numbers of each over its seeds, its properties, and tables of both. Pure.

Invariant: every cell of a table is a number that was measured, or "not measured".
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from math import isfinite
from typing import Any

from paceline.errors import format_count
from paceline.report.number_format import format_bytes
from paceline.studies.comparison_trials import KillRecovery, TrialMeasurements
from paceline.studies.sweep_summary import MeanAndDeviation, MetricTarget


@dataclass(frozen=True)
class StrategyResult:
    """The results of one strategy.

    Args:
        strategy: the full text of the strategy.
        planned, runs: number of planned and of complete runs.
        roles: number of processes that computed gradients, and of those that did not.
        numbers: mean and deviation over the complete runs; a number that a run lacks is left out.
        recovery: one for each run in which a worker was killed.
        goes_with: the terms of `tried` that the strategy can be combined with.
        tried: terms of strategy strings.
        failed: the reasons of runs that are not complete.
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
        """Seconds of the recoveries that succeeded; None if none did."""
        return MeanAndDeviation.of([kill.seconds for kill in self.recovery if kill.seconds is not None])


@dataclass(frozen=True)
class StrategyComparison:
    """The results of all strategies.

    Args:
        target: the target of the numbers "to target"; None if no run was evaluated.
        rows: in the order of the file.
    """

    target: MetricTarget | None
    rows: Sequence[StrategyResult]

    def to_json(self) -> dict[str, Any]:
        """Return the comparison as plain values, with the properties of each strategy."""
        # The first strategy of the file is the reference of the others.
        base = self.rows[0].numbers if self.rows else {}
        return {
            "target": str(self.target) if self.target is not None else None,
            "rows": [{**asdict(row), "nine_rows": property_rows(row, base)} for row in self.rows],
        }


@dataclass(frozen=True)
class StrategyTrials:
    """The runs of one strategy; the other fields are those of `StrategyResult`."""

    name: str
    strategy: str
    planned: int
    trials: Sequence[TrialMeasurements]
    recovery: Sequence[KillRecovery]
    goes_with: Sequence[str]
    tried: Sequence[str]
    failed: Sequence[str]


def compare_strategies(
    strategies: Sequence[StrategyTrials], target: MetricTarget | None = None
) -> StrategyComparison:
    """Compare strategies by the means over their runs.

    Args:
        target: None for the lowest evaluation loss that every complete run reached.
    """
    trials = [trial for strategy in strategies for trial in strategy.trials]
    best = [trial.best_loss for trial in trials if isfinite(trial.best_loss)]
    if target is None and best:
        # As in a sweep: the lowest loss that every run has reached.
        target = MetricTarget("loss", max(best), upward=False)
    return StrategyComparison(target, [_strategy_result(strategy, target) for strategy in strategies])


def _strategy_result(strategy: StrategyTrials, target: MetricTarget | None) -> StrategyResult:
    numbers = [
        {**trial.numbers, **(trial.to_target(target) if target is not None else {})}
        for trial in strategy.trials
    ]
    names = [name for name in numbers[0] if all(name in of_run for of_run in numbers)] if numbers else []
    means = {name: MeanAndDeviation.of([of_run[name] for of_run in numbers]) for name in names}
    return StrategyResult(
        name=strategy.name,
        strategy=strategy.strategy,
        planned=strategy.planned,
        runs=len(strategy.trials),
        roles=strategy.trials[0].roles if strategy.trials else (0, 0),
        numbers={name: mean for name, mean in means.items() if mean is not None},
        recovery=strategy.recovery,
        goes_with=strategy.goes_with,
        tried=strategy.tried,
        failed=strategy.failed,
    )


NOT_MEASURED = "not measured"


def property_rows(row: StrategyResult, base: Mapping[str, MeanAndDeviation]) -> dict[str, str]:
    """Return nine properties of a strategy as text, from replication to status.

    Args:
        base: numbers of the first strategy.
    """

    def format_mean(name: str, template: str) -> str:
        return template.format(row.numbers[name].mean) if name in row.numbers else NOT_MEASURED

    memory = row.numbers.get("memory")
    return {
        "replication": f"{memory.mean / 2**20:.0f} MiB in the largest process" if memory else NOT_MEASURED,
        "roles": f"{row.roles[0]} compute, {row.roles[1]} serve" if row.runs else NOT_MEASURED,
        "communication": format_mean("bytes a sample", "{:,.0f} bytes per sample"),
        "scalability": _scalability_text(row, base),
        "flexibility": f"{len(row.goes_with)} of {len(row.tried)}: {', '.join(row.goes_with) or 'none'}",
        "complexity": format_mean("calls a step", "{:.1f} messages or collectives per step of rank 0"),
        "synchrony": _synchrony_text(row),
        "fault tolerance": _recovery_text(row),
        "status": f"{row.runs} of {row.planned} runs complete",
    }


def _scalability_text(row: StrategyResult, base: Mapping[str, MeanAndDeviation]) -> str:
    """Return the speed relative to the first strategy, with the threads of both if they differ: on a busy
    host threads that wait for each other can take many times as long.
    """
    speed, base_speed = row.numbers.get("samples/s"), base.get("samples/s")
    if not (speed and base_speed):
        return NOT_MEASURED
    text = f"{speed.mean / base_speed.mean:.2f} x the first"
    threads, base_threads = row.numbers.get("threads"), base.get("threads")
    if threads and base_threads and threads.mean != base_threads.mean:
        text += f" ({threads.mean:.3g} threads a process, there {base_threads.mean:.3g})"
    return text


def _format_steps(count: float) -> str:
    return "step" if count == 1 else f"{count:.3g} steps"


def _synchrony_text(row: StrategyResult) -> str:
    staleness, oldest = row.numbers.get("staleness"), row.numbers.get("oldest")
    if staleness is None:
        num_steps = row.numbers.get("steps a round")
        return f"replicas agree every {_format_steps(num_steps.mean)}" if num_steps else NOT_MEASURED
    return f"{staleness.mean:.2f} updates old" + (f", the oldest {oldest.mean:.0f}" if oldest else "")


def _recovery_text(row: StrategyResult) -> str:
    if not row.recovery:
        return NOT_MEASURED
    seconds = row.recovery_seconds
    delay = f" after {seconds.mean:.1f} s" if seconds else ""
    repeated = sum(kill.steps_again for kill in row.recovery) / len(row.recovery)
    return f"{row.recovery[0].how}{delay}, {format_count(round(repeated), 'step')} repeated"


TableColumn = tuple[str, str, Callable[[float], str]]


def _decimal_bytes(value: float) -> str:
    return format_bytes(value, decimal=True)


def _number_format(digits: int) -> Callable[[float], str]:
    return lambda value: f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.{digits}g}"


_COST_COLUMNS: tuple[TableColumn, ...] = (
    ("samples/s", "samples/s", _number_format(3)),
    ("s a step", "ms a step", lambda value: f"{1000 * value:.3g}"),
    ("idle", "idle", lambda value: f"{100 * value:.0f} %"),
    ("bytes a sample", "bytes/sample", _decimal_bytes),
    ("staleness", "staleness", _number_format(2)),
    ("oldest", "oldest", _number_format(3)),
    ("memory", "memory", _decimal_bytes),
)
_TARGET_COLUMNS: tuple[TableColumn, ...] = (
    ("samples to target", "samples to target", _number_format(3)),
    ("s to target", "seconds", _number_format(3)),
    ("bytes to target", "bytes", _decimal_bytes),
)


def render_results_table(comparison: StrategyComparison) -> tuple[list[str], list[list[str]]]:
    """Return header and rows of the results: the last evaluation, and the costs to reach the target."""
    finals = dict.fromkeys(
        name for row in comparison.rows for name in row.numbers if name.startswith("final ")
    )
    columns = [(name, name.removeprefix("final "), _number_format(4)) for name in finals]
    return _render_table(comparison, [*columns, *(_TARGET_COLUMNS if comparison.target is not None else ())])


def render_costs_table(comparison: StrategyComparison) -> tuple[list[str], list[list[str]]]:
    """Return header and rows of the costs: speed, idle time, bytes, staleness, memory and recovery."""
    header, rows = _render_table(comparison, _COST_COLUMNS)
    return [*header, "after a kill"], [
        [*cells, _format_recovery(row)] for cells, row in zip(rows, comparison.rows, strict=True)
    ]


def render_properties_table(comparison: StrategyComparison) -> tuple[list[str], list[list[str]]]:
    """Return header and rows of the properties, one strategy per row."""
    base = comparison.rows[0].numbers if comparison.rows else {}
    properties = [property_rows(row, base) for row in comparison.rows]
    header = ["strategy", *(properties[0] if properties else ())]
    rows = zip(comparison.rows, properties, strict=True)
    return header, [[row.name, *cells.values()] for row, cells in rows]


def render_comparison(comparison: StrategyComparison) -> list[str]:
    """Return the lines of the results, the costs and the failed runs, for a terminal."""
    lines = [
        *_align_columns(*render_results_table(comparison)),
        _render_note(comparison),
        "",
        *_align_columns(*render_costs_table(comparison)),
    ]
    for row in comparison.rows:
        lines += [f"failed: {row.name}: {reason}" for reason in row.failed]
    return lines


def _render_note(comparison: StrategyComparison) -> str:
    counts = sorted({row.runs for row in comparison.rows})
    runs = f"{' or '.join(map(str, counts))} run{'s' if counts != [1] else ''}"
    target = f"; target: {comparison.target}, checked at every evaluation" if comparison.target else ""
    return f"means of {runs} each, ± standard deviation{target}"


def _render_table(
    comparison: StrategyComparison, columns: Sequence[TableColumn]
) -> tuple[list[str], list[list[str]]]:
    shown = [column for column in columns if any(column[0] in row.numbers for row in comparison.rows)]
    rows = [
        [row.name, *(_format_mean(row.numbers.get(name), format_value) for name, _, format_value in shown)]
        for row in comparison.rows
    ]
    return ["strategy", *(title for _, title, _ in shown)], rows


def _format_mean(value: MeanAndDeviation | None, format_value: Callable[[float], str]) -> str:
    if value is None:
        return "-"
    return format_value(value.mean) + (f" ±{format_value(value.deviation)}" if value.deviation else "")


def _format_recovery(row: StrategyResult) -> str:
    if not row.recovery:
        return "-"
    seconds, repeated = row.recovery_seconds, max(kill.steps_again for kill in row.recovery)
    delay = "" if seconds is None else " " + _format_mean(seconds, lambda value: f"{value:.1f}") + " s"
    return f"{row.recovery[0].how}{delay}" + (
        f", {format_count(repeated, 'step')} repeated" if repeated else ""
    )


def _align_columns(header: Sequence[str], rows: Sequence[Sequence[str]]) -> list[str]:
    lines = [header, *rows]
    widths = [max(len(line[i]) for line in lines) for i in range(len(header))]
    aligned = []
    for name, *cells in lines:
        numbers = [cell.rjust(width) for cell, width in zip(cells, widths[1:], strict=True)]
        aligned.append("  ".join([name.ljust(widths[0]), *numbers]))
    return aligned
