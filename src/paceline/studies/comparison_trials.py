"""The strategies of a comparison, read from a file. Pure.

The file is TOML: `name = "strategy"`, or `name = { strategy = "...", set = ["optimizer.lr=2e-3"] }` where a
strategy needs other settings than the recipe's. The first is what the speeds of the others are put beside.

What one run of a comparison has measured: numbers by name, and its course. Pure; reads no file.

Every number comes from a record of the run. What a run does not say has no entry, and nothing stands for it.

What it took to go on after a worker was killed.
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
from paceline.studies.sweep_summary import EvaluationPoint, MetricTarget

_EXAMPLE = 'for example every-step = "replicas=2"'
_MAX_NAME_LENGTH = 40


@dataclass(frozen=True)
class ComparisonEntry:
    """One strategy.

    Args:
        name: in the table, and of its folders.
        strategy: as `--strategy` takes it.
        settings: as `--set` takes them.
    """

    name: str
    strategy: str
    settings: tuple[str, ...] = ()


def parse_comparison_entries(text: str, where: str) -> list[ComparisonEntry]:
    """Read a file of strategies.

    Args:
        where: its name, for errors.
    Raises:
        RecipeError: it is no TOML, holds no strategy, or one of them is not written as it has to be.
    """
    try:
        found = parse_toml(text)
    except ValueError as error:
        raise RecipeError(f"the strategies cannot be read: {error}", where=where) from error
    if not found:
        raise RecipeError("there is no strategy", where=where, next_step=_EXAMPLE)
    return [_parse_entry(name, value, where) for name, value in found.items()]


def _parse_entry(name: str, value: Any, where: str) -> ComparisonEntry:
    table: Mapping[str, Any] = (
        {"strategy": value} if type(value) is str else _require_table(name, value, where)
    )
    strategy, settings = table.get("strategy"), table.get("set", [])
    texts = type(settings) is list and {type(one) for one in settings} <= {str}
    problems = {
        "its name is no name of a folder": re.fullmatch(r"\w[\w.:+-]*", name) is None,
        f"its name has more than {_MAX_NAME_LENGTH} letters": len(name) > _MAX_NAME_LENGTH,
        "it has no strategy": type(strategy) is not str or not strategy.strip(),
        "set is no list of texts": not texts,
        "a key of it is unknown": not set(table) <= {"strategy", "set"},
    }
    for problem, holds in problems.items():
        if holds:
            raise RecipeError(f"the strategy '{name}': {problem}", where=where, next_step=_EXAMPLE)
    return ComparisonEntry(name, str(strategy), tuple(settings))


def _require_table(name: str, value: Any, where: str) -> Mapping[str, Any]:
    if isinstance(value, dict):
        return value
    raise RecipeError(f"the strategy '{name}' is neither a text nor a table", where=where, next_step=_EXAMPLE)


@dataclass(frozen=True)
class EvaluationCost:
    """One evaluation, and what had been spent before it.

    Args:
        seconds: in steps, on rank 0.
        sent_bytes: of all ranks; inside a window of rounds, which ranks report at once, as if evenly sent.
    """

    point: EvaluationPoint
    seconds: float
    sent_bytes: float


@dataclass(frozen=True)
class TrialMeasurements:
    """One run.

    Args:
        numbers: by name, see `measure_trial`.
        moments: its evaluations in order.
        roles: processes that computed gradients, and that did not.
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
        """What it took to reach a target: `NAME to target`; empty if it was not reached."""
        found = next((moment for moment in self.moments if target.met(moment.point)), None)
        if found is None:
            return {}
        spent = {"samples": float(found.point.samples), "s": found.seconds, "bytes": found.sent_bytes}
        return {f"{name} to target": value for name, value in spent.items()}


def measure_trial(run: RecordedRun) -> TrialMeasurements:
    """Take the numbers from the records of a whole run.

    Names: `steps`, `samples/s` and `s a step` (all but the first round),
    `idle` (share of the time in which ranks that compute gradients neither did that, nor read, nor updated),
    `bytes a sample` (all ranks), `calls a step` (of rank 0 to others), `steps a round`, `staleness` (mean of
    rounds) and `oldest` (in updates), `memory` (bytes of the largest process), `final NAME`.
    """
    ranks = rank_times(run)
    compute = [rank for rank in ranks if rank.parts["forward"] > 0]
    numbers = {
        **_speed_numbers(run),
        **_cost_numbers(run, ranks, compute),
        **_staleness_numbers(run),
        **_final_numbers(run),
    }
    moments = _evaluation_costs(run)
    return TrialMeasurements(numbers, moments, (len(compute), len(ranks) - len(compute)))


def _speed_numbers(run: RecordedRun) -> dict[str, float]:
    rounds = run.steps[1:] or run.steps
    seconds = sum(to_float(step["seconds"]) for step in rounds)
    samples = sum(to_float(step["num_samples"]) for step in rounds)
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
    found: dict[str, float] = {}
    seconds = sum(rank.seconds for rank in compute)
    if seconds > 0:
        found["idle"] = sum((rank.communication + rank.share("other")) * rank.seconds for rank in compute)
        found["idle"] /= seconds
    samples = sum(to_float(step["num_samples"]) for step in run.steps)
    if ranks:
        found["bytes a sample"] = sum(to_float(r["sent_bytes"]) for r in run.of("ranks")) / samples
        found["memory"] = max(rank.peak_bytes for rank in ranks)
    books = run.of("communication")
    if books:
        calls = sum(row["calls"] for row in books[-1]["rows"].values())
        found["calls a step"] = calls / (int(run.steps[-1]["step"]) + 1)
    return found


def _staleness_numbers(run: RecordedRun) -> dict[str, float]:
    """A rule whose gradients can be old says how old they were; one that says nothing has none."""
    means = [to_float(s["metrics"]["staleness"]) for s in run.steps if "staleness" in s["metrics"]]
    most = [to_float(s["metrics"]["staleness_max"]) for s in run.steps if "staleness_max" in s["metrics"]]
    found = {"staleness": sum(means) / len(means)} if means else {}
    return found | ({"oldest": max(most)} if most else {})


def _final_numbers(run: RecordedRun) -> dict[str, float]:
    if not run.evaluations:
        return {}
    last = run.evaluations[-1]
    values = {"loss": last["loss"], **last["metrics"]}
    return {f"final {name}": to_float(value) for name, value in values.items() if isfinite(to_float(value))}


def _evaluation_costs(run: RecordedRun) -> list[EvaluationCost]:
    sent = cumulative_sent_bytes(run)
    found = []
    for record in run.evaluations:
        step = int(record["step"])
        before = [s for s in run.steps if int(s["step"]) < step]
        samples = sum(int(s["num_samples"]) for s in before)
        values = {"loss": to_float(record["loss"])}
        values |= {name: to_float(value) for name, value in record["metrics"].items()}
        found.append(
            EvaluationCost(
                EvaluationPoint(step, samples, values),
                sum(to_float(s["seconds"]) for s in before),
                sent(step),
            )
        )
    return found


RECOVERY_FILE = "recovery.json"


@dataclass(frozen=True)
class KillRecovery:
    """One kill.

    Args:
        how: "goes on": the job took no notice; "resumed": it ended, and was started again from its newest
            checkpoint; "lost": it ended, and no checkpoint was there.
        seconds: from the kill to the first step beyond those that were done at the kill; None: it was lost.
        steps_again: steps that were done a second time.
    """

    how: Literal["goes on", "resumed", "lost"]
    seconds: float | None
    steps_again: int

    def keep(self, folder: Path) -> None:
        """Write it into a folder."""
        (folder / RECOVERY_FILE).write_text(json.dumps(asdict(self)) + "\n", encoding="utf-8")


def read_recovery(folder: Path) -> KillRecovery | None:
    """The inverse of `KillRecovery.keep`; None: nothing was measured there."""
    path = folder / RECOVERY_FILE
    return KillRecovery(**json.loads(path.read_text(encoding="utf-8"))) if path.is_file() else None
