"""The numbers of a run in short: for tables, for the summary, for comparing. Pure."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median
from typing import Any

from paceline.report.run_reader import MetricsRecord, RecordedRun, to_float

_RECENT_FRACTION = 0.2  # share of the steps, at the end, over which the last loss is taken


@dataclass(frozen=True)
class RunFacts:
    """What a table says of a run; None where the run does not say it.

    Args:
        status: see `RecordedRun.status`.
        strategy: with its replicas filled in.
        ranks: processes; 0: unknown.
        steps, num_steps: taken, and to take; 0: unknown.
        loss: mean training loss of the last fifth of the steps.
        held_out: loss of the last evaluation, and its metrics.
        best_held_out: the lowest loss of all evaluations, and after how many steps.
        samples_per_second: of all steps; `rate` is the same in `rate_unit`.
        step_seconds: median; `slow_seconds` is what one step in twenty exceeds.
        seconds: wall time of all steps.
        started: seconds since the epoch.
    """

    status: str
    strategy: str
    ranks: int
    steps: int
    num_steps: int
    loss: float | None
    held_out: float | None
    metrics: dict[str, float]
    best_held_out: tuple[float, int] | None
    samples_per_second: float | None
    rate: float | None
    rate_unit: str
    step_seconds: float | None
    slow_seconds: float | None
    seconds: float
    started: float | None


def collect_facts(run: RecordedRun) -> RunFacts:
    """Take the numbers from the rows."""
    steps, evaluations = run.steps, run.evaluations
    seconds = [float(step["seconds"]) for step in steps]
    whole = sum(seconds)
    samples = sum(step["num_samples"] for step in steps)
    speed = samples / whole if whole > 0 else None
    last = evaluations[-1] if evaluations else None
    return RunFacts(
        status=run.status,
        strategy=str(run.start.get("strategy") or _strategy_text(run.recipe.get("strategy", ""))),
        ranks=run.ranks,
        steps=run.done,
        num_steps=int(run.start.get("num_steps", 0)),
        loss=_recent_loss(steps),
        held_out=to_float(last["loss"]) if last else None,
        metrics={name: to_float(value) for name, value in last["metrics"].items()} if last else {},
        best_held_out=_best_evaluation(evaluations),
        samples_per_second=speed,
        rate=None if speed is None else speed * (run.tokens_per_sample or 1),
        rate_unit="tokens/s" if run.tokens_per_sample else "samples/s",
        step_seconds=median(seconds) if seconds else None,
        slow_seconds=quantile(seconds, 0.95) if seconds else None,
        seconds=whole,
        started=run.starts[0].get("time") if run.starts else None,
    )


def quantile(values: Sequence[float], share: float) -> float:
    """The value that a share of all do not exceed; by the nearest rank."""
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, max(0, math.ceil(share * len(ordered)) - 1))]


def _recent_loss(steps: Sequence[MetricsRecord]) -> float | None:
    losses = [to_float(step["loss"]) for step in steps[-max(1, round(_RECENT_FRACTION * len(steps))) :]]
    return sum(losses) / len(losses) if losses else None


def _best_evaluation(evaluations: Sequence[Any]) -> tuple[float, int] | None:
    finite = [
        (to_float(e["loss"]), int(e["step"])) for e in evaluations if math.isfinite(to_float(e["loss"]))
    ]
    return min(finite) if finite else None


def _strategy_text(strategy: Any) -> str:
    return " ".join(f"{k}={v}" for k, v in strategy.items()) if isinstance(strategy, dict) else str(strategy)


# -- how numbers are written -------------------------------------------------------------------------------


def format_number(value: float | None, digits: int = 4) -> str:
    """A number with so many digits that mean something; a dash where there is none."""
    if value is None:
        return "–"
    if not math.isfinite(value):
        return str(value)
    text = f"{value:.{digits}g}"
    return f"{value:,.0f}" if "e+" in text and abs(value) < 1e15 else text


def format_bytes(value: float) -> str:
    """Bytes in the largest unit of which there is at least one."""
    for unit in ("B", "KiB", "MiB", "GiB"):
        if abs(value) < 1024:
            return f"{value:.0f} {unit}" if unit == "B" else f"{value:.3g} {unit}"
        value /= 1024
    return f"{value:.3g} TiB"


def format_duration(value: float | None) -> str:
    """A duration as a person would say it."""
    if value is None:
        return "–"
    if value < 1:
        return f"{1000 * value:.3g} ms"
    if value < 60:
        return f"{value:.3g} s"
    minutes, seconds = divmod(round(value), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours} h {minutes:02d} min" if hours else f"{minutes} min {seconds:02d} s"


def format_percent(value: float) -> str:
    """A share in percent."""
    return f"{100 * value:.0f} %" if value >= 0.1 else f"{100 * value:.1f} %"
