"""Evaluation in one process, block after block, written apart from `paceline.session.evaluation`.

Shared with it: what blocks there are (of `evaluate.batch` samples, in their order), since a loss may depend
on what is in its batch, and what makes metrics of sums (`finish_metrics`), which is the task's.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn

from paceline.data.loader import to_device
from paceline.data.task_data import read_held_out
from paceline.data.work import MicroBatch
from paceline.recipe.recipe import Recipe
from paceline.session.evaluation import Evaluation
from paceline.task import Loss, Task, finish_metrics, held_out_sets
from paceline.verification.error_bounds import KernelAgreement
from paceline.verification.oracle import Oracle, read_micro_batch


class PlainEvaluation:
    """Evaluates a model as the task of a recipe asks for it.

    Args:
        oracle: in whose autocast and on whose device it runs.
        task: with its own loss, whatever else the oracle is trained on.
    """

    def __init__(self, oracle: Oracle, task: Task, recipe: Recipe) -> None:
        self._oracle, self._task, self._recipe = oracle, task, recipe

    def __call__(self, model: nn.Module, step: int, source: Any = None) -> Evaluation | None:
        """On the held-out data, or on other samples; the model is left in evaluation, as in a run.

        Args:
            step: training steps taken before it.
        Returns:
            None if there is nothing to evaluate on.
        """
        model.eval()
        sets = held_out_sets(self._task.held_out if source is None else source)
        found = {n: self._one(model, step, read_held_out(n, one, self._recipe)) for n, one in sets.items()}
        named = {f"{n}.{key}": v for n, one in found.items() if n for key, v in _metrics_by_name(one).items()}
        return next((replace(one, metrics=named) if n else one for n, one in found.items()), None)

    def _one(self, model: nn.Module, step: int, held_out: Any) -> Evaluation:
        options = self._recipe.evaluate
        num_samples = min(len(held_out), options.max_samples or len(held_out))
        sums: dict[str, float] = {}
        for first in range(0, num_samples, options.batch):
            block = range(first, min(first + options.batch, num_samples))
            for name, value in _loss_sums(self._loss(model, held_out, block)).items():
                sums[name] = sums.get(name, 0.0) + value
        total, count = sums.pop(_TOTAL, 0.0), sums.pop(_COUNT, 0.0)
        means = {name: value / (count or 1.0) for name, value in sums.items()}
        loss = total / (count or 1.0)
        return Evaluation(step, loss, finish_metrics(self._task, loss, count, means), num_samples, count)

    def _loss(self, model: nn.Module, held_out: Any, block: Sequence[int]) -> Loss:
        task = replace(self._task, data=held_out)
        batch = read_micro_batch(task, MicroBatch(0, 0, np.array(block, dtype=np.int64), 0))
        with torch.no_grad(), self._oracle.autocast():
            return task.loss(model, to_device(batch, self._oracle.device))


_TOTAL, _COUNT = "#total", "#count"


def _loss_sums(loss: Loss) -> dict[str, float]:
    metrics = {name: float(value) for name, value in loss.metrics.items()}
    return {_TOTAL: float(loss.total), _COUNT: float(loss.count), **metrics}


class EvaluationValues(NamedTuple):
    """What is compared of an evaluation.

    Args:
        step: the last before it.
        mine: the loss and the metrics by name, each float64 [1]; of other kernels losses only, since one
            rounding may change what is right.
        theirs, bounds: as they should be; None where nobody has looked.
    """

    step: int
    mine: Mapping[str, Tensor]
    theirs: Mapping[str, Tensor] | None
    bounds: Mapping[str, float] | None


def evaluation_values(
    told: Evaluation, found: Evaluation | None, kernels: KernelAgreement
) -> EvaluationValues:
    """An evaluation of the run beside that of one process."""
    same = kernels.same and not kernels.in_parts
    mine = {name: x for name, x in _metrics_by_name(told).items() if same or name.endswith("loss")}
    if found is None:
        return EvaluationValues(told.step - 1, _scalar_tensors(mine), None, None)
    right = {name: x for name, x in _metrics_by_name(found).items() if name in mine}
    bounds = {name: (1e-6 if same else 1e-2) * abs(x) for name, x in right.items()}
    return EvaluationValues(told.step - 1, _scalar_tensors(mine), _scalar_tensors(right), bounds)


def _metrics_by_name(evaluation: Evaluation) -> Mapping[str, float]:
    return {"loss": evaluation.loss, **evaluation.metrics}


def _scalar_tensors(values: Mapping[str, float]) -> Mapping[str, Tensor]:
    return {name: torch.tensor([x], dtype=torch.float64) for name, x in values.items()}
