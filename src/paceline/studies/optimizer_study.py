"""The comparison of optimizers on one task: their rates, schedules, number formats and batch sizes. Pure.

Each optimizer gets the best of equally many rates, by the loss on a share of the training samples with a seed
that no comparison uses. All comparisons are on the held-out samples of the task. Every part is a sweep, with
the table and the recommendation of one.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import product
from math import isfinite
from typing import Any

from paceline.studies.sweep_cells import SweepCell
from paceline.studies.sweep_summary import MeanAndDeviation, RunMeasurements, SweepSummary, recommend

DIGITS_RECIPE = """\
# An MLP on scikit-learn's digits, for `paceline study optimizers`.
task = "digits"
steps = 240

[options]
model = "mlp"
hidden = [64]

[batch]
size = 32

[evaluate]
batch = 300

[runtime]
threads = 1
"""
OPTIMIZERS = ("sgd", "adam", "rmsprop", "lamb", "lars")
SCHEDULES = ("constant", "cosine", "one_cycle")
FORMATS = ("fp32", "bf16", "fp16")
RULES = ("linear", "sqrt")
VALIDATION = 0.2
"""Share of the training samples on which rates are chosen."""

_MIDDLE_RATES = {"sgd": 0.05, "adam": 4e-3, "adamw": 4e-3, "rmsprop": 2e-3, "lamb": 0.02, "lars": 8.0}
_OTHER_RATE = 0.01
_OPTIONS = {"sgd": ", momentum = 0.9"}
_BATCH_OPTIMIZERS = ("sgd", "adam", "lamb")
_WARMUP_SHARE = 10  # of the updates, one in so many

Measured = Sequence[tuple[SweepCell, RunMeasurements]]


@dataclass(frozen=True)
class StudySize:
    """The extent of a study.

    Args:
        optimizers, schedules: words of recipes.
        rate_factors: multiples of the middle rate of each optimizer that are tried.
        batch_factors: multiples of the recipe's batch size, from 1.
        seeds: number of seeds, from 1.
    """

    optimizers: Sequence[str] = OPTIMIZERS
    schedules: Sequence[str] = SCHEDULES
    rate_factors: Sequence[float] = (1 / 8, 1 / 2, 2, 8)
    batch_factors: Sequence[int] = (1, 4, 8)
    seeds: int = 3

    def compare(self, optimizers: Sequence[str]) -> StudySize:
        """Return the study of other optimizers, each once."""
        return replace(self, optimizers=tuple(dict.fromkeys(optimizers)))

    @property
    def num_runs(self) -> int:
        """Return the number of runs of all parts."""
        num_rates = len(self.optimizers) * len(self.rate_factors)
        num_batches = len(self.batch_optimizers) * (1 + len(RULES) * (len(self.batch_factors) - 1))
        compared = len(self.optimizers) * len(self.schedules) + len(FORMATS) + num_batches
        return num_rates + self.seeds * compared

    @property
    def batch_optimizers(self) -> Sequence[str]:
        """Return the optimizers that are compared over batch sizes."""
        return [word for word in self.optimizers if word in _BATCH_OPTIMIZERS] or self.optimizers


QUICK = StudySize(("adam", "lamb"), ("constant", "cosine"), (1 / 2, 2), (1, 4), 1)


@dataclass(frozen=True)
class ChosenRate:
    """The rate of an optimizer.

    Args:
        is_edge: it is the smallest or the largest of those that were tried, so another may be better.
    """

    lr: float
    is_edge: bool


@dataclass(frozen=True)
class StudyPart:
    """One comparison of the study.

    Args:
        name: one word, for folders and citations.
        title: heading of its table.
        notes: remarks below it.
    """

    name: str
    title: str
    summary: SweepSummary
    recommendation: Sequence[str]
    notes: Sequence[str] = ()

    def to_json(self) -> dict[str, Any]:
        """Return plain values."""
        return {
            "title": self.title,
            **self.summary.to_json(),
            "recommendation": list(self.recommendation),
            "notes": list(self.notes),
        }


def rate_cells(size: StudySize) -> list[SweepCell]:
    """Return a run for each optimizer and rate, evaluated on a share of the training samples."""
    cells = []
    for word, factor in product(size.optimizers, size.rate_factors):
        lr = _MIDDLE_RATES.get(word, _OTHER_RATE) * factor
        settings = (_optimizer(word, lr), "schedule={}", "seed=0", f"evaluate.validation={VALIDATION}")
        cells.append(SweepCell({"optimizer": word, "lr": f"{lr:g}"}, settings))
    return cells


def choose_rates(size: StudySize, measured: Measured) -> dict[str, ChosenRate]:
    """Return the rate with the lowest final loss for each optimizer that has a finite one."""
    rates = {}
    for word in size.optimizers:
        tried = [cell.values["lr"] for cell in rate_cells(size) if cell.values["optimizer"] == word]
        losses = {
            cell.values["lr"]: run.points[-1].values["loss"]
            for cell, run in measured
            if cell.values["optimizer"] == word and run.points
        }
        finite = {lr: loss for lr, loss in losses.items() if isfinite(loss)}
        if finite:
            best = min(finite, key=lambda lr: finite[lr])
            rates[word] = ChosenRate(float(best), best in (tried[0], tried[-1]))
    return rates


def schedule_cells(size: StudySize, rates: Mapping[str, ChosenRate]) -> list[SweepCell]:
    """Return a run for each optimizer, schedule and seed."""
    return [
        SweepCell(
            {"optimizer": word, "schedule": schedule, "seed": str(seed)},
            (_optimizer(word, rates[word].lr), f'schedule={{decay = "{schedule}"}}', f"seed={seed}"),
        )
        for word, schedule, seed in product(rates, size.schedules, _seeds(size))
    ]


def best_setting(summary: SweepSummary) -> Mapping[str, str]:
    """Return the values of the row with the lowest mean final loss, among those with the most runs."""
    most = max(row.runs for row in summary.rows)
    rows = [row for row in summary.rows if row.runs == most and "final loss" in row.numbers]
    return min(rows, key=lambda row: row.numbers["final loss"].mean).values


def format_cells(
    size: StudySize, rates: Mapping[str, ChosenRate], best: Mapping[str, str]
) -> list[SweepCell]:
    """Return a run for each number format and seed, with the best optimizer and schedule."""
    optimizer = _optimizer(best["optimizer"], rates[best["optimizer"]].lr)
    schedule = f'schedule={{decay = "{best["schedule"]}"}}'
    return [
        SweepCell(
            {"format": word, "seed": str(seed)},
            (optimizer, schedule, f"seed={seed}", f'precision={{compute = "{word}"}}'),
        )
        for word, seed in product(FORMATS, _seeds(size))
    ]


def batch_cells(
    size: StudySize, rates: Mapping[str, ChosenRate], base_batch: int, base_steps: int
) -> list[SweepCell]:
    """Return a run for each optimizer, batch size, rule and seed, all over equally many samples.

    The rule of the base size is "base": both give its rate.
    """
    cells = []
    words = [word for word in size.batch_optimizers if word in rates]
    for word, factor, rule, seed in product(words, size.batch_factors, RULES, _seeds(size)):
        if factor == 1 and rule != RULES[0]:
            continue
        batch, steps = base_batch * factor, max(2, base_steps // factor)
        schedule = f'decay = "cosine", warmup_steps = {max(1, steps // _WARMUP_SHARE)}'
        if factor > 1:
            schedule += f', batch_scaling = "{rule}", base_batch = {base_batch}'
        values = {
            "optimizer": word,
            "batch": str(batch),
            "rule": rule if factor > 1 else "base",
            "seed": str(seed),
        }
        settings = (_optimizer(word, rates[word].lr), f"schedule={{{schedule}}}", f"seed={seed}")
        cells.append(SweepCell(values, (*settings, f"batch.size={batch}", f"steps={steps}")))
    return cells


def repeat_base_rows(measured: Measured) -> list[tuple[SweepCell, RunMeasurements]]:
    """Return the runs with those of the base size once under each rule, so that each rule is a curve."""
    return [
        (replace(cell, values={**cell.values, "rule": rule}), run)
        for cell, run in measured
        for rule in (RULES if cell.values["rule"] == "base" else (cell.values["rule"],))
    ]


def with_number(summary: SweepSummary, name: str, word: str, values: Mapping[str, float]) -> SweepSummary:
    """Return a summary whose rows have one more number, by their value of an axis."""
    rows = [
        replace(
            row, numbers={**row.numbers, name: MeanAndDeviation(values[row.values[word]], 0.0)}
        )
        if row.values[word] in values
        else row
        for row in summary.rows
    ]  # fmt: skip
    return replace(summary, rows=rows)


def recommend_batches(summary: SweepSummary) -> list[str]:
    """Return the recommendations for each batch size but the smallest."""
    sizes = sorted({int(row.values["batch"]) for row in summary.rows})
    return [
        f"batch {batch}: {line}" for batch in sizes[1:] for line in recommend(summary, {"batch": str(batch)})
    ]


def describe_rates(rates: Mapping[str, ChosenRate]) -> list[str]:
    """Return a sentence for each rate."""
    edge = ", at the edge of those tried: another may be better"
    return [
        f"{word}: lr {rate.lr:g}, the lowest loss of its rows{edge if rate.is_edge else ''}"
        for word, rate in rates.items()
    ]


def _optimizer(word: str, lr: float) -> str:
    return f'optimizer={{name = "{word}", lr = {lr!r}{_OPTIONS.get(word, "")}}}'


def _seeds(size: StudySize) -> range:
    return range(1, size.seeds + 1)
