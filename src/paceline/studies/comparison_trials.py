"""The trials of a strategy comparison: the file of strategies, the numbers of one run, and recovery after a
kill.

The file is TOML: `name = "strategy"`, or `name = { strategy = "...", set = ["optimizer.lr=2e-3"] }` for a
strategy that needs other settings than the recipe's. Speeds are shown relative to the first strategy.

Invariant: every number comes from records of the run; a number without a record is left out, not estimated.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from math import isfinite
from pathlib import Path
from typing import Any, Literal

from paceline.errors import RecipeError
from paceline.recipe.toml_text import parse_toml
from paceline.report.rank_balance import RankTimes, rank_times
from paceline.report.run_reader import RecordedRun, to_float
from paceline.report.sent_bytes import cumulative_sent_bytes
from paceline.studies.sweep_summary import EvaluationPoint, MetricTarget, evaluation_points

_EXAMPLE = 'for example every-step = "replicas=2"'
_MAX_NAME_LENGTH = 40


@dataclass(frozen=True)
class ComparisonEntry:
    """A strategy of a comparison.

    Args:
        name: its name in tables and folders.
        strategy: as `--strategy` takes it.
        settings: as `--set` takes them.
    """

    name: str
    strategy: str
    settings: tuple[str, ...] = ()


def parse_comparison_entries(text: str, where: str) -> list[ComparisonEntry]:
    """Parse a file of strategies.

    Args:
        where: name of the file, for errors.
    Raises:
        RecipeError: the text is no TOML, has no strategy, or one of them has another form.
    """
    try:
        tables = parse_toml(text)
    except ValueError as error:
        raise RecipeError(f"the strategies cannot be read: {error}", where=where) from error
    if not tables:
        raise RecipeError("the file has no strategy", where=where, next_step=_EXAMPLE)
    return [_parse_entry(name, value, where) for name, value in tables.items()]


def _parse_entry(name: str, value: Any, where: str) -> ComparisonEntry:
    table: Mapping[str, Any] = (
        {"strategy": value} if type(value) is str else _require_table(name, value, where)
    )
    strategy, settings = table.get("strategy"), table.get("set", [])
    are_strings = type(settings) is list and {type(setting) for setting in settings} <= {str}
    problems = {
        "its name is not usable as a folder name": re.fullmatch(r"\w[\w.:+-]*", name) is None,
        f"its name has more than {_MAX_NAME_LENGTH} characters": len(name) > _MAX_NAME_LENGTH,
        "it has no strategy": type(strategy) is not str or not strategy.strip(),
        "set is not a list of strings": not are_strings,
        "it has an unknown key": not set(table) <= {"strategy", "set"},
    }
    for problem, holds in problems.items():
        if holds:
            raise RecipeError(f"the strategy '{name}': {problem}", where=where, next_step=_EXAMPLE)
    return ComparisonEntry(name, str(strategy), tuple(settings))


def _require_table(name: str, value: Any, where: str) -> Mapping[str, Any]:
    if isinstance(value, dict):
        return value
    raise RecipeError(
        f"the strategy '{name}' is neither a string nor a table", where=where, next_step=_EXAMPLE
    )


@dataclass(frozen=True)
class EvaluationCost:
    """An evaluation with the costs before it.

    Args:
        seconds: wall time of the steps on rank 0.
        sent_bytes: bytes of all ranks, interpolated inside a window of rounds.
    """

    point: EvaluationPoint
    seconds: float
    sent_bytes: float


@dataclass(frozen=True)
class TrialMeasurements:
    """The measurements of one run of a comparison.

    Args:
        numbers: measurements with the names of `measure_trial`.
        moments: the evaluations, in order.
        roles: number of processes that computed gradients, and of those that did not.
    """

    numbers: Mapping[str, float]
    moments: Sequence[EvaluationCost]
    roles: tuple[int, int]

    @property
    def best_loss(self) -> float:
        """The lowest finite evaluation loss; infinite without one."""
        losses = [moment.point.values["loss"] for moment in self.moments]
        return min((loss for loss in losses if isfinite(loss)), default=float("inf"))

    def to_target(self, target: MetricTarget) -> dict[str, float]:
        """Return the costs to reach a target, named `NAME to target`; empty if it was not reached."""
        first = next((moment for moment in self.moments if target.met(moment.point)), None)
        if first is None:
            return {}
        costs = {"samples": float(first.point.samples), "s": first.seconds, "bytes": first.sent_bytes}
        return {f"{name} to target": value for name, value in costs.items()}


def measure_trial(run: RecordedRun) -> TrialMeasurements:
    """Return the measurements of a complete run.

    The numbers are `steps`, `samples/s` and `s a step` (without the first round), `idle` (fraction of the
    time in which ranks that compute gradients neither did so, nor read data, nor updated), `bytes a sample`
    (of all ranks), `calls a step` (collectives and messages of rank 0), `steps a round`, `staleness` (mean
    over rounds) and `oldest` (in updates), `memory` (bytes of the largest process), `threads` (of rank 0)
    and `final NAME` of the last evaluation.
    """
    ranks = rank_times(run)
    compute = [rank for rank in ranks if rank.parts["forward"] > 0]
    numbers = {
        **_speed_numbers(run),
        **_cost_numbers(run, ranks, compute),
        **_staleness_numbers(run),
        **_final_numbers(run),
    }
    moments = evaluation_costs(run)
    return TrialMeasurements(numbers, moments, (len(compute), len(ranks) - len(compute)))


def _speed_numbers(run: RecordedRun) -> dict[str, float]:
    # The first round also pays for allocations and compilation.
    rounds = run.steps[1:] or run.steps
    seconds = sum(to_float(step["seconds"]) for step in rounds)
    samples = sum(to_float(step["num_samples"]) for step in rounds)
    # A record has the number of the last step of its round.
    first = int(run.steps[0]["step"]) + 1 if len(run.steps) > 1 else 0
    steps = int(run.steps[-1]["step"]) + 1 - first
    return {
        "steps": float(int(run.steps[-1]["step"]) + 1),
        "steps a round": steps / len(rounds),
        "samples/s": samples / seconds,
        "s a step": seconds / steps,
    }


def _cost_numbers(
    run: RecordedRun, ranks: Sequence[RankTimes], compute: Sequence[RankTimes]
) -> dict[str, float]:
    numbers: dict[str, float] = {}
    seconds = sum(rank.seconds for rank in compute)
    if seconds > 0:
        numbers["idle"] = sum((rank.communication + rank.share("other")) * rank.seconds for rank in compute)
        numbers["idle"] /= seconds
    samples = sum(to_float(step["num_samples"]) for step in run.steps)
    if ranks:
        numbers["bytes a sample"] = sum(to_float(r["sent_bytes"]) for r in run.of("ranks")) / samples
        numbers["memory"] = max(rank.peak_bytes for rank in ranks)
    threads = run.of("threads")
    if threads:
        numbers["threads"] = float(threads[-1]["number"])
    ledgers = run.of("communication")
    if ledgers:
        calls = sum(row["calls"] for row in ledgers[-1]["rows"].values())
        numbers["calls a step"] = calls / (int(run.steps[-1]["step"]) + 1)
    return numbers


def _staleness_numbers(run: RecordedRun) -> dict[str, float]:
    """Return the staleness that the sync rule reported; rules without stale gradients report none."""
    means = [to_float(s["metrics"]["staleness"]) for s in run.steps if "staleness" in s["metrics"]]
    largest = [to_float(s["metrics"]["staleness_max"]) for s in run.steps if "staleness_max" in s["metrics"]]
    numbers = {"staleness": sum(means) / len(means)} if means else {}
    return numbers | ({"oldest": max(largest)} if largest else {})


def _final_numbers(run: RecordedRun) -> dict[str, float]:
    if not run.evaluations:
        return {}
    last = run.evaluations[-1]
    values = {"loss": last["loss"], **last["metrics"]}
    return {f"final {name}": to_float(value) for name, value in values.items() if isfinite(to_float(value))}


def evaluation_costs(run: RecordedRun) -> list[EvaluationCost]:
    """Return the evaluations of a run with the time and the bytes before each."""
    sent_bytes = cumulative_sent_bytes(run)
    costs = []
    for point in evaluation_points(run):
        seconds = sum(to_float(step["seconds"]) for step in run.steps if int(step["step"]) < point.step)
        costs.append(EvaluationCost(point, seconds, sent_bytes(point.step)))
    return costs


RECOVERY_FILE = "recovery.json"


@dataclass(frozen=True)
class KillRecovery:
    """The recovery of a job after a worker was killed.

    Args:
        how: "goes on" if the job did not end; "resumed" if it ended and was started again from its newest
            checkpoint; "lost" if it ended without a checkpoint.
        seconds: from the kill to the first step that had not been taken at the kill; None if it was lost.
        steps_again: number of steps that were taken a second time.
    """

    how: Literal["goes on", "resumed", "lost"]
    seconds: float | None
    steps_again: int

    def save(self, folder: Path) -> None:
        """Write it to `recovery.json` in a folder."""
        (folder / RECOVERY_FILE).write_text(json.dumps(asdict(self)) + "\n", encoding="utf-8")


def read_recovery(folder: Path) -> KillRecovery | None:
    """Read the `recovery.json` of a folder; None if there is none."""
    path = folder / RECOVERY_FILE
    return KillRecovery(**json.loads(path.read_text(encoding="utf-8"))) if path.is_file() else None
