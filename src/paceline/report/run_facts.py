"""The main numbers of a run, for tables, summaries and comparisons. Pure."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median
from typing import Any

from paceline.report.run_reader import MetricsRecord, RecordedRun, to_float

_RECENT_FRACTION = 0.2  # a single step is too noisy: the loss is the mean over this part of the steps


@dataclass(frozen=True)
class RunFacts:
    """The main numbers of a run; None where the run has no such record.

    Args:
        status: as `RecordedRun.status`.
        strategy: with its replicas filled in.
        ranks: number of processes; 0 if unknown.
        steps, num_steps: steps taken, and the length of the run; 0 if unknown.
        loss: mean training loss of the last fifth of the steps.
        held_out, metrics: loss and metrics of the last evaluation.
        best_held_out: the lowest loss of all evaluations, and the number of steps before it.
        samples_per_second: over all steps.
        rate, rate_unit: the same as a number of tokens or samples per second.
        step_seconds: median of all steps.
        slow_seconds: 95th percentile of all steps.
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
    """Compute the main numbers of a run from its records."""
    steps, evaluations = run.steps, run.evaluations
    seconds = [float(step["seconds"]) for step in steps]
    total_seconds = sum(seconds)
    samples = sum(step["num_samples"] for step in steps)
    speed = samples / total_seconds if total_seconds > 0 else None
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
        seconds=total_seconds,
        started=run.starts[0].get("time") if run.starts else None,
    )


def quantile(values: Sequence[float], fraction: float) -> float:
    """Return the smallest value that is not exceeded by `fraction` of all values (nearest rank)."""
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, max(0, math.ceil(fraction * len(ordered)) - 1))]


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
