"""What a run measured, from its metrics.jsonl."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from math import isfinite
from pathlib import Path
from statistics import median
from typing import Any

from paceline.errors import DataError, RecipeError


@dataclass(frozen=True)
class Point:
    """One evaluation.

    Args:
        step, samples: taken before it, since the beginning of the run.
        values: `loss` and the metrics.
    """

    step: int
    samples: int
    values: Mapping[str, float]


@dataclass(frozen=True)
class Target:
    """A value of an evaluation that is to be reached."""

    name: str
    value: float
    upward: bool

    @classmethod
    def parse(cls, text: str) -> Target:
        """Read `loss<=0.3` or `accuracy>=0.95`.

        Raises:
            RecipeError: it is neither.
        """
        found = re.fullmatch(r"\s*(\w+)\s*(<=|>=)\s*([-+.\deE]+)\s*", text)
        if found is None:
            raise RecipeError(
                f"expected NAME<=VALUE or NAME>=VALUE, found {text!r}",
                where="--target",
                next_step='for example --target "accuracy>=0.95", or leave it out',
            )
        return cls(found[1], float(found[3]), found[2] == ">=")

    def __str__(self) -> str:
        return f"{self.name} {'>=' if self.upward else '<='} {self.value:.4g}"

    def met(self, point: Point) -> bool:
        """Has it been reached there?"""
        value = point.values.get(self.name, float("nan"))
        return value >= self.value if self.upward else value <= self.value


@dataclass(frozen=True)
class Measured:
    """One run.

    Args:
        steps, num_samples: taken.
        samples_per_second: the median over all steps but the first.
        seconds: in steps, on rank 0.
        points: its evaluations in order.
    """

    steps: int
    num_samples: int
    samples_per_second: float
    seconds: float
    points: tuple[Point, ...]

    @property
    def best_loss(self) -> float:
        """The lowest finite evaluation loss; infinite without one."""
        losses = [point.values["loss"] for point in self.points]
        return min((loss for loss in losses if isfinite(loss)), default=float("inf"))

    def first(self, target: Target) -> Point | None:
        """The first evaluation that meets a target."""
        return next((point for point in self.points if target.met(point)), None)


def read_run(run_dir: Path) -> Measured:
    """Read what a run wrote; of steps that were done again after a crash the last counts.

    Raises:
        DataError: there is nothing to read.
    """
    path = run_dir / "metrics.jsonl"
    try:
        records = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
    except (OSError, ValueError) as error:
        raise DataError(f"cannot read the measurements of a run: {error}", where=str(path)) from error
    steps = {int(r["step"]): r for r in records if r["event"] == "step"}
    if not steps:
        raise DataError("the run has no steps", where=str(path))
    taken = [steps[i] for i in sorted(steps)]
    points = {int(r["step"]): _point(r, steps) for r in records if r["event"] == "evaluation"}
    return Measured(
        steps=len(taken),
        num_samples=sum(int(r["num_samples"]) for r in taken),
        samples_per_second=median(float(r["samples_per_second"]) for r in taken[1:] or taken),
        seconds=sum(float(r["seconds"]) for r in taken),
        points=tuple(points[step] for step in sorted(points)),
    )


def _point(record: Mapping[str, Any], steps: Mapping[int, Mapping[str, Any]]) -> Point:
    step = int(record["step"])
    samples = sum(int(r["num_samples"]) for i, r in steps.items() if i < step)
    values = {"loss": record["loss"], **record["metrics"]}
    return Point(step, samples, {name: float(value) for name, value in values.items()})
