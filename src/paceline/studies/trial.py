"""What one run of a comparison has measured: numbers by name, and its course. Pure; reads no file.

Every number comes from a record of the run. What a run does not say has no entry, and nothing stands for it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import isfinite

from paceline.report import Run
from paceline.report.read import number
from paceline.report.sent import sent_bytes
from paceline.report.shares import RankTime, rank_times
from paceline.studies.measured import Point, Target


@dataclass(frozen=True)
class Moment:
    """One evaluation, and what had been spent before it.

    Args:
        seconds: in steps, on rank 0.
        sent_bytes: of all ranks; inside a window of rounds, which ranks report at once, as if evenly sent.
    """

    point: Point
    seconds: float
    sent_bytes: float


@dataclass(frozen=True)
class Trial:
    """One run.

    Args:
        numbers: by name, see `measure`.
        moments: its evaluations in order.
        roles: processes that computed gradients, and that did not.
    """

    numbers: Mapping[str, float]
    moments: Sequence[Moment]
    roles: tuple[int, int]

    @property
    def best_loss(self) -> float:
        """The lowest finite evaluation loss; infinite without one."""
        losses = [moment.point.values["loss"] for moment in self.moments]
        return min((loss for loss in losses if isfinite(loss)), default=float("inf"))

    def to_target(self, target: Target) -> dict[str, float]:
        """What it took to reach a target: `NAME to target`; empty if it was not reached."""
        found = next((moment for moment in self.moments if target.met(moment.point)), None)
        if found is None:
            return {}
        spent = {"samples": float(found.point.samples), "s": found.seconds, "bytes": found.sent_bytes}
        return {f"{name} to target": value for name, value in spent.items()}


def measure(run: Run) -> Trial:
    """Take the numbers from the records of a whole run.

    Names: `steps`, `samples/s` and `s a step` (all but the first round),
    `idle` (share of the time in which ranks that compute gradients neither did that, nor read, nor updated),
    `bytes a sample` (all ranks), `calls a step` (of rank 0 to others), `steps a round`, `staleness` (mean of
    rounds) and `oldest` (in updates), `memory` (bytes of the largest process), `final NAME`.
    """
    ranks = rank_times(run)
    compute = [rank for rank in ranks if rank.parts["forward"] > 0]
    numbers = {**_speed(run), **_costs(run, ranks, compute), **_age(run), **_finals(run)}
    moments = _moments(run)
    return Trial(numbers, moments, (len(compute), len(ranks) - len(compute)))


def _speed(run: Run) -> dict[str, float]:
    rounds = run.steps[1:] or run.steps
    seconds = sum(number(step["seconds"]) for step in rounds)
    samples = sum(number(step["num_samples"]) for step in rounds)
    first = int(run.steps[0]["step"]) + 1 if len(run.steps) > 1 else 0
    steps = int(run.steps[-1]["step"]) + 1 - first
    return {
        "steps": float(int(run.steps[-1]["step"]) + 1),
        "steps a round": steps / len(rounds),
        "samples/s": samples / seconds,
        "s a step": seconds / steps,
    }


def _costs(run: Run, ranks: Sequence[RankTime], compute: Sequence[RankTime]) -> dict[str, float]:
    found: dict[str, float] = {}
    seconds = sum(rank.seconds for rank in compute)
    if seconds > 0:
        found["idle"] = sum((rank.communication + rank.share("other")) * rank.seconds for rank in compute)
        found["idle"] /= seconds
    samples = sum(number(step["num_samples"]) for step in run.steps)
    if ranks:
        found["bytes a sample"] = sum(number(r["sent_bytes"]) for r in run.of("ranks")) / samples
        found["memory"] = max(rank.peak_bytes for rank in ranks)
    books = run.of("communication")
    if books:
        calls = sum(row["calls"] for row in books[-1]["rows"].values())
        found["calls a step"] = calls / (int(run.steps[-1]["step"]) + 1)
    return found


def _age(run: Run) -> dict[str, float]:
    """A rule whose gradients can be old says how old they were; one that says nothing has none."""
    means = [number(s["metrics"]["staleness"]) for s in run.steps if "staleness" in s["metrics"]]
    most = [number(s["metrics"]["staleness_max"]) for s in run.steps if "staleness_max" in s["metrics"]]
    found = {"staleness": sum(means) / len(means)} if means else {}
    return found | ({"oldest": max(most)} if most else {})


def _finals(run: Run) -> dict[str, float]:
    if not run.evaluations:
        return {}
    last = run.evaluations[-1]
    values = {"loss": last["loss"], **last["metrics"]}
    return {f"final {name}": number(value) for name, value in values.items() if isfinite(number(value))}


def _moments(run: Run) -> list[Moment]:
    sent = sent_bytes(run)
    found = []
    for record in run.evaluations:
        step = int(record["step"])
        before = [s for s in run.steps if int(s["step"]) < step]
        samples = sum(int(s["num_samples"]) for s in before)
        values = {"loss": number(record["loss"])}
        values |= {name: number(value) for name, value in record["metrics"].items()}
        found.append(
            Moment(
                Point(step, samples, values),
                sum(number(s["seconds"]) for s in before),
                sent(step),
            )
        )
    return found
