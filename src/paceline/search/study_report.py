"""The report of a study: what was learned, and at which price. Everything in it follows from the two logs.

Importance is Optuna's fANOVA of the complete trials; the other tables need no library.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean, stdev
from typing import Any

from paceline.errors import format_count
from paceline.report.html_page import ComparisonTable, render_comparison_page
from paceline.report.run_files import is_run_folder
from paceline.report.run_reader import RecordedRun, read_run
from paceline.search.optuna_storage import build_distributions, to_library_values
from paceline.search.space import Dimension, Params, label
from paceline.search.study import Study
from paceline.search.study_log import Trial

_MIN_TRIALS_FOR_IMPORTANCE = 8
_SHOWN_RUNS = 8
_NUM_PERIODS = 4


@dataclass(frozen=True)
class Confirmation:
    """The winner with new seeds.

    Args:
        mean, deviation: of the objective.
        optimism: by how much the value of the search was better than the mean; negative: it was worse.
    """

    mean: float
    deviation: float
    optimism: float


@dataclass(frozen=True)
class SearchPeriod:
    """Some consecutive trials of the search: how far from the best they looked, and what it brought.

    Args:
        trials: first and last number.
        distance: mean distance of their values to those of the best trial before them, from 0 to 1.
        improved: number of trials that were better than all before.
        improvement: of the best score.
    """

    trials: tuple[int, int]
    distance: float | None
    improved: int
    improvement: float


@dataclass(frozen=True)
class StudySummary:
    """The numbers of a study.

    Args:
        study: whose they are.
        counts: trials by status.
        confirmation: of the winner; None without new seeds.
        importance: share of the variance that a key explains; empty if there are too few trials.
        periods: of the search.
        strategies: trials, best and mean by the strategy that was searched.
        saved: share of the samples that stopped trials did not train on.
        waiting: share of the time of the slots in which they had no run while their batch was not over.
        seconds: of all leases together.
    """

    study: Study
    counts: Mapping[str, int]
    confirmation: Confirmation | None
    importance: Mapping[str, float]
    periods: Sequence[SearchPeriod]
    strategies: Mapping[str, tuple[int, float | None, float | None]]
    saved: float | None
    waiting: float | None
    seconds: float

    def to_json(self) -> dict[str, Any]:
        """Return the summary as plain values."""
        study, best = self.study, self.study.best
        return {
            "objective": study.plan.objective.text,
            "folder": str(study.folder),
            "best": None
            if best is None
            else {"trial": best.number, "params": best.params, "value": best.value},
            "confirmed": None if self.confirmation is None else vars(self.confirmation),
            "test": None if study.tested is None else study.tested["scores"],
            "counts": dict(self.counts),
            "trials": [_trial_json(trial) for trial in study.trials],
            "importance": dict(self.importance),
            "periods": [vars(period) for period in self.periods],
            "strategies": {name: list(row) for name, row in self.strategies.items()},
            "compute_saved": self.saved,
            "waiting": self.waiting,
            "lease_seconds": self.seconds,
        }


def _trial_json(trial: Trial) -> dict[str, Any]:
    return {
        "trial": trial.number,
        "params": trial.params,
        "status": trial.status,
        "value": trial.value,
        "step": trial.step,
        "reason": trial.reason,
    }


def summarize_study(study: Study) -> StudySummary:
    """Return the numbers of a study."""
    statuses = [trial.status for trial in study.trials]
    return StudySummary(
        study=study,
        counts={status: statuses.count(status) for status in dict.fromkeys(statuses)},
        confirmation=_confirmation(study),
        importance=_importance(study),
        periods=_periods(study),
        strategies=_strategies(study),
        saved=_saved_share(study.trials),
        waiting=_waiting_share(study),
        seconds=sum(lease.seconds for lease in study.leases),
    )


def _confirmation(study: Study) -> Confirmation | None:
    best = study.best
    values = [] if best is None else [v for v in study.confirmed.get(best.number, ()) if v is not None]
    if best is None or best.value is None or not values:
        return None
    mean, score = fmean(values), study.plan.objective.score
    deviation = stdev(values) if len(values) > 1 else 0.0
    return Confirmation(mean, deviation, score(mean) - score(best.value))


def _importance(study: Study) -> dict[str, float]:
    """Return the importance of each key by fANOVA; empty with too few trials, or without the library."""
    trials = [trial for trial in study.ranked if trial.value is not None]
    dimensions = study.plan.space.dimensions
    if len(trials) < _MIN_TRIALS_FOR_IMPORTANCE or len(dimensions) < 1:
        return {}
    try:
        import optuna
        import sklearn  # noqa: F401 - fANOVA needs it
    except ImportError:
        return {}
    optuna.logging.set_verbosity(optuna.logging.WARNING)
    distributions = build_distributions(optuna, dimensions)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        record = optuna.create_study()
        for trial in trials:
            values = to_library_values(dimensions, trial.params)
            record.add_trial(
                optuna.trial.create_trial(params=values, distributions=distributions, value=trial.value)
            )
        evaluator = optuna.importance.FanovaImportanceEvaluator(seed=1)
        try:
            shares = optuna.importance.get_param_importances(record, evaluator=evaluator)
        except (RuntimeError, ValueError):  # all trials have one value
            return {}
    return {name: float(share) for name, share in shares.items()}


def _periods(study: Study) -> list[SearchPeriod]:
    score = study.plan.objective.score
    trials = [trial for trial in study.trials if trial.status in ("complete", "diverged", "failed")]
    size = math.ceil(len(trials) / _NUM_PERIODS)
    periods, best, best_score = [], None, math.inf
    for start in range(0, len(trials), size or 1):
        part, distances, improved, before = trials[start : start + size], [], 0, best_score
        for trial in part:
            if best is not None:
                distances.append(distance(study.plan.space.dimensions, best.params, trial.params))
            if score(trial.value) < best_score:
                best, best_score, improved = trial, score(trial.value), improved + 1
        gain = before - best_score if math.isfinite(before) else 0.0
        mean = fmean(distances) if distances else None
        periods.append(SearchPeriod((part[0].number, part[-1].number), mean, improved, gain))
    return periods


def distance(dimensions: Sequence[Dimension], one: Params, other: Params) -> float:
    """Return the mean distance of two trials over the keys: 0 equal, 1 opposite ends of every range."""
    return fmean(
        _distance_of_values(dimension, one[dimension.key], other[dimension.key]) for dimension in dimensions
    )


def _distance_of_values(dimension: Dimension, one: Any, other: Any) -> float:
    if dimension.kind == "choice":
        return float(one != other)
    if dimension.kind == "log":
        return abs(math.log(one / other)) / math.log(dimension.high / dimension.low)
    return abs(one - other) / (dimension.high - dimension.low)


def _strategies(study: Study) -> dict[str, tuple[int, float | None, float | None]]:
    rows: dict[str, list[Trial]] = {}
    for trial in study.trials:
        if "strategy" in trial.params:
            rows.setdefault(trial.params["strategy"], []).append(trial)
    score = study.plan.objective.score
    result: dict[str, tuple[int, float | None, float | None]] = {}
    for name, trials in rows.items():
        values = [trial.value for trial in trials if trial.value is not None]
        result[name] = (
            (len(trials), min(values, key=score), fmean(values)) if values else (len(trials), None, None)
        )
    return result


def _saved_share(trials: Sequence[Trial]) -> float | None:
    ran = [t for t in trials if t.planned_steps and t.status in ("complete", "stopped")]
    planned = sum(trial.planned_samples for trial in ran)
    trained = sum(
        trial.planned_samples * min(1.0, (trial.step or 0) / trial.planned_steps)
        if trial.status == "stopped"
        else trial.planned_samples
        for trial in ran
    )
    return 1 - trained / planned if planned and any(trial.status == "stopped" for trial in ran) else None


def _waiting_share(study: Study) -> float | None:
    """Return the idle share of a batch's slots between the first begin and the last end of each rung."""
    batch_of = {trial.name: trial.batch for trial in study.trials}
    phases: dict[tuple[Any, ...], list[tuple[float, float]]] = {}
    slots: dict[int | None, set[int]] = {}
    for lease in study.leases:
        if lease.end is not None and lease.end != "lost":
            batch = batch_of.get(lease.run[: len("trial-0000")])
            slots.setdefault(batch, set()).add(lease.slot)
            phases.setdefault((batch, lease.until), []).append((lease.began, lease.began + lease.seconds))
    windows = sum(
        len(slots[batch]) * (max(end for _, end in spans) - min(begin for begin, _ in spans))
        for (batch, _), spans in phases.items()
    )
    busy = sum(end - begin for spans in phases.values() for begin, end in spans)
    return max(0.0, 1 - busy / windows) if windows else None


# ---------------------------------------------------------------------- text and page


def render_study(summary: StudySummary) -> list[str]:
    """Return the lines of the report."""
    study, best = summary.study, summary.study.best
    lines = ["trials: " + ", ".join(f"{number} {status}" for status, number in summary.counts.items())]
    if best is None:
        return [*lines, "no trial has a value"]
    objective = study.plan.objective.text
    lines.append(f"best: trial {best.number}  {label(best.params)}  {objective} {best.value:.6g}")
    if summary.confirmation is not None:
        confirmed, seeds = summary.confirmation, len(study.confirmed[best.number])
        lines.append(
            f"confirmed with {format_count(seeds, 'new seed')}: {confirmed.mean:.6g}"
            f" ±{confirmed.deviation:.2g};"
            f" the search was optimistic by {confirmed.optimism:.2g}"
        )
    if study.tested is not None and study.tested["scores"]:
        scores = "  ".join(
            f"{k} {'-' if v is None else f'{v:.6g}'}" for k, v in study.tested["scores"].items()
        )
        lines.append(f"test set, opened once, trial {study.tested['trial']}: {scores}")
    if summary.importance:
        lines.append("importance: " + "  ".join(f"{k} {v:.2f}" for k, v in summary.importance.items()))
    if summary.saved is not None:
        lines.append(f"compute saved by stopping: {summary.saved:.0%}")
    if summary.waiting is not None:
        lines.append(
            f"slots waited for their batch: {summary.waiting:.0%} of {summary.seconds:.1f} s of runs"
        )
    return lines


def render_study_page(summary: StudySummary) -> str:
    """Return the page of a study: tables, and the curves of the best trials."""
    study = summary.study
    names = [key.key for key in study.plan.space.dimensions]
    rows = [
        [trial.name, *(str(trial.params[n]) for n in names), *_result_cells(trial)]
        for trial in _in_order(study)
    ]
    tables = [
        ComparisonTable(
            "Trials",
            "The best first. A stopped trial has the metric at its last rung.",
            ["trial", *names, study.plan.objective.text, "status"],
            rows,
        ),
        ComparisonTable(
            "What was learned",
            "Everything follows from the logs of the study.",
            ["", ""],
            [list(line.partition(": ")[::2]) for line in render_study(summary)],
        ),
        ComparisonTable(
            "Exploration and improvement",
            "Distance: of a trial's values to those of the best one before it, mean over keys, 0 to 1.",
            ["trials", "distance", "improved", "improvement"],
            [_period_cells(p) for p in summary.periods],
        ),
    ]
    if summary.importance:
        shares = [[name, f"{share:.3f}"] for name, share in summary.importance.items()]
        tables.append(
            ComparisonTable("Importance", "fANOVA of the complete trials.", ["key", "share"], shares)
        )
    if summary.strategies:
        cells = [[name, str(n), _number(b), _number(m)] for name, (n, b, m) in summary.strategies.items()]
        tables.append(ComparisonTable("Strategies", "", ["strategy", "trials", "best", "mean"], cells))
    groups: dict[str, list[RecordedRun]] = {
        trial.name: [read_run(study.folder / trial.name)]
        for trial in study.ranked[:_SHOWN_RUNS]
        if is_run_folder(study.folder / trial.name)
    }
    about = f"{format_count(len(study.trials), 'trial')}, search {study.plan.study.search}"
    return render_comparison_page(f"Study: {study.plan.objective.text}", about, tables, groups)


def _in_order(study: Study) -> list[Trial]:
    ranked = study.ranked
    return [*ranked, *(trial for trial in study.trials if trial not in ranked)]


def _result_cells(trial: Trial) -> list[str]:
    value = trial.rungs[-1] if trial.status == "stopped" and trial.rungs else trial.value
    at = (
        f" after step {trial.step}"
        if trial.status == "stopped"
        else f": {trial.reason}"
        if trial.reason
        else ""
    )
    return [_number(value), trial.status + at]


def _period_cells(period: SearchPeriod) -> list[str]:
    first, last = period.trials
    return [f"{first} to {last}", _number(period.distance), str(period.improved), f"{period.improvement:.4g}"]


def _number(value: float | None) -> str:
    return "-" if value is None or not math.isfinite(value) else f"{value:.6g}"
