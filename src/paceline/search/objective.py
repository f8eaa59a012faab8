"""The objective of a study: which number of a run's records it is, and which way is better. Torch-free.

A score is the objective as a number of which lower is better. Invariant: a number that is missing, not
finite or never reached has the score infinity, so that it ranks worst.
"""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, cast

from paceline.errors import RecipeError
from paceline.recipe.toml_text import closest_word
from paceline.report.run_reader import RecordedRun
from paceline.studies.comparison_trials import EvaluationCost, evaluation_costs
from paceline.studies.sweep_summary import MetricTarget, evaluation_points

Direction = Literal["minimize", "maximize"]
Cost = Literal["", "seconds", "samples", "bytes", "steps"]
CurvePoint = tuple[int, float]
"""Steps before an evaluation, and the metric of the objective."""

_COSTS = ("seconds", "samples", "bytes", "steps")
_LOWER_IS_BETTER = ("loss", "perplexity", "error")
_EXAMPLES = 'write "validation accuracy", "validation loss", or "samples to accuracy>=0.95"'


@dataclass(frozen=True)
class Objective:
    """A number of a run.

    Args:
        text: as it was written.
        metric: `loss` or a metric of the evaluations on the validation samples.
        direction: of that number, or of the cost.
        cost: what is counted until the target is reached; empty: the metric at the end of the run counts.
        target: of the cost; None without one.
    """

    text: str
    metric: str
    direction: Direction
    cost: Cost = ""
    target: MetricTarget | None = None

    @classmethod
    def parse(cls, text: str, direction: Direction | None = None, where: str = "") -> Objective:
        """Parse "validation NAME", "seconds to NAME>=VALUE", or "value" for that of a function.

        Raises:
            RecipeError: the text has another form, or names the test set.
        """
        words = text.split()
        if words[:1] and words[0] in ("held_out", "held-out", "test"):
            raise RecipeError(
                f'the objective "{text}" would choose trials by the test set, whose score would then say'
                " nothing"
                " about new data",
                where=where,
                next_step=f'write "validation {" ".join(words[1:]) or "loss"}"; the test set is opened once,'
                " for the winner",
            )
        if text == "value":
            return cls(text, text, direction or "minimize")
        match = re.fullmatch(r"validation ([\w.-]+)", text)
        if match is not None:
            lower = match[1].rpartition(".")[2].endswith(_LOWER_IS_BETTER)
            return cls(text, match[1], direction or ("minimize" if lower else "maximize"))
        match = re.fullmatch(rf"({'|'.join(_COSTS)}) to (.+)", text)
        if match is None:
            near = closest_word(words[0], ("validation", *_COSTS)) if words else None
            raise RecipeError(
                f'the objective "{text}" is none' + (f"; did you mean {near}?" if near else ""),
                where=where,
                next_step=_EXAMPLES,
            )
        if direction == "maximize":
            raise RecipeError("a cost is minimized", where=where, next_step="leave direction out")
        target = MetricTarget.parse(match[2])
        cost = cast(Cost, match[1])
        return cls(text, target.name, "minimize", cost, target)

    def score(self, value: float | None) -> float:
        """Return the score of a value; infinity if there is none."""
        if value is None or not math.isfinite(value):
            return math.inf
        return value if self.direction == "minimize" else -value

    def rung_score(self, value: float) -> float:
        """Return the score of the metric of an evaluation before the end."""
        upward = self.target.upward if self.target is not None else self.direction == "maximize"
        return math.inf if not math.isfinite(value) else -value if upward else value

    def curve(self, run: RecordedRun) -> list[CurvePoint]:
        """Return the metric at every evaluation of a run."""
        return [(point.step, point.values.get(self.metric, math.nan)) for point in evaluation_points(run)]

    def value(self, run: RecordedRun) -> float | None:
        """Return the objective of a complete run; None if the target was not reached."""
        points = evaluation_points(run)
        if self.target is None:
            return points[-1].values.get(self.metric, math.nan) if points else None
        reached = next((cost for cost in evaluation_costs(run) if self.target.met(cost.point)), None)
        return None if reached is None else self._cost(reached)

    def _cost(self, reached: EvaluationCost) -> float:
        costs = {
            "seconds": reached.seconds,
            "samples": float(reached.point.samples),
            "bytes": reached.sent_bytes,
            "steps": float(reached.point.step),
        }
        return costs[self.cost]

    def require_metric(self, metrics: Sequence[str]) -> None:
        """Refuse an objective that no evaluation produces.

        Args:
            metrics: of an evaluation, with the loss.
        Raises:
            RecipeError: the metric is not among them.
        """
        if self.metric not in metrics:
            near = closest_word(self.metric, metrics)
            raise RecipeError(
                f"evaluations have no metric '{self.metric}'; they have {', '.join(metrics)}"
                + (f"; did you mean {near}?" if near else ""),
                where="study.objective",
                next_step="name one of these, or return it from the loss of the task",
            )
