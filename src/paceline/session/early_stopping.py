"""Early stopping: the best evaluation and how many followed, equal on all ranks and after a resume."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from paceline.errors import RecipeError
from paceline.recipe.recipe import Recipe
from paceline.recipe.tables import EvaluateRecipe
from paceline.recipe.toml_text import closest_word
from paceline.session.evaluation import Evaluation
from paceline.task import Loss, Task, finish_metrics, held_out_sets


def require_metrics(recipe: Recipe, task: Task, probe: Loss) -> None:
    """Require that evaluations have the metrics by which they are compared.

    Args:
        recipe: its `evaluate.metric`, and `schedule.metric` if the rate follows evaluations.
        task: its held-out sets name the metrics, if they are several.
        probe: the loss of a sample, of which only the names of metrics count.
    Raises:
        RecipeError: no evaluation will have one of them, or there will be no evaluation for the schedule.
    """
    keeps = recipe.federated.held_out > 0
    _require_metric("evaluate.metric", recipe.evaluate.metric, task, probe, of_clients=keeps)
    if not recipe.schedule.follows_evaluations:
        return
    if task.held_out is None and not keeps:
        raise RecipeError(
            f'schedule.decay = "{recipe.schedule.decay}" reduces the rate by evaluations, but the task has no'
            " held-out data",
            where="schedule.decay",
            next_step="return Task(..., held_out=...), or choose another decay",
        )
    _require_metric("schedule.metric", recipe.schedule.metric, task, probe, of_clients=keeps)


def _require_metric(key: str, name: str, task: Task, probe: Loss, *, of_clients: bool) -> None:
    if name == "loss" or (task.held_out is None and not of_clients):
        return
    count = float(probe.count)
    means = {metric: float(value) / count for metric, value in probe.metrics.items()}
    try:
        finished = finish_metrics(task, float(probe.total) / count, count, means)
    # Derived metrics may not be defined for a single sample, and their names are known only from a call.
    except (ArithmeticError, LookupError, TypeError, ValueError):
        return
    metrics = ["loss", *finished]
    sets = held_out_sets(task.held_out)
    known = ["loss"] + [f"{held_out}.{m}" if held_out else m for held_out in sets for m in metrics]
    if of_clients:
        known += [f"clients.{m}{suffix}" for m in metrics for suffix in ("", "_worst_decile")]
    if name not in known:
        near = closest_word(name, known)
        raise RecipeError(
            f"evaluations have no metric '{name}'; they have {', '.join(dict.fromkeys(known))}",
            where=key,
            next_step=f"set {key} = \"{near or known[-1]}\", or return '{name}' from the loss",
        )


def value_of_metric(key: str, name: str, evaluation: Evaluation) -> float:
    """Return the loss of an evaluation or one of its metrics.

    Args:
        key: of the recipe, for the error.
        name: of the metric.
    Raises:
        RecipeError: the evaluation lacks the metric.
    """
    values = {"loss": evaluation.loss, **evaluation.metrics}
    if name not in values:
        raise RecipeError(
            f"the evaluation has no metric '{name}'; it has {', '.join(values)}",
            where=key,
            next_step="name one of these, or return it from the loss",
        )
    return values[name]


class EvaluationScores:
    """Scores of the evaluations of a run; lower is better for every metric, since others are negated.

    Args:
        before: scores of the evaluations before a resume, by step.
    """

    def __init__(self, options: EvaluateRecipe, before: Mapping[int, float]) -> None:
        self._options = options
        self._scores = dict(sorted(before.items()))

    def add(self, evaluation: Evaluation) -> float:
        """Add an evaluation and return its score.

        Raises:
            RecipeError: the evaluation lacks the metric that the recipe names.
        """
        value = value_of_metric("evaluate.metric", self._options.metric, evaluation)
        score = value if self._options.better == "lower" else -value
        self._scores[evaluation.step] = score
        return score

    def has(self, step: int) -> bool:
        """Return whether there is an evaluation at a step."""
        return step in self._scores

    def is_over(self) -> bool:
        """Return whether the last `patience` evaluations were no better than one before them."""
        patience = self._options.patience
        return patience > 0 and len(self._scores) > patience and self._since_best() >= patience

    def record(self, step: int) -> dict[str, Any]:
        """Return the event `early-stop`."""
        best = self._best_step()
        score = self._scores[best]
        value = score if self._options.better == "lower" else -score
        return {"step": step, "metric": self._options.metric, "best": float(value), "best_step": best}

    def is_best(self, step: int) -> bool:
        """Return whether the evaluation at a step is the best so far; one equal to an earlier one is not."""
        return bool(self._scores) and step == self._best_step()

    def _best_step(self) -> int:
        # Of equal scores the first is the best: `min` returns the first one.
        return min(self._scores, key=lambda step: self._scores[step])

    def _since_best(self) -> int:
        best = self._best_step()
        return sum(step > best for step in self._scores)
